"""How a server's child tells the process that started it that it serves, or why it cannot."""

from __future__ import annotations

import asyncio
import os

import msgspec

from compile_and_serve.runtime.child_process import describe_exit
from compile_and_serve.serve.http.listener import ServerStartError


def report(problem: str | None) -> None:
    """Write one line of JSON, the only one on standard output. problem: a sentence; None: the child serves."""
    os.write(1, msgspec.json.encode(problem) + b"\n")
    os.dup2(2, 1)


async def wait_for_report(child: asyncio.subprocess.Process, what: str) -> None:
    """Return once the child serves. Raises `ServerStartError` with its sentence. what: names the child."""
    assert child.stdout is not None
    if not (line := await child.stdout.readline()):
        raise ServerStartError(f"{what} {describe_exit(await child.wait())}.")
    if (problem := msgspec.json.decode(line, type=str | None)) is not None:
        raise ServerStartError(problem)
