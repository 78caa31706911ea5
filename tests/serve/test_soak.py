"""256 concurrent streams whose clients disconnect at random: nothing leaks. `--soak-seconds 300` for the long run."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.serve.app import create_app
from compile_and_serve.serve.engine.engine import Generation
from compile_and_serve.serve.http.listener import open_socket
from compile_and_serve.serve.server import _Server, _uvicorn_config
from compile_and_serve.serve.settings import ServerSettings
from tests.support.engines import tiny_config, write_tiny_model

CLIENTS = 256


def open_files(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def one_request(port: int, draw: random.Random, counts: dict[str, int]) -> None:
    """A stream that is read to its end, left before its first byte, or left somewhere in it."""
    patience = draw.choice((None, 0.0, draw.uniform(0.0, 0.5)))
    prompt = [draw.randrange(3, 300) for _ in range(draw.randrange(1, 40))]
    fields = {"prompt": prompt, "max_tokens": draw.randrange(1, 64), "stream": draw.random() < 0.9, "ignore_eos": True}
    body = json.dumps({**fields, "n": draw.choice((1, 1, 2))}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        try:
            async with asyncio.timeout(patience):
                answer = await reader.read(-1)
        except TimeoutError:
            counts["left"] += 1
            if draw.random() < 0.5:
                writer.transport.abort()
            return
        status = int(answer.split(b" ", 2)[1])
        assert status in (200, 503), answer[:500]
        if status == 200 and fields["stream"]:
            assert b"data: [DONE]\n\n" in answer
            assert b'"error"' not in answer
        counts["finished" if status == 200 else "refused"] += 1
    finally:
        writer.close()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
async def test_random_disconnects_leak_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--soak-seconds")
    config = tiny_config(write_tiny_model(tmp_path / "model"), max_num_seqs=32, num_kv_blocks=4096, max_waiting=300)
    client = AsyncEngineClient(config)
    await client.start()
    assert client.pid is not None
    settings = ServerSettings(served_model_names=("m",), access_log=False, throughput_log=0.0)
    app = create_app(client, None, settings)
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    web = _Server(_uvicorn_config(app, settings))
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    while not web.started:
        await asyncio.sleep(0.01)
    engine = app.state.context.engine
    draw, counts = random.Random(0), {"left": 0, "finished": 0, "refused": 0}
    end = 0.0

    async def load(once: bool = False) -> None:
        while once or time.monotonic() < end:
            await one_request(port, draw, counts)
            if once:
                return

    async def settle() -> None:
        """Wait until the server is idle, as it must become by itself."""
        limit = time.monotonic() + 60
        while True:
            stats: dict[str, Any] = await client.utility("stats")
            idle = stats["num_running"] == stats["num_waiting"] == engine.num_in_flight == 0
            if idle and not web.server_state.connections and not web.server_state.tasks:
                break
            assert time.monotonic() < limit, (stats, engine.num_in_flight, len(web.server_state.connections))
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        gc.collect()

    await asyncio.gather(*(load(once=True) for _ in range(CLIENTS)))  # what the first requests open for good
    await settle()
    tasks, files = len(asyncio.all_tasks()), (open_files("self"), open_files(client.pid))
    end = time.monotonic() + seconds
    await asyncio.gather(*(load() for _ in range(CLIENTS)))
    await settle()
    assert counts["finished"] > 100, counts
    assert counts["left"] > 100, counts
    stats: dict[str, Any] = await client.utility("stats")
    assert stats["num_free_blocks"] == stats["num_total_blocks"] == 4096
    assert len(asyncio.all_tasks()) == tasks
    assert (open_files("self"), open_files(client.pid)) == files
    assert not [one for one in gc.get_objects() if type(one) is Generation]
    assert await client.utility("reset_prefix_cache") == {"ok": True}
    web.should_exit = True
    await serving
