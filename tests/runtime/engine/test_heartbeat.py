"""Health by heartbeat, and a client whose reader fails: real engine processes with fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from compile_and_serve.runtime.engine import heartbeat
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.replicas import DataParallelClient, make_client
from compile_and_serve.runtime.messages import StepOutputs
from tests.support.clients import PATIENCE, until
from tests.support.engines import request, tiny_config, write_tiny_model
from tests.support.fake_worker import FAKE_ENGINE_CODE, use_fake_workers


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@contextlib.asynccontextmanager
async def started(model_dir: Path, **options: object) -> AsyncIterator[AsyncEngineClient | DataParallelClient]:
    client = make_client(tiny_config(model_dir, **options))
    await asyncio.wait_for(client.start(), PATIENCE)
    try:
        yield client
    finally:
        await client.shutdown(drain=False, timeout=0.1)
        await client.shutdown(drain=False, timeout=0.1)


async def test_a_silent_engine_is_unhealthy_until_it_beats_again(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    async with started(model_dir) as client:
        assert isinstance(client, AsyncEngineClient)
        assert client.pid is not None
        assert client.health_problem() is None
        os.kill(client.pid, signal.SIGSTOP)
        monkeypatch.setattr(heartbeat, "SILENCE_SECONDS", 3.0)
        began = time.monotonic()
        await until(client.health_problem)
        assert time.monotonic() - began > 3.0 - 2 * heartbeat.HEARTBEAT_SECONDS
        assert re.fullmatch(r"The engine process has sent no heartbeat for \d+ seconds\.", client.health_problem() or "")
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: client.health_problem() is None)
    assert client.health_problem() == "The engine is shutting down."


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("options", "hung", "prefix"),
    [({}, "0", ""), ({"tensor_parallel_size": 2}, "0", ""), ({"data_parallel_size": 2}, "1/0", "Replica 1 of 2: ")],
    ids=["one rank", "two ranks", "two replicas"],
)
async def test_a_hung_rank_is_unhealthy_though_the_engine_beats(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], hung: str, prefix: str
) -> None:
    use_fake_workers(monkeypatch, model_dir, step={hung: "hang"})
    monkeypatch.setattr(heartbeat, "STUCK_SECONDS", 1.5)
    async with started(model_dir, **options) as client:
        assert client.health_problem() is None
        for index in range(2):  # one for each replica
            await client.add_request(request(f"r{index}", [index + 1], max_tokens=8))
        await until(client.health_problem)
        problem = client.health_problem() or ""
        assert problem.startswith(f"{prefix}The engine has been busy with one step or message for ")
        assert problem.endswith(" seconds (limit: 1.5).")
        assert client.dead_reason is None


STUCK_IN_A_CALL = """\
import time
from compile_and_serve.runtime.engine.core import EngineCore
EngineCore.utility = lambda self, *_: time.sleep(1000)
main()
"""


@pytest.mark.slow
async def test_an_engine_that_is_stuck_between_steps_is_unhealthy(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    monkeypatch.setattr("compile_and_serve.runtime.engine.client.BOOT_CODE", FAKE_ENGINE_CODE.removesuffix("main()\n") + STUCK_IN_A_CALL)
    monkeypatch.setattr(heartbeat, "STUCK_SECONDS", 1.5)
    async with started(model_dir) as client:
        await asyncio.sleep(2.0)  # waiting for messages is no work
        assert client.health_problem() is None
        call = asyncio.create_task(client.utility("ping"))
        await until(client.health_problem)
        assert "busy with one step or message" in (client.health_problem() or "")
        call.cancel()


async def test_the_death_of_all_replicas_is_a_health_problem(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    async with started(model_dir, data_parallel_size=2) as client:
        assert isinstance(client, DataParallelClient)
        for replica in client.replicas:
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
        await until(client.health_problem)
        assert (client.health_problem() or "").endswith(" of 2: The engine process was ended by signal 9.")


GARBLED = """\
from compile_and_serve.runtime.engine.engine_socket import EngineSocket
def send_step(self, step):
    for client in self._num_unfinished:
        self._socket.send_multipart([client, b"\\xc1"])
    return []
EngineSocket.send_step = send_step
main()
"""


@pytest.mark.parametrize("size", [1, 2], ids=["one engine", "two replicas"])
async def test_messages_that_cannot_be_read_end_the_engine(model_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    use_fake_workers(monkeypatch, model_dir)
    monkeypatch.setattr("compile_and_serve.runtime.engine.client._EXIT_GRACE_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr("compile_and_serve.runtime.engine.client.BOOT_CODE", FAKE_ENGINE_CODE.removesuffix("main()\n") + GARBLED)
    async with started(model_dir, data_parallel_size=size) as client:
        steps: list[StepOutputs] = []

        async def read() -> None:
            async for step in client.outputs():
                steps.append(step)  # noqa: PERF401 (the loop ends by an error and must keep what came before)

        reader = asyncio.create_task(read())
        call = asyncio.create_task(client.utility("ping"))
        await client.add_request(request("one", [1]))
        if size == 2:
            await client.add_request(request("two", [2]))
        with pytest.raises(EngineDeadError, match="The engine's messages could not be read: DecodeError: "):
            await asyncio.wait_for(reader, PATIENCE)
        await asyncio.wait({call}, timeout=PATIENCE)
        assert call.done()
        call.exception()
        assert "could not be read" in (client.dead_reason or "")
        with pytest.raises(EngineDeadError, match="could not be read"):
            await client.add_request(request("late", [1]))
        if size == 2:
            errors = {output.request_id: output.error for step in steps for output in step.outputs}
            assert errors.keys() == {"one", "two"}
            assert all("could not be read" in (error or "") for error in errors.values())
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE  # the process was killed, and nothing waits for its messages
