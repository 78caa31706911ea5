"""Experts spread over ranks that are processes: the tokens are those of one rank, for every family with experts.

Pieces are not compiled, for compiling is not the subject.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.expert_balance import measure, write_skewed
from compile_and_serve.custom_ops.mesh import EXPERT
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.all_families import write_family
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.staged_engine import plugged_in, use_plain_pieces

# A family with a shared expert, and one with latent attention and biases of the choice.
QUICK = ("Qwen2MoeForCausalLM",)
SHARDED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
ALL = (*QUICK, *SHARDED, "Llama4ForCausalLM", "GptOssForCausalLM")
BACKEND = {"Deepseek": {"attention_backend": "torch"}}  # not in the interpreter


@pytest.fixture(scope="module", autouse=True)
def plain_pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plugged_in(tmp_path_factory.mktemp("site"), patch)
        use_plain_pieces(patch)
        yield


def run(folder: Path, **options: Any) -> list[Any]:
    """Tokens of prompts in chunks beside decodes."""
    lengths = (1, 15, 40)
    requests = [
        request(f"r{i}", [(i * 131 + at * at * 7 + at * 31) % 317 + 3 for at in range(length)], max_tokens=16, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    given: dict[str, Any] = {"load_format": "auto", "enforce_eager": False, "use_cache": False, "block_size": 16, "num_kv_blocks": 64}
    core = EngineCore(tiny_config(folder, **given | {"max_model_len": 128, "max_num_batched_tokens": 32} | options))
    try:
        return tokens_of(run_requests(core, requests))
    finally:
        core.shutdown()


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["data"])
@pytest.mark.parametrize("over", ["tensor", "data"])
def test_skewed_routing_is_balanced_beside_steps(over: str, tmp_path: Path) -> None:
    """Half of the pairs go to 5 % of the experts. Weights move in pieces of a move; the tokens are those of one rank."""
    model = write_skewed(tmp_path / "model", 64)
    options: dict[str, Any] = {"use_cache": False, "block_size": 16, "num_kv_blocks": 64}
    found = measure(model, ranks=2, redundant=8, sequences=8, steps=64, over=over, **options)
    assert found["imbalance_before"] > 1.3
    assert found["imbalance_after"] < 1.15
    assert found["tokens_equal"]
    assert found["moves"] >= found["steps_with_moves"] >= 4


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["Qwen2Moe"])
@pytest.mark.parametrize("architecture", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ALL if name not in QUICK)])
def test_ranks_with_experts_of_their_own_say_what_one_rank_says(architecture: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    folder = write_family(tmp_path / "model", architecture)
    options = next((one for name, one in BACKEND.items() if architecture.startswith(name)), {})
    expected = run(folder, **options)
    meshes = [{"data_parallel_size": 2}]  # of groups, the experts of a token are on the ranks of the other
    meshes += [] if architecture in QUICK else [{"tensor_parallel_size": 2}]
    if pytestconfig.getoption("--all-cases"):
        meshes += [{"tensor_parallel_size": 4}, {"data_parallel_size": 2, "tensor_parallel_size": 2}]
    for mesh in meshes:
        assert run(folder, **mesh, enable_expert_parallel=True, **options) == expected, mesh


@pytest.mark.exhaustive
def test_ranks_join_and_leave(tmp_path: Path) -> None:
    """Experts are spread anew each time, while requests run."""
    folder = write_family(tmp_path / "model", "Qwen2MoeForCausalLM")
    options: dict[str, Any] = {"load_format": "auto", "enforce_eager": False, "use_cache": False, "block_size": 16, "num_kv_blocks": 64}
    requests = [
        request(f"r{i}", [(i * 131 + at * at * 7) % 317 + 3 for at in range(9 + 8 * i)], max_tokens=40, ignore_eos=True) for i in range(4)
    ]
    expected = tokens_of(run_requests(EngineCore(tiny_config(folder, **options)), requests))
    core = EngineCore(tiny_config(folder, **options, enable_expert_parallel=True, enable_elastic_ep=True))
    try:
        assert core.elastic is not None
        for size in (2, 1):
            found: dict[str, list[int]] = {one.request_id: [] for one in requests}
            for one in requests:
                core.add_request(one)
            done = core.elastic.scale(size)
            while core.has_work() or not done.done():
                if not core.elastic.holds_steps and not done.done() and any(len(tokens) > 20 for tokens in found.values()):
                    time.sleep(0.05)  # so that requests are left when the new ranks join
                    continue
                for output in core.step().outputs:
                    found[output.request_id] += output.new_token_ids
            done.result()
            assert core.executor.mesh.of_axis(EXPERT) == size
            assert found == expected
    finally:
        core.shutdown()
