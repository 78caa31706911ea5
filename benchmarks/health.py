"""How long /health takes beside load: idle, under many streams, and beside bodies of the largest accepted size. Prints JSON lines.

    python -m benchmarks.health [--model smollm2-135m] [--streams 256] [--tokens 64] [--seconds 5] [-- OPTIONS OF serve]

A server of its own is started. /health is asked every 10 ms from another process, so its time includes the wait for a core. Goal: a p99 of
50 ms on two idle cores. `health_p50_ms`, `health_p99_ms`, `health_max_ms`: the times of its answers. `health_statuses`: how often each
status came (0: no answer). `answers`: the statuses of the large bodies' own requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable

import httpx

from benchmarks.common import cpu_name, environment
from tests.support.health_probe import HealthProbe
from tests.support.server_process import ServerProcess

MiB = 1 << 20
BODY = 32 * MiB

# Bodies that take the server longest: many elements, which are counted before they are decoded, and long texts.
BODIES: dict[str, Callable[[], bytes]] = {
    "integers": lambda: b'{"messages":[' + b"0," * (BODY // 2 - 20) + b"0]}",
    "floats": lambda: b'{"messages":[' + b"1.25e-300," * (BODY // 10 - 20) + b"0]}",
    "text": lambda: b'{"prompt":"' + b"word " * (BODY // 5 - 20) + b'"}',
    "emoji": lambda: b'{"prompt":"' + "🙂".encode() * (BODY // 4 - 20) + b'"}',
    "token ids": lambda: b'{"prompt":[' + b"5," * (BODY // 2 - 20) + b"5]}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which the idle server and each body are measured")
    parser.add_argument("options", nargs="*", help="of serve, after --")
    arguments = parser.parse_args()
    options = ["--port", "0", "--max-body-size", f"{BODY // MiB}MiB", "--max-num-seqs", str(arguments.streams)]
    server = ServerProcess(arguments.model, *options, *arguments.options)
    where = {"model": arguments.model, "cpu": cpu_name(), **environment()}
    try:
        asyncio.run(_streams(server.url, 2, 4))  # what the first requests cost once
        with HealthProbe(server.url) as probe:
            time.sleep(arguments.seconds)
        print(json.dumps({"health": "idle", **probe.figures, **where}), flush=True)
        with HealthProbe(server.url) as probe:
            began = time.monotonic()
            asyncio.run(_streams(server.url, arguments.streams, arguments.tokens))
            seconds = round(time.monotonic() - began, 1)
        load = {"streams": arguments.streams, "tokens": arguments.tokens, "seconds": seconds}
        print(json.dumps({"health": "streams", **load, **probe.figures, **where}), flush=True)
        for name, make in BODIES.items():
            body, statuses = make(), set()
            path = "/v1/chat/completions" if body.startswith(b'{"messages') else "/v1/completions"
            end = time.monotonic() + arguments.seconds
            with HealthProbe(server.url) as probe:
                while time.monotonic() < end:
                    headers = {"Content-Type": "application/json"}
                    statuses.add(httpx.post(server.url + path, content=body, headers=headers, timeout=120).status_code)
            print(json.dumps({"health": f"body of {name}", "answers": sorted(statuses), **probe.figures, **where}), flush=True)
    finally:
        server.stop()


async def _streams(url: str, count: int, tokens: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(index: int) -> None:
            body = {"prompt": f"Story {index}: once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_bytes():
                    continue

        await asyncio.gather(*(one(index) for index in range(count)))


if __name__ == "__main__":
    main()
