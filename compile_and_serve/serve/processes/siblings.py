"""The API processes of one server (`--api-server-count`) call each other over Unix sockets, for what concerns all of them.

Each process listens on a socket in a folder that only this user can enter, and answers one call a connection. Requests and tokens do not
pass here: every process has its own connection to the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.serve.http.listener import open_unix_socket
from compile_and_serve.serve.observe.metrics import MetricFamily, sum_families

Answer = Callable[..., Awaitable[Any]]


class SharedState(msgspec.Struct):
    """What a process that is started again must know. num_loads: of adapters, so far."""

    adapters: list[LoRARequest]
    num_loads: int
    is_sleeping: bool


class Siblings:
    """All API processes, the calling one included. folder: where their sockets lie."""

    def __init__(self, folder: Path, count: int) -> None:
        self._sockets = [folder / f"api-{process}" for process in range(count)]

    async def listen(self, process: int, answers: Mapping[str, Answer]) -> asyncio.Server:
        """Answer the calls to a process. answers: by name, functions of the call's arguments."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                name, *arguments = msgspec.msgpack.decode(await reader.read())
                writer.write(msgspec.msgpack.encode(await answers[name](*arguments)))
                await writer.drain()
            finally:
                writer.close()

        return await asyncio.start_unix_server(answer, sock=open_unix_socket(self._sockets[process]))

    async def call(self, name: str, *arguments: Any, besides: int | None = None) -> list[Any]:
        """Call every process at once. → the answers of those that live: one that is being started again asks for the state itself.

        besides: the number of a process that is not called.
        """
        content = msgspec.msgpack.encode([name, *arguments])
        called = [socket for process, socket in enumerate(self._sockets) if process != besides]
        answers = await asyncio.gather(*(_call(socket, content) for socket in called), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, OSError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def ask_first(self, name: str, *arguments: Any) -> Any:
        """Call process 0. Raises `OSError` while it is being started again."""
        return await _call(self._sockets[0], msgspec.msgpack.encode([name, *arguments]))

    async def state(self, process: int) -> SharedState:
        """What the processes besides this one know. Raises `ConnectionError` if none lives."""
        states = await self.call("state", besides=process)
        if not states:
            raise ConnectionError("No other API process lives, so nobody knows the state.")
        return msgspec.convert(states[0], SharedState)

    async def tell(self, name: str, *arguments: Any, timeout: float) -> None:
        """Call every process, and do not mind those that are gone or do not answer in time."""
        content = msgspec.msgpack.encode([name, *arguments])
        calls = asyncio.gather(*(_call(socket, content) for socket in self._sockets), return_exceptions=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(calls, timeout)

    async def metrics(self) -> list[MetricFamily]:
        """The metrics of all processes together."""
        return sum_families(msgspec.convert(await self.call("metrics"), list[list[MetricFamily]]))


async def _call(socket: Path, content: bytes) -> Any:
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(content)
        writer.write_eof()
        answer = await reader.read()
        if not answer:
            raise ConnectionResetError(f"{socket.name} gave no answer; its log has the details.")
        return msgspec.msgpack.decode(answer)
    finally:
        writer.close()
