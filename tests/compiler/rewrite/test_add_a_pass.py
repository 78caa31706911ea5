"""The example in docs/add-a-pass.md runs and does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.rewrite.graph_pass import PassResult
from compile_and_serve.compiler.rewrite.pass_manager import run_passes
from compile_and_serve.custom_ops.attention.attention import attention
from tests.support.rewriting import pass_context
from tests.support.tiny_models import capture_decoder
from tests.support.transformers_models import greedy_tokens, write_random_model

DOC = Path(__file__).resolve().parents[3] / "docs" / "add-a-pass.md"


class UnitScale(nn.Module):
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor], logits_indices: torch.Tensor
    ) -> torch.Tensor:
        x = positions[:, None].float() * 1.0
        y = attention(x[:, None], x[:, None], x[:, None], kv_caches[0], 1.0)[:, 0]
        return ((y * 1) * 2.0)[logits_indices]


def test_the_example_works() -> None:
    code = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), names)
    captured = capture_decoder(UnitScale(), torch.float32, [(1, 1)])
    ctx = pass_context(captured, torch.float32)
    passes = (*default_passes(), names["DropUnitScales"]())
    assert run_passes(captured.gm, passes, ctx)[-1].result == PassResult(matched=2)
    scales = [node.args[1] for node in captured.gm.graph.find_nodes(op="call_function", target=torch.mul)]
    assert scales == [2.0]
    assert run_passes(captured.gm, passes, ctx)[-1].result == PassResult(matched=0)


@pytest.mark.exhaustive
def test_the_example_is_used_by_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says: a file in the current folder, one option."""
    (tmp_path / "my_passes.py").write_text(re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = write_random_model(tmp_path / "model", "LlamaForCausalLM")
    prompt = [5, 17, 200, 31]
    artifacts = []
    for _ in range(2):
        with LLM(
            str(folder),
            dtype="float32",
            model_impl="transformers",
            user_passes=["my_passes:DropUnitScales"],
            cache_dir=tmp_path / "cache",
            num_kv_blocks=16,
            max_num_seqs=2,
            skip_tokenizer_init=True,
            device="cpu",
        ) as llm:
            report = llm.info.compile_report
            greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        assert report["pass_sites.drop_unit_scales.matched"] == 2
        assert [output.outputs[0].token_ids] == greedy_tokens(folder, [prompt], 8)
        artifacts.append(report["artifact"])
    assert artifacts == ["made", "hit"]
