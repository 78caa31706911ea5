"""Ranks join and leave a running engine, and are started again when one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.engine.elastic import Elastic
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.processes import children

OPTIONS: dict[str, Any] = {"num_kv_blocks": 40, "max_model_len": 120, "max_num_seqs": 4}
CUDA: dict[str, Any] = {"device": "cuda", "block_size": 16, "attention_backend": "triton"}
GRAPHS: dict[str, Any] = CUDA | {"enforce_eager": False, "enable_elastic_ep": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("elastic") / "tiny")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    return tokens_of(run_requests(EngineCore(tiny_config(model_dir, max_model_len=120)), mixed_requests()))


@pytest.fixture(scope="module")
def expected_on_cuda(model_dir: Path) -> dict[str, list[int]]:
    core = EngineCore(tiny_config(model_dir, max_model_len=120, **CUDA))
    try:
        return tokens_of(run_requests(core, mixed_requests()))
    finally:
        core.shutdown()


def elastic_of(core: EngineCore) -> Elastic:
    assert core.elastic is not None
    return core.elastic


class Load:
    """Requests that never stop to come while it `runs`."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._num_rounds = 0

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for one in requests:
            self.outputs[one.request_id] = []
            self.core.add_request(one)

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.outputs[output.request_id].append(output)

    def run_until(self, done: Future[None]) -> None:
        while not done.done():
            if not self.core.has_work():
                self._num_rounds += 1
                again = mixed_requests()
                for one in again:
                    one.request_id += f"-{self._num_rounds}"
                self.add(again)
            self.step()
        done.result()

    def finish(self, expected: dict[str, list[int]]) -> None:
        while self.core.has_work():
            self.step()
        for name, tokens in tokens_of(self.outputs).items():
            assert tokens == expected[name.partition("-")[0]], name


def scale_under_load(core: EngineCore, expected: dict[str, list[int]], sizes: Sequence[int]) -> None:
    for size in sizes:
        load = Load(core)
        load.add(mixed_requests())
        load.step()
        done = elastic_of(core).scale(size)
        assert elastic_of(core).is_scaling
        with pytest.raises(ValueError, match="is being scaled already"):
            elastic_of(core).scale(1)
        load.run_until(done)
        assert core.executor.mesh.data == size
        assert len(children(os.getpid())) >= size
        load.finish(expected)
        assert core.stats().num_total_blocks == size * 40 == core.stats().num_free_blocks
    assert not elastic_of(core).is_scaling


@pytest.mark.slow
def test_a_rank_joins_and_leaves_under_load(model_dir: Path, expected: dict[str, list[int]]) -> None:
    core = EngineCore(tiny_config(model_dir, enable_elastic_ep=True, **OPTIONS))
    try:
        assert elastic_of(core).scale(1).done()
        with pytest.raises(ValueError, match="new_data_parallel_size must be a number of at least 1, got 0"):
            elastic_of(core).scale(0)
        scale_under_load(core, expected, (2, 1))
    finally:
        core.shutdown()


@pytest.mark.exhaustive
def test_two_ranks_become_four_and_two_again(model_dir: Path, expected: dict[str, list[int]]) -> None:
    core = EngineCore(tiny_config(model_dir, enable_elastic_ep=True, data_parallel_attention_size=2, **OPTIONS))
    try:
        scale_under_load(core, expected, (4, 2))
    finally:
        core.shutdown()


@pytest.mark.multigpu
@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((2, 4, 2), marks=pytest.mark.multigpu(4))])
def test_gpus_join_and_leave_under_load(
    sizes: tuple[int, ...], model_dir: Path, tmp_path: Path, expected_on_cuda: dict[str, list[int]]
) -> None:
    core = EngineCore(tiny_config(model_dir, cache_dir=tmp_path, **OPTIONS | GRAPHS))
    try:
        scale_under_load(core, expected_on_cuda, sizes)
    finally:
        core.shutdown()


def kill_a_rank(core: EngineCore, expected: dict[str, list[int]]) -> None:
    """The requests of its group end with a sentence that names it, and those of the other groups go on."""
    sentence = f"Rank 1 of {core.executor.mesh.size} was ended by signal 9"
    try:
        load = Load(core)
        load.add(mixed_requests()[:6])
        load.step()
        os.kill(core.executor._host._processes[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(RankFailedError, match=sentence) as caught:
            load.finish(expected)
        ended = {output.request_id: output for output in elastic_of(core).fail(caught.value).outputs}
        assert 0 < len(ended) < 6
        assert {output.error for output in ended.values()} == {sentence + "."}
        elastic_of(core).restart()
        while core.has_work():
            load.step()
        for name, tokens in tokens_of(load.outputs).items():
            assert tokens == expected[name] or name in ended, name
        one = request("new", prompt_of(2, 16), max_tokens=40, eos_token_ids=[11])
        assert tokens_of(run_requests(core, [one])) == {"new": expected["r2"]}
        with pytest.raises(RankFailedError):
            elastic_of(core).fail(caught.value)
    finally:
        core.shutdown()


@pytest.mark.slow
def test_the_ranks_are_started_again_when_one_is_killed(model_dir: Path, expected: dict[str, list[int]]) -> None:
    kill_a_rank(EngineCore(tiny_config(model_dir, enable_elastic_ep=True, data_parallel_attention_size=2, **OPTIONS)), expected)


@pytest.mark.multigpu
@pytest.mark.parametrize("num_gpus", [2, pytest.param(4, marks=pytest.mark.multigpu(4))])
def test_gpus_are_started_again_when_a_rank_is_killed(
    num_gpus: int, model_dir: Path, tmp_path: Path, expected_on_cuda: dict[str, list[int]]
) -> None:
    options = OPTIONS | GRAPHS | {"data_parallel_attention_size": num_gpus, "cache_dir": tmp_path}
    kill_a_rank(EngineCore(tiny_config(model_dir, **options)), expected_on_cuda)
