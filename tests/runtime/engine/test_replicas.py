"""Replicas behind one client: real engine processes with fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from compile_and_serve.runtime.engine.client import AsyncEngineClient, SyncEngine
from compile_and_serve.runtime.engine.connection import EngineDeadError, EngineStartError
from compile_and_serve.runtime.engine.replicas import DataParallelClient, make_client
from tests.support.clients import PATIENCE, Reader, reading, until
from tests.support.engines import request, tiny_config, write_tiny_model
from tests.support.fake_worker import give_orders, use_fake_workers
from tests.support.processes import is_running


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@contextlib.asynccontextmanager
async def started(model_dir: Path, **options: object) -> AsyncIterator[tuple[DataParallelClient, Reader[DataParallelClient]]]:
    client = make_client(tiny_config(model_dir, **({"data_parallel_size": 2} | options)))
    assert isinstance(client, DataParallelClient)
    async with reading(client) as reader:
        pids = [replica.pid for replica in client.replicas]
        yield client, reader
        await client.shutdown(drain=False)
    assert not any(is_running(pid) for pid in pids if pid is not None)


def prompt(seed: int) -> list[int]:
    return [(seed * 31 + position * position) % 300 for position in range(20)]


async def test_what_can_wait_does_not_run_beside_requests(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with captures and measurements left: between a replica's first and last step, it runs the captures alone that its
    requests asked for. The client knows what is left.
    """
    use_fake_workers(monkeypatch, model_dir, device="cuda", captures="due", idle=150, timeline=str(tmp_path), pause=0.005)
    async with started(model_dir) as (client, reader):
        names = [f"r{i}" for i in range(24)]
        for i, name in enumerate(names):
            await client.add_request(request(name, prompt(i), max_tokens=8 + i))
        await reader.finished(*names)
        assert any(replica.stats.pending_work for replica in client.replicas)  # one may have been ready for long
        await until(lambda: not any(replica.stats.pending_work for replica in client.replicas))
    for replica in range(2):
        done = (tmp_path / f"{replica}-0").read_text().split()
        first, last = done.index("step"), len(done) - 1 - done[::-1].index("step")
        assert "idle" not in done[first:last]
        assert "capture" in done[first:last]
        assert done.count("idle") >= 150


