"""Once an engine has started, nothing is captured, lowered or built any more, whatever the requests are."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.engines import VOCAB_SIZE, request, run_requests, tiny_config, write_tiny_model


def test_serving_never_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of many lengths in chunks, batches that grow and shrink, greedy, random and biased requests, logprobs."""
    model = write_tiny_model(tmp_path / "tiny")
    core = EngineCore(
        tiny_config(
            model,
            device="cpu",
            enforce_eager=False,
            cache_dir=tmp_path / "store",
            max_num_batched_tokens=48,
            num_kv_blocks=256,
            block_size=16,
        )
    )
    before = sorted((tmp_path / "store").rglob("*"))

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is compiled while serving")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", forbidden)
    monkeypatch.setattr("torch._dynamo.convert_frame.compile_frame", forbidden)
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    options: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"top_p": 0.8, "temperature": 1.0, "seed": 2},
        {"logprobs": 2},
        {"temperature": 1.1, "seed": 3, "top_k": 5, "logit_bias": {7: 2.0}},
        {"prompt_logprobs": 1},
    ]
    with torch.compiler.set_stance("fail_on_recompile"):
        for round_number in range(2):
            requests = [
                request(
                    f"{round_number}-{i}",
                    [(i * 37 + j * 11) % VOCAB_SIZE for j in range(1 + 9 * i)],
                    max_tokens=1 + (7 * i) % 23,
                    **options[i % len(options)],
                )
                for i in range(13)
            ]
            outputs = run_requests(core, requests)
            assert len(outputs) >= len(requests)
    assert sorted((tmp_path / "store").rglob("*")) == before
