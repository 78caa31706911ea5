"""One engine process with several clients: real processes, and a client of each kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.connection import EngineConnection, EngineDeadError, EngineFullError
from compile_and_serve.runtime.engine.replicas import DataParallelClient, connect, make_client
from tests.support.clients import PATIENCE, Reader, until
from tests.support.engines import request, tiny_config, tokens_of, write_tiny_model
from tests.support.fake_worker import use_fake_workers


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_tiny_model(tmp_path / "tiny")
    use_fake_workers(monkeypatch, folder, pause=0.005)
    return folder


@contextlib.asynccontextmanager
async def started(model_dir: Path, **options: object) -> AsyncIterator[tuple]:
    """The client that started the engine, and readers of two others."""
    config = tiny_config(model_dir, **options)
    owner = make_client(config)
    await asyncio.wait_for(owner.start(), PATIENCE)
    others = [connect(config, owner.folders, name, num_clients=3) for name in ("api-0", "api-1")]
    try:
        assert [await asyncio.wait_for(other.start(), PATIENCE) for other in others] == [owner.info] * 2
        yield owner, *(Reader(other) for other in others)
    finally:
        await asyncio.gather(*(other.shutdown() for other in others))
        await owner.shutdown(drain=False)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2], ids=["one engine", "two replicas"])
async def test_each_client_gets_the_outputs_of_its_requests(model_dir: Path, size: int) -> None:
    async with started(model_dir, data_parallel_size=size) as (owner, first, second):
        names = [f"r{i}" for i in range(6)]
        for number, name in enumerate(names):
            reader = (first, second)[number % 2]
            await reader.client.add_request(request(name, [number + 1, 2, 3], max_tokens=100, ignore_eos=True))
        await until(lambda: (owner.num_others, first.client.num_others, second.client.num_others) == (6, 3, 3))
        await first.finished(*names[::2])
        await second.finished(*names[1::2])
        assert (first.outputs.keys(), second.outputs.keys()) == (set(names[::2]), set(names[1::2]))
        assert {len(ids) for ids in tokens_of(first.outputs | second.outputs).values()} == {100}
        await until(lambda: not (owner.num_others or first.client.num_others or second.client.num_others))


async def test_an_id_in_use_is_refused_to_the_client_that_uses_it_again(model_dir: Path) -> None:
    async with started(model_dir) as (_, first, second):
        await first.client.add_request(request("same", [1], max_tokens=60, ignore_eos=True))
        await first.client.flush()
        await second.client.add_request(request("same", [1], max_tokens=60))
        await second.finished("same")
        assert second.outputs["same"][-1].error_kind == "invalid"
        await second.client.abort(["same"])  # of another client: ignored
        await first.finished("same")
        assert len(tokens_of(first.outputs)["same"]) == 60


async def test_the_requests_of_a_client_that_is_gone_are_aborted(model_dir: Path) -> None:
    async with started(model_dir) as (owner, first, second):
        for number in range(4):
            await first.client.add_request(request(f"r{number}", [number + 1], max_tokens=250, ignore_eos=True))
        await second.client.add_request(request("other", [9], max_tokens=100, ignore_eos=True))
        await first.begun(*(f"r{number}" for number in range(4)))
        first.client._context.destroy(linger=0)  # as if the process were killed
        await until(lambda: owner.num_others == 1)
        await second.finished("other")
        stats = await second.client.utility("stats")
        assert stats["num_running"] == 0
        assert stats["num_free_blocks"] == stats["num_total_blocks"]


async def test_the_limit_of_requests_is_that_of_all_clients(model_dir: Path) -> None:
    async with started(model_dir, max_num_seqs=1, max_waiting=0) as (_, first, second):
        await first.client.add_request(request("one", [1], max_tokens=100, ignore_eos=True))
        with pytest.raises(EngineFullError, match="1 sequences are running or waiting"):
            await second.client.add_request(request("two", [2]))
        await first.finished("one")
        await second.client.add_request(request("two", [2], max_tokens=2, ignore_eos=True))
        await second.finished("two")
        assert len(tokens_of(second.outputs)["two"]) == 2


@pytest.mark.parametrize("size", [1, 2], ids=["one engine", "two replicas"])
async def test_the_death_of_an_engine_is_passed_on(model_dir: Path, size: int) -> None:
    async with started(model_dir, data_parallel_size=size) as (_, first, second):
        call = asyncio.create_task(first.client.utility("ping"))
        first.client.die("The engine process was ended by signal 9.", range(size))
        await first.ended()
        assert "ended by signal 9" in str(first.error)
        assert "ended by signal 9" in (first.client.health_problem() or "")
        with contextlib.suppress(EngineDeadError):
            await asyncio.wait_for(call, PATIENCE)
        with pytest.raises(EngineDeadError, match="ended by signal 9"):
            await first.client.add_request(request("late", [1]))
        assert second.client.health_problem() is None


async def test_a_single_engine_is_a_plain_connection(model_dir: Path) -> None:
    assert type(connect(tiny_config(model_dir), ["folder"], "api-0", num_clients=1)) is EngineConnection
    assert isinstance(connect(tiny_config(model_dir, data_parallel_size=2), ["a", "b"], "api-0", num_clients=1), DataParallelClient)
    assert isinstance(make_client(tiny_config(model_dir)), AsyncEngineClient)
