"""On several GPUs: experts spread over ranks say what one GPU says, with graphs, with data-parallel attention, and while experts move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.expert_balance import measure, write_skewed
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.all_families import write_family
from tests.support.engines import request, run_requests, tiny_config, tokens_of

pytestmark = pytest.mark.multigpu

SPREAD: dict[str, Any] = {"enable_expert_parallel": True}


def run(folder: Path, cache_dir: Path, **options: Any) -> list[Any]:
    """Tokens of the same requests three times: graphs are captured in between."""
    given: dict[str, Any] = {"load_format": "auto", "enforce_eager": False, "cache_dir": cache_dir, "block_size": 16, "num_kv_blocks": 256}
    given |= {"device": "cuda", "attention_backend": "triton", "max_model_len": 128, "max_num_batched_tokens": 32}
    core = EngineCore(tiny_config(folder, **given | options))
    if "data_parallel_size" in options:
        assert str(core.info.compile_report["token_exchange"]).startswith("over symmetric memory")
    requests = [
        request(f"r{i}", [(i * 131 + at * at * 7 + at * 31) % 317 + 3 for at in range(length)], max_tokens=24, ignore_eos=True)
        for i, length in enumerate((1, 15, 40, 7))
    ]
    try:
        found = []
        for _ in range(3):
            found.append(tokens_of(run_requests(core, requests)))
            while core.idle():
                pass
        return found
    finally:
        core.shutdown()


@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize(
    "over",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tensor"),
        pytest.param({"data_parallel_size": 2}, id="data"),
        pytest.param({"data_parallel_size": 4}, id="data over four", marks=pytest.mark.multigpu(4)),
        pytest.param({"tensor_parallel_size": 2, "data_parallel_size": 2}, id="both", marks=pytest.mark.multigpu(4)),
    ],
)
def test_several_gpus_say_what_one_says(architecture: str, over: dict[str, int], tmp_path: Path) -> None:
    folder = write_family(tmp_path / "model", architecture)
    expected = run(folder, tmp_path / "cache", tensor_parallel_size=1)
    assert run(folder, tmp_path / "cache", **SPREAD, **over) == expected


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.multigpu(4))])
def test_experts_move_between_gpus_without_a_capture(ranks: int, tmp_path: Path) -> None:
    """Steps replay the graphs that there were before, and are not much longer while experts move."""
    model = write_skewed(tmp_path / "model", 64, hidden=1024, layers=8)
    found = measure(model, ranks=ranks, redundant=8, sequences=32, steps=400, device="cuda")
    assert found["imbalance_before"] > 1.3
    assert found["imbalance_after"] < 1.15
    assert found["longest_ms"] < 2 * found["step_ms"], found
