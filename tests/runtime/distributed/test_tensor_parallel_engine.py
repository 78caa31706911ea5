"""The engine on two tensor-parallel ranks generates the same tokens as on one rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import RequestOutput
from compile_and_serve.runtime.structured.grammar import to_grammar
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.processes import children, is_running

# Few blocks, so that requests are preempted.
SMALL = {"num_kv_blocks": 40, "max_model_len": 120}
WEIGHTS = {"load_format": "auto"}


@pytest.fixture(scope="module")
def model_dir(tiny_llama_dir: Path) -> Path:
    return tiny_llama_dir


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[RequestOutput]]:
    return run_requests(EngineCore(tiny_config(model_dir, max_model_len=120, **WEIGHTS)), mixed_requests())


@pytest.fixture(scope="module")
def core(model_dir: Path, shared_cache_dir: Path) -> Iterator[EngineCore]:
    core = start(model_dir, shared_cache_dir, 2)
    yield core
    core.shutdown()


@pytest.fixture(scope="module")
def gpu_cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-artifacts")


def start(model_dir: Path, cache_dir: Path, num_ranks: int) -> EngineCore:
    options = {"enforce_eager": False, "cache_dir": cache_dir, "tensor_parallel_size": num_ranks}
    return EngineCore(tiny_config(model_dir, **SMALL, **WEIGHTS, **options))


def test_preempted_and_with_cached_prefixes(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    """`mixed_requests` are greedy and seeded, with penalties, bad words, allowed tokens and logprobs."""
    assert tokens_of(run_requests(core, mixed_requests())) == tokens_of(expected)
    assert core.stats().num_preemptions > 0
    one = mixed_requests()[4]
    for _ in range(2):
        assert tokens_of(run_requests(core, [one])) == {one.request_id: tokens_of(expected)[one.request_id]}
    stats = core.stats()
    assert stats.prefix_cache_hits >= 56
    assert stats.num_free_blocks == stats.num_total_blocks


def test_structured_output_is_that_of_one_rank(core: EngineCore, model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    form = StructuredOutputsParams(compiled=to_grammar(StructuredOutputsParams(regex="([0-9a-f]{2} ){6}"), {}))
    requests = [
        request(
            f"s{seed}",
            prompt_of(seed, 5 + seed),
            temperature=1.0,
            seed=seed,
            max_tokens=60,
            structured_outputs=form,
            eos_token_ids=tokenizer.eos_token_ids,
            stop_token_ids=tokenizer.eos_token_ids,
        )
        for seed in range(4)
    ]
    one_rank = EngineCore(tiny_config(model_dir, max_model_len=120, **WEIGHTS))
    tokens = tokens_of(run_requests(core, requests))
    assert tokens == tokens_of(run_requests(one_rank, requests))
    assert all(re.fullmatch("([0-9a-f]{2} ){6}", tokenizer.decode(ids)) for ids in tokens.values())


def test_logprobs_are_those_of_one_rank(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    outputs = run_requests(core, mixed_requests())
    compared = 0
    for name, steps in expected.items():
        for mine, theirs in zip(outputs[name], steps, strict=True):
            pairs = list(zip(mine.new_logprobs or [], theirs.new_logprobs or [], strict=True))
            pairs += list(zip((mine.prompt_logprobs or [])[1:], (theirs.prompt_logprobs or [])[1:], strict=True))
            for one, other in pairs:
                assert one is not None
                assert other is not None
                assert one.ids == other.ids
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                compared += 1
    assert compared > 40


def test_requests_without_a_seed_draw_the_same_on_every_rank(core: EngineCore, model_dir: Path) -> None:
    requests = [request(f"u{i}", prompt_of(i, 5), temperature=1.5, max_tokens=30) for i in range(4)]
    outputs = tokens_of(run_requests(core, requests))
    assert outputs == tokens_of(run_requests(EngineCore(tiny_config(model_dir, max_model_len=120, **WEIGHTS)), requests))


def test_an_abort_in_the_middle_leaves_the_others_alone(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    requests = mixed_requests()
    for one in requests:
        core.add_request(one)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for _ in range(4):
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    core.abort(["r2", "r4"])
    while core.has_work():
        for output in core.step().outputs:
            assert output.request_id not in ("r2", "r4")
            tokens[output.request_id] += output.new_token_ids
    others = tokens_of(expected).keys() - {"r2", "r4"}
    assert {name: tokens[name] for name in others} == {name: tokens_of(expected)[name] for name in others}


@pytest.mark.exhaustive
def test_four_ranks(model_dir: Path, shared_cache_dir: Path, expected: dict[str, list[RequestOutput]]) -> None:
    """More ranks than key/value heads, so that two ranks hold the same head."""
    core = start(model_dir, shared_cache_dir, 4)
    assert tokens_of(run_requests(core, mixed_requests())) == tokens_of(expected)
    core.shutdown()


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "options",
    [{"cudagraph_mode": "none"}, {}, {"cudagraph_mode": "piecewise"}, {"async_scheduling": False}],
    ids=["no graphs", "graphs", "piecewise", "sync"],
)
def test_two_gpus(model_dir: Path, gpu_cache_dir: Path, options: dict[str, object]) -> None:
    """Two GPUs generate the same tokens as one. Both ranks capture the same graphs as idle tasks."""
    given = {"device": "cuda", "block_size": 16, "num_kv_blocks": 256, "attention_backend": "triton", "cache_dir": gpu_cache_dir}
    one = EngineCore(tiny_config(model_dir, **given))
    expected = tokens_of(run_requests(one, mixed_requests()))
    one.shutdown()
    two = EngineCore(tiny_config(model_dir, tensor_parallel_size=2, **given, **options))
    for _ in range(3):
        assert tokens_of(run_requests(two, mixed_requests())) == expected
        while two.idle():
            pass
    plans = [entry for entry in ArtifactStore(gpu_cache_dir).entries() if entry.kind == "plan"]
    assert len(plans) == 1  # both ranks share it; the single GPU ran eagerly
    two.shutdown()


@pytest.mark.slow
@pytest.mark.multigpu
def test_a_gpu_rank_that_is_killed_ends_the_other(model_dir: Path, gpu_cache_dir: Path) -> None:
    """The other rank waits on its device forever, so only the engine can end it."""
    core = EngineCore(tiny_config(model_dir, device="cuda", block_size=16, tensor_parallel_size=2, cache_dir=gpu_cache_dir))
    ranks = [pid for pid in children(os.getpid()) if "rank_process" in Path(f"/proc/{pid}/cmdline").read_text()]
    for one in mixed_requests():
        core.add_request(one)
    core.step()
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(RankFailedError, match="Rank 1 of 2 was ended by signal 9"):
        [core.step() for _ in range(100)]
    core.shutdown()
    assert not any(is_running(pid) for pid in ranks)