async def test_requests_spread_and_equal_prompts_go_to_the_same_replica(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    use_fake_workers(monkeypatch, model_dir, pause=0.002, devices=str(tmp_path))
    async with started(model_dir) as (client, reader):
        assert [(tmp_path / f"{replica}-0").read_text() for replica in range(2)] == ["3 0", "5 0"]  # one device each
        assert client.is_alive
        assert client.info.num_kv_blocks == 100
        names = [f"r{i}" for i in range(12)]
        for i, name in enumerate(names):
            await client.add_request(request(name, prompt(i), max_tokens=8))
        await reader.finished(*names)
        homes = {name: reader.replicas[name] for name in names}
        assert all(len(home) == 1 for home in homes.values())  # one replica answers a request
        assert sum(home == {0} for home in homes.values()) == 6
        # again, one after another: each goes to the replica that has its prefix
        for i, name in enumerate(names):
            await client.add_request(request("again " + name, prompt(i), max_tokens=2))
            await reader.finished("again " + name)
            assert reader.replicas["again " + name] == homes[name]
            assert reader.outputs["again " + name][0].num_cached_tokens == 16
        stats = await client.utility("stats")
        assert stats["num_total_blocks"] == stats["num_free_blocks"] == 200
        assert stats["prefix_cache_hits"] == 12 * 16
        assert stats["kv_cache_usage"] == 0.0
        assert await client.utility("ping") == {"ok": True}
        assert await client.utility("reset_prefix_cache") == {"ok": True}
        with pytest.raises(ValueError, match="no method 'dance'"):
            await client.utility("dance")


async def test_what_finds_no_room_goes_to_the_replica_that_has_room_first(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, pause=0.004)
    async with started(model_dir, max_num_seqs=1) as (client, reader):
        names = [f"r{i}" for i in range(12)]
        for i, name in enumerate(names):
            await client.add_request(request(name, prompt(i), max_tokens=200 if i == 0 else 4))
        [busy] = [index for index in range(2) if "r0" in client._router.requests_of(index)]
        assert client._held.num_sequences == 8  # each replica runs one and has one ahead
        await client.abort(["r10", "nobody"])
        await reader.finished("r11")
        assert "r0" not in {name for name, outputs in reader.outputs.items() if outputs[-1].finish_reason}
        assert all(reader.replicas[name] == {1 - busy} for name in names[4:10])
        assert "r10" not in reader.outputs
        # sleeping waits for what is held back, too
        for i in range(6):
            await client.add_request(request(f"again{i}", prompt(i), max_tokens=4))
        assert client._held.num_sequences > 0
        await client.utility("sleep", None, {"level": 1, "mode": "wait"})
        await reader.finished("r0", *(f"again{i}" for i in range(6)))
        assert reader.num_held == 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("ending", ["drain", "stop", "kill"])
async def test_requests_without_room_end_with_the_replicas(model_dir: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    use_fake_workers(monkeypatch, model_dir, pause=0.004)
    async with started(model_dir, max_num_seqs=1) as (client, reader):
        names = [f"r{i}" for i in range(8)]
        for i, name in enumerate(names):
            await client.add_request(request(name, prompt(i), max_tokens=40))
        assert client._held.num_sequences == 4
        await client.abort(["r7"])
        if ending == "kill":
            for replica in client.replicas:
                assert replica.pid is not None
                os.kill(replica.pid, signal.SIGKILL)
        else:
            await client.shutdown(drain=ending == "drain")
        await reader.ended()
        expected = {"drain": "length", "stop": "abort", "kill": "error"}[ending]
        assert {reader.outputs[name][-1].finish_reason for name in names[:7]} == {expected}
        assert "r7" not in reader.outputs


async def test_an_abort_goes_to_the_replica_of_its_request(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, pause=0.01)
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 8, "max_waiting": 1}
    async with started(model_dir, **limits) as (client, reader):
        assert (client.info.max_running, client.info.max_in_flight) == (16, 18)
        names = [f"r{i}" for i in range(6)]
        for i, name in enumerate(names):
            await client.add_request(request(name, prompt(i), max_tokens=200))
        await reader.begun(*names)
        await client.abort([*names[:5], "nobody"])
        stats = await client.utility("stats")
        assert stats["num_running"] == 1
        await client.abort(names)
        assert (await client.utility("stats"))["num_running"] == 0
        assert all(outputs[-1].finish_reason is None for outputs in reader.outputs.values())


async def test_a_dead_replica_ends_its_requests_and_is_started_again(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, pause=0.01)
    async with started(model_dir) as (client, reader):
        names = [f"r{i}" for i in range(8)]
        for i, name in enumerate(names):
            await client.add_request(request(name, prompt(i), max_tokens=100))
        await reader.begun(*names)
        dead = client.replicas[1].pid
        assert dead is not None
        os.kill(dead, signal.SIGSTOP)
        probe = asyncio.create_task(client.utility("ping"))  # waits for an answer when the replica dies
        await asyncio.sleep(0.05)
        os.kill(dead, signal.SIGKILL)
        await reader.finished(*names)
        with pytest.raises(EngineDeadError, match="^Replica 1 of 2: The engine process was ended by signal 9"):
            await probe
        reason = "Replica 1 of 2: The engine process was ended by signal 9."
        for name in names:
            last = reader.outputs[name][-1]
            if reader.replicas[name] == {0}:
                assert (last.finish_reason, last.error) == ("length", None)
                assert sum(len(output.new_token_ids) for output in reader.outputs[name]) == 100
            else:
                assert (last.finish_reason, last.error) == ("error", reason)
        assert sum(reader.replicas[name] == {1} for name in names) == 4
        assert client.is_alive
        assert client.health_problem() is None
        folder = client.replicas[1].folder
        await client.add_request(request("late", [1], max_tokens=2))
        await reader.finished("late")
        assert reader.replicas["late"] == {0}
        await until(lambda: not client._down)
        assert client.replicas[1].pid != dead
        assert client.replicas[1].folder == folder
        more = [f"more{i}" for i in range(8)]
        for i, name in enumerate(more):
            await client.add_request(request(name, prompt(i), max_tokens=100))
        await reader.finished(*more)
        assert {index for name in more for index in reader.replicas[name]} == {0, 1}
        assert {reader.outputs[name][-1].finish_reason for name in more} == {"length"}
        assert await client.utility("ping") == {"ok": True}
    assert reader.error is None


async def test_a_replica_that_cannot_come_back_is_tried_again_and_the_last_one_ends_all(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compile_and_serve.runtime.engine.replicas._MAX_DELAY_SECONDS", 0.1)
    use_fake_workers(monkeypatch, model_dir)
    async with started(model_dir) as (client, reader):
        pids = [replica.pid for replica in client.replicas]
        assert pids[0] is not None
        assert pids[1] is not None
        give_orders(model_dir, load={"1/0": "mistake"})
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: client._delays.get(1, 0.0) > 0 and 1 in client._down)
        await asyncio.sleep(0.5)
        await client.add_request(request("a", [1], max_tokens=2))
        await reader.finished("a")
        os.kill(pids[0], signal.SIGKILL)
        await reader.ended()
        assert client.dead_reason == "Replica 0 of 2: The engine process was ended by signal 9."
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="Replica 0 of 2"):
            await client.add_request(request("late", [1]))


