"""What the server adds to a token: HTTP, messages between processes, detokenizing. A fake engine gives the tokens. Prints JSON lines.

    python -m benchmarks.server_overhead [--streams 64 1024] [--processes 1 2] [--tokens 200] [--step-ms 50] [--core 0]

All of the server's processes run on one core; engine and client on the others. `api_us`: CPU time of the API processes per streamed
token, in microseconds. `parent_us`: that of the process that starts them, through which no token passes (one API process has no parent).
`tokens_per_s`: what the clients received. `core_share`: of the core's time. One token is one event.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import ROOT, cpu_name, environment
from benchmarks.fake_engine import CORE, STEP_MS

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="API processes")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=50.0, help="between two tokens of a stream")
    parser.add_argument("--core", type=int, default=0, help="of the server")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(arguments.model, arguments.processes[0])
        return
    others = os.sched_getaffinity(0) - {arguments.core} or {arguments.core}
    os.sched_setaffinity(0, others)
    for processes in arguments.processes:
        for streams in arguments.streams:
            figures = _measure(arguments, processes, streams, min(others))
            where = {"step_ms": arguments.step_ms, "cpu": cpu_name(), **environment()}
            print(json.dumps({"streams": streams, "api_processes": processes, **figures, **where}), flush=True)


def _serve(model: str, processes: int) -> None:
    import compile_and_serve.runtime.engine.client as client
    from compile_and_serve.runtime.child_process import boot_code
    from compile_and_serve.runtime.options import make_engine_config
    from compile_and_serve.serve.server import run
    from compile_and_serve.serve.settings import ServerSettings

    client.BOOT_CODE = boot_code("benchmarks.fake_engine")
    settings = ServerSettings(served_model_names=("fake",), port=0, api_server_count=processes, access_log=False, throughput_log=0.0)
    run(make_engine_config(model), settings, on_ready=lambda url, info: print(url, flush=True))


def _measure(arguments: argparse.Namespace, processes: int, streams: int, other_core: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.server_overhead", "--serve", "--processes", str(processes)]
    command += ["--model", arguments.model]
    variables = {**os.environ, STEP_MS: str(arguments.step_ms), CORE: str(other_core), "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT, preexec_fn=lambda: os.sched_setaffinity(0, {arguments.core})
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().strip().rpartition(":")[2])
        api = [pid for pid in _children(server.pid) if "api_process" in Path(f"/proc/{pid}/cmdline").read_text()]
        asyncio.run(_streams(port, 16, 8))  # what the first requests cost once
        before = {pid: _cpu_seconds(pid) for pid in (server.pid, *api)}
        began = time.monotonic()
        asyncio.run(_streams(port, streams, arguments.tokens))
        seconds = time.monotonic() - began
        used = {pid: _cpu_seconds(pid) - before[pid] for pid in before}
    finally:
        server.terminate()
        server.wait(60)
    tokens = streams * arguments.tokens
    in_api = sum(used[pid] for pid in api) if api else used[server.pid]
    return {
        "api_us": round(in_api / tokens * 1e6, 2),
        "parent_us": round(used[server.pid] / tokens * 1e6, 2) if api else 0.0,
        "tokens_per_s": round(tokens / seconds),
        "core_share": round(sum(used.values()) / seconds, 3),
        "seconds": round(seconds, 2),
    }


async def _streams(port: int, count: int, tokens: int) -> None:
    body = json.dumps({"prompt": "Hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        last = b""
        while part := await reader.read(1 << 16):
            last = (last + part)[-64:]
        assert b"data: [DONE]" in last, last
        writer.close()

    await asyncio.gather(*(one() for _ in range(count)))


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


if __name__ == "__main__":
    main()
