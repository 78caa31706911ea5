"""What the clients of an engine hear, and waiting for it. Waits are long: on a busy machine a process starts slowly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

from compile_and_serve.runtime.engine.connection import EngineConnection, EngineDeadError
from compile_and_serve.runtime.engine.replicas import DataParallelClient
from compile_and_serve.runtime.messages import RequestOutput

PATIENCE = 90.0  # seconds until a wait counts as a hang
Client = TypeVar("Client", bound=EngineConnection | DataParallelClient)


class Reader(Generic[Client]):
    """Collects a client's outputs in a task. replicas: request id → indices of the replicas that answered it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.replicas: dict[str, set[int]] = {}
        self.num_held = 0  # as replica 0 reported last
        self.error: EngineDeadError | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async for step in self.client.outputs():
                if step.stats is not None and step.replica == 0:
                    self.num_held = step.stats.num_held
                for output in step.outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
                    self.replicas.setdefault(output.request_id, set()).add(step.replica)
        except EngineDeadError as error:
            self.error = error

    async def begun(self, *names: str) -> None:
        await until(lambda: all(name in self.outputs for name in names))

    async def finished(self, *names: str) -> None:
        await until(lambda: all(name in self.outputs and self.outputs[name][-1].finish_reason for name in names))

    async def ended(self) -> None:
        """The client says that there is nothing more to hear."""
        await asyncio.wait_for(self.task, PATIENCE)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def reading(client: Client) -> AsyncIterator[Reader[Client]]:
    """A client that is started, with its reader, and shut down at the end."""
    await asyncio.wait_for(client.start(), PATIENCE)
    reader = Reader(client)
    try:
        yield reader
    finally:
        await client.shutdown(drain=False)
        await reader.ended()