async def test_without_restarts_the_first_death_is_the_end(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    client = make_client(tiny_config(model_dir, data_parallel_size=2), restarts=False)
    assert isinstance(client, DataParallelClient)
    async with reading(client):
        assert client.replicas[1].pid is not None
        os.kill(client.replicas[1].pid, signal.SIGKILL)
        await until(lambda: client.dead_reason is not None)
        assert client.dead_reason == "Replica 1 of 2: The engine process was ended by signal 9."
        with pytest.raises(EngineDeadError, match="Replica 1 of 2"):
            await client.utility("ping")
        await client.shutdown(drain=False)


@pytest.mark.slow
async def test_a_rank_of_a_replica_is_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, step={"0": "hang", "1": "kill"})
    async with started(model_dir, tensor_parallel_size=2) as (client, reader):
        await client.add_request(request("a", [1, 2], max_tokens=50))
        await reader.finished("a")
        assert reader.outputs["a"][-1].error == "Replica 0 of 2: Rank 1 of 2 was ended by signal 9."


async def test_a_replica_that_cannot_start_ends_all(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    use_fake_workers(monkeypatch, model_dir, load={"1/0": "mistake"}, until=str(told))
    stages: list[tuple[str, str]] = []

    def on_stage(stage: str, seconds: float, detail: str) -> None:
        stages.append((stage, detail))
        if stage == "load":  # the fake replica fails only after that
            told.touch()

    client = make_client(tiny_config(model_dir, data_parallel_size=3), on_stage)
    assert isinstance(client, DataParallelClient)
    with pytest.raises(EngineStartError, match=r"^Replica 1 of 3: the checkpoint is wrong: take another.$"):
        await asyncio.wait_for(client.start(), PATIENCE)
    assert [stage for stage in stages if stage[0] == "load"] == [("load", "by rank 0")]  # only of the first replica
    assert ("compile", "a piece") in stages
    assert {detail for stage, detail in stages if stage == "compile"} <= {"a piece", "a piece (replica 1)", "a piece (replica 2)"}
    for replica in client.replicas:
        pid = replica.pid
        assert pid is None or not is_running(pid)


async def test_all_dead_ends_the_outputs(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    async with started(model_dir) as (client, reader):
        for replica in client.replicas:
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
        await reader.ended()
        assert "was ended by signal 9" in str(reader.error)


def test_one_replica_is_a_plain_client_and_several_are_not_one_engine(model_dir: Path) -> None:
    assert isinstance(make_client(tiny_config(model_dir)), AsyncEngineClient)
    with pytest.raises(ValueError, match="data_parallel_size is 2, but"):
        SyncEngine(tiny_config(model_dir, data_parallel_size=2))


async def test_the_router_follows_the_replicas_events(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that another client has sent to a replica is known to be there, until the replica's cache is reset."""
    use_fake_workers(monkeypatch, model_dir)
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}
    async with started(model_dir, kv_events_config=events) as (client, _):
        router = client._router

        async def seen() -> int:
            await client.replicas[1].add_request(request(f"other-{time.monotonic()}", prompt(5)))
            await asyncio.sleep(0.05)
            return sum(router._cached_prefixes(router._hashes(request("mine", prompt(5)))))

        async with asyncio.timeout(PATIENCE):
            while not await seen():  # a subscription takes a while
                await client.replicas[1].utility("reset_prefix_cache")
        assert router.route(request("mine", prompt(5))) == 1
        router.finish("mine")
