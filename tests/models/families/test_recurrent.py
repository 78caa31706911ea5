"""Recurrent and hybrid families: logits beside those of transformers' classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.loaded_checkpoints import load
from tests.support.recurrent_models import FAMILIES, write_recurrent
from tests.support.tiny_models import plain_logits


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_recurrent(tmp_path, architecture)
    reference, spec = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load(folder).spec
    torch.manual_seed(0)
    for length in (1, 15, 16, 17, 130):
        tokens = torch.randint(3, 320, (length,)).tolist()
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        difference = (plain_logits(spec, tokens, torch.float32) - expected).abs().max() / expected.abs().max()
        assert difference < 5e-4, f"{length} tokens: {difference:.1e}"


def test_a_state_that_no_cpu_kernel_takes_is_logged_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_recurrent(tmp_path, "MambaForCausalLM")
    for state_dtype, said in (
        ("auto", "C++"),
        ("bfloat16", "torch reference: the CPU kernel of selective scans takes float32 or bfloat16"),
    ):
        core = EngineCore(tiny_config(folder, load_format="auto", state_dtype=state_dtype, num_kv_blocks=512))
        assert core.executor.worker.loaded.facts["recurrent_kernels"].startswith(said)  # type: ignore[attr-defined]
        assert len(tokens_of(run_requests(core, [request("one", [5, 6, 7], max_tokens=3)]))["one"]) == 3
        core.shutdown()
    assert sum("slow torch reference" in record.message for record in caplog.records) == 1
