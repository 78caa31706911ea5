"""A server process with a scripted engine: `python -m tests.support.fake_server [JSON settings]` prints its URL.

`POST /measure` returns free memory to the system. `GET /measure` then returns the longest time in seconds for which the
event loop was blocked since, and the peak of the memory in MB above its level at that time.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
TEXT = "Hello there, 🙂 wörld!"


class FakeServer:
    """The process, for tests. settings: of `ServerSettings`.

    before: Bash commands to run first, such as `ulimit -n 256`. pause: seconds between two tokens. text: the answer to everything.
    """

    def __init__(self, *, before: str = "true", pause: float = 0.0, text: str = TEXT, **settings: Any) -> None:
        arguments = [sys.executable, "-m", "tests.support.fake_server", json.dumps(settings), str(pause), text]
        command = ["bash", "-c", f'{before} && exec "$@"', "bash", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "the server did not start"
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def start_measuring(self) -> None:
        httpx.post(self.url + "/measure", timeout=60).raise_for_status()

    def measured(self) -> tuple[float, float]:
        """(longest time for which the event loop was blocked, in seconds; peak memory, in MB) since `start_measuring`."""
        lag, memory = httpx.get(self.url + "/measure", timeout=60).json()
        return lag, memory


async def _measure_lag(longest: list[float]) -> None:
    # A busy machine delays the loop, too. That time is not counted, because the process does not run meanwhile.
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.001)
        longest[0] = max(longest[0], min(time.perf_counter() - wall, time.process_time() - cpu))


def _memory_peak() -> float:
    """In MB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 / 1e6


async def _serve(settings: dict[str, Any], pause: float, text: str) -> None:
    from compile_and_serve.serve.app import create_app
    from compile_and_serve.serve.server import _Server, _uvicorn_config, open_socket
    from compile_and_serve.serve.settings import ConnectionLimits, ServerSettings
    from tests.support.fake_engine import FakeEngineClient, says
    from tests.support.tokenizers import byte_level_tokenizer

    tokenizer = byte_level_tokenizer([text])
    if "connection_limits" in settings:
        settings["connection_limits"] = ConnectionLimits(**settings["connection_limits"])
    server_settings = ServerSettings(**{"served_model_names": ("test-model",), "access_log": False, **settings})
    app = create_app(FakeEngineClient(tokenizer, says(tokenizer, text), pause=pause), tokenizer, server_settings)
    longest = [0.0]

    idle_memory = [0.0]

    @app.post("/measure")
    async def start_measuring() -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        idle_memory[0] = _memory_peak()
        await asyncio.sleep(0.01)  # so that the time of this collection is not counted
        longest[0] = 0.0

    @app.get("/measure")
    async def measured() -> tuple[float, float]:
        return longest[0], _memory_peak() - idle_memory[0]

    measuring = asyncio.create_task(_measure_lag(longest))
    listener = open_socket("127.0.0.1", 0)
    server = _Server(_uvicorn_config(app, server_settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await serving
    measuring.cancel()


if __name__ == "__main__":
    import uvloop

    given = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(sys.argv[1]).items()}
    uvloop.run(_serve(given, float(sys.argv[2]), sys.argv[3]))
