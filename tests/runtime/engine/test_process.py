"""The engine in its own process: start, serve, refuse, abort, die, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from compile_and_serve.runtime.engine.client import AsyncEngineClient, SyncEngine
from compile_and_serve.runtime.engine.connection import OUTPUTS_PER_TURN, EngineDeadError, EngineStartError
from compile_and_serve.runtime.engine.engine_socket import RECEIVED_TOKENS, EngineSocket, engine_address
from compile_and_serve.runtime.engine.process import BOOT_CODE
from compile_and_serve.runtime.messages import AddRequest, Sibling
from tests.support.clients import PATIENCE, Reader, reading, until
from tests.support.engines import request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.processes import cpu_seconds, is_running, wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("process") / "tiny")


Started = tuple[AsyncEngineClient, Reader[AsyncEngineClient]]


@contextlib.asynccontextmanager
async def started(model_dir: Path, **options: object) -> AsyncIterator[Started]:
    async with reading(AsyncEngineClient(tiny_config(model_dir, **options))) as reader:
        yield reader.client, reader


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path) -> AsyncIterator[Started]:
    async with started(model_dir, async_scheduling=True) as pair:
        yield pair


def requests_of(prefix: str, count: int) -> list:
    return [request(f"{prefix}{i}", [1 + i, 2, 3], temperature=0.9, seed=i, max_tokens=8 + i % 5) for i in range(count)]


async def test_tokens_are_those_of_the_engine_in_this_process(engine: Started, model_dir: Path) -> None:
    client, reader = engine
    requests = requests_of("same", 12)
    for one in requests:
        await client.add_request(one)
    await reader.finished(*(one.request_id for one in requests))
    local = SyncEngine(tiny_config(model_dir))
    assert local.info == client.info
    expected = tokens_of(run_requests(local.core, requests))
    assert {name: ids for name, ids in tokens_of(reader.outputs).items() if name in expected} == expected
    local.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        local.step()


async def test_64_requests_at_once_leave_no_block_behind(engine: Started) -> None:
    client, reader = engine
    before = await client.utility("stats")
    requests = requests_of("many", 64)
    await asyncio.gather(*(client.add_request(one) for one in requests))
    await reader.finished(*(one.request_id for one in requests))
    after = await client.utility("stats")
    assert after["num_free_blocks"] == before["num_free_blocks"] == before["num_total_blocks"]
    assert after["num_running"] == after["num_waiting"] == 0
    assert client.stats.num_free_blocks == after["num_free_blocks"]


async def test_a_bad_request_comes_back_as_a_sentence_and_leaves_others_alone(engine: Started) -> None:
    client, reader = engine
    good = request("good", [5, 6], max_tokens=20)
    await client.add_request(good)
    await client.add_request(request("bad", [5, 100000]))
    await client.add_request(request("hot", [5], temperature=-9.0))
    await reader.finished("good", "bad", "hot")
    bad = reader.outputs["bad"][-1]
    assert (bad.finish_reason, bad.error_kind) == ("error", "invalid")
    assert bad.error == "The prompt has token id 100000, but the model's ids are 0 to 319."
    assert "temperature must be in [0, 1000000]" in (reader.outputs["hot"][-1].error or "")
    assert len(tokens_of(reader.outputs)["good"]) == 20


async def test_all_sequences_of_a_bad_request_come_back(engine: Started) -> None:
    client, reader = engine
    bad = msgspec.structs.replace(request("refused", [5, 100000]), siblings=[Sibling("refused too")])
    await client.add_request(bad)
    await reader.finished("refused", "refused too")
    assert all("token id 100000" in (reader.outputs[name][-1].error or "") for name in bad.request_ids)


async def test_prompts_are_received_within_a_bound_per_step(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        receiver = EngineSocket(context, str(tmp_path))
        sender.connect(engine_address(str(tmp_path)))
        for number in range(5):
            message = AddRequest(request=request(f"r{number}", [1] * (RECEIVED_TOKENS // 2 - 1)))
            sender.send(msgspec.msgpack.encode(message))
        received: list[str] = []
        counts = []
        assert receiver.wait(60_000)
        time.sleep(0.1)  # until all that was sent has arrived; on a busy machine less is seen, which is no failure
        while len(received) < 5:
            assert receiver.wait(60_000)
            names = [one.request.request_id for _, one in receiver.arrived() if isinstance(one, AddRequest)]
            received += names
            counts.append(len(names))
        assert received == [f"r{number}" for number in range(5)]
        assert max(counts) <= 3
        receiver.close()


async def test_an_abort_frees_the_blocks_of_its_request(engine: Started) -> None:
    client, reader = engine
    await client.add_request(request("long", [9, 9], max_tokens=250))
    await reader.begun("long")
    await client.abort(["long", "never heard of"])
    stats = await client.utility("stats")
    assert stats["num_running"] == 0
    assert stats["num_free_blocks"] == stats["num_total_blocks"]
    assert reader.outputs["long"][-1].finish_reason is None


async def test_utility_calls_are_answered_while_requests_run(engine: Started) -> None:
    client, _ = engine
    await client.add_request(request("busy", [4], max_tokens=200))
    assert await client.utility("ping") == {"ok": True}
    with pytest.raises(ValueError, match="no method 'dance'"):
        await client.utility("dance")
    await client.abort(["busy"])
    assert client.is_alive


async def test_a_client_that_lags_behind_yields_to_other_tasks(engine: Started) -> None:
    """The engine runs ahead while this process does something else."""
    client, reader = engine
    names = [f"ahead{i}" for i in range(16)]
    for number, name in enumerate(names):
        await client.add_request(request(name, [1 + number], max_tokens=200, ignore_eos=True))
    await reader.begun(*names)
    assert client.pid is not None
    before = cpu_seconds(client.pid)
    wait_until(lambda: cpu_seconds(client.pid) - before > 0.05, PATIENCE)  # for two of the 200 steps at least
    counts: list[int] = []

    async def others() -> None:
        while True:
            counts.append(sum(len(reader.outputs[name]) for name in names))
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await reader.finished(*names)
    task.cancel()
    counts.append(sum(len(reader.outputs[name]) for name in names))
    most = max(after - before for before, after in pairwise(counts))
    assert 2 * len(names) <= most <= OUTPUTS_PER_TURN


@pytest.mark.slow
async def test_a_full_queue_is_not_reported_as_a_bad_request(model_dir: Path) -> None:
    async with started(model_dir, max_num_seqs=1, max_waiting=0) as (client, reader):
        await client.add_request(request("first", [1], max_tokens=200))
        await client.add_request(request("second", [2]))
        await reader.finished("first", "second")
        second = reader.outputs["second"][-1]
        assert (second.finish_reason, second.error_kind) == ("error", "overloaded")


@pytest.mark.slow
async def test_the_abort_of_the_last_request_updates_the_stats(model_dir: Path) -> None:
    async with started(model_dir, async_scheduling=False) as (client, reader):
        await client.add_request(request("only", [1], max_tokens=250))
        await reader.begun("only")
        assert client.stats.num_running == 1
        await client.abort(["only"])
        await until(lambda: client.stats.num_running == 0)
        assert client.stats.num_free_blocks == client.stats.num_total_blocks
        assert reader.outputs["only"][-1].finish_reason is None


async def test_shutdown_drains_then_refuses(model_dir: Path) -> None:
    async with started(model_dir) as (client, reader):
        await client.add_request(request("running", [1], max_tokens=100))
        await reader.begun("running")
        assert client.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal and systemd send them: they are for the parent
            os.kill(client.pid, number)
        await asyncio.wait_for(client.shutdown(drain=True), PATIENCE)
        await reader.ended()
        assert reader.error is None
        assert len(tokens_of(reader.outputs)["running"]) == 100
        assert client.exit_status == 0
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="shut"):
            await client.add_request(request("late", [1]))


@pytest.mark.slow
async def test_shutdown_without_drain_ends_running_requests(model_dir: Path) -> None:
    async with started(model_dir) as (client, reader):
        await client.add_request(request("running", [1], max_tokens=250))
        await reader.begun("running")
        await asyncio.wait_for(client.shutdown(drain=False), PATIENCE)
        await reader.ended()
        assert reader.outputs["running"][-1].finish_reason == "abort"
        assert client.exit_status == 0


@pytest.mark.slow
async def test_the_death_of_the_process_wakes_every_waiter(model_dir: Path) -> None:
    async with started(model_dir) as (client, reader):
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)  # so that the call is not answered
        call = asyncio.create_task(client.utility("ping"))
        await asyncio.sleep(0.05)  # the call waits for its answer
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="ended by signal 9"):
            await asyncio.wait_for(call, PATIENCE)
        await reader.ended()
        assert "ended by signal 9" in str(reader.error)
        assert not client.is_alive
        with pytest.raises(EngineDeadError, match="ended by signal 9"):
            await client.add_request(request("late", [1]))


@pytest.mark.slow
async def test_sending_to_a_dead_process_fails(model_dir: Path) -> None:
    """A message sent after the process has ended must not block: its socket has no peer."""
    async with started(model_dir) as (client, _):
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)

        async def abort_repeatedly() -> None:
            while True:
                await asyncio.wait_for(client.abort(["nobody"]), PATIENCE)
                await asyncio.sleep(0)

        with pytest.raises(EngineDeadError):
            await abort_repeatedly()


async def test_a_crash_in_a_step_becomes_one_sentence(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage = textwrap.dedent("""\
        import compile_and_serve.runtime.engine.core
        def step(self):
            raise RuntimeError("kernel exploded\\nwith a long story")
        compile_and_serve.runtime.engine.core.EngineCore.step = step
        main()
    """)
    monkeypatch.setattr("compile_and_serve.runtime.engine.client.BOOT_CODE", BOOT_CODE.removesuffix("main()\n") + sabotage)
    async with started(model_dir) as (client, reader):
        await client.add_request(request("one", [1]))
        await reader.ended()
        assert str(reader.error) == "The engine failed while it computed a step: RuntimeError: kernel exploded"
        await client.shutdown()
        assert client.exit_status == 1


@pytest.mark.slow
async def test_a_start_that_fails_says_why(model_dir: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    client = AsyncEngineClient(tiny_config(model_dir, num_kv_blocks=3), on_stage=lambda stage, seconds, detail: stages.append(stage))
    with pytest.raises(EngineStartError, match="lower --max-model-len or raise --kv-cache-memory"):
        await asyncio.wait_for(client.start(), PATIENCE)
    assert client.exit_status == 1
    assert stages == ["read", "load"]
    assert not client.is_alive
    await client.shutdown()


@pytest.mark.slow
async def test_the_engine_ends_when_its_parent_is_killed(model_dir: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from compile_and_serve.runtime.engine.client import AsyncEngineClient
        from tests.support.engines import tiny_config
        async def main():
            client = AsyncEngineClient(tiny_config(Path({str(model_dir)!r})))
            await client.start()
            print(client.pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    root = Path(__file__).parents[3]
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(asyncio.to_thread(parent.stdout.readline), PATIENCE))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(pid), PATIENCE)
