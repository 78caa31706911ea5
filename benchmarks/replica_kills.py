"""Kill -9 of one of three replicas behind the supervisor, under streams, again and again. Prints a JSON line a kill, and one in the end.

    python -m benchmarks.replica_kills MODEL [--kills 20] [--streams 64] [--replicas 3] [--tokens 400] [flags of serve …]

In turns the server of a replica is killed, whose streams are then cut off, and its engine, whose streams then end with an error event.
`whole`: streams of the others, all of which must end as they should. `cut`, `error_events`, `over_before`: of the killed replica; the last
had ended before, which longer streams (`--tokens`) avoid. `unready_ms`: until /health/readiness said so. `back_s`: until the replica
answered requests again. `others_restarted`: must be 0. The exit status is 1 if anything was not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import environment

_START_SECONDS = 600.0
_PATIENCE = 120.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    arguments, flags = parser.parse_known_args(argv)
    with _Servers(arguments.model, arguments.replicas, flags) as servers:
        rows = [_kill(servers, number, arguments) for number in range(arguments.kills)]
    is_well = all(row["is_well"] for row in rows)
    back = sorted(row["back_s"] for row in rows)
    summary = {"kills": len(rows), "is_well": is_well, "back_s_median": back[len(back) // 2], "back_s_max": back[-1]}
    print(json.dumps({"benchmark": "replica_kills", "model": arguments.model, **summary, **environment()}), flush=True)
    raise SystemExit(not is_well)


class _Servers:
    """The supervisor and its replicas, as a user starts them."""

    def __init__(self, model: str, count: int, flags: Sequence[str]) -> None:
        first, own = _free_ports(count), _free_ports(1)
        self.urls = [f"http://127.0.0.1:{first + index}" for index in range(count)]
        self.supervisor = f"http://127.0.0.1:{own}"
        command = [sys.executable, "-m", "compile_and_serve.serve.cli", "serve", model, "-dp", str(count), "-dpm", "--port", str(first)]
        command += ["--data-parallel-supervisor-port", str(own), "--dp-supervisor-probe-interval-s", "0.5", *flags]
        self._process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)

    def __enter__(self) -> _Servers:
        _wait(self.are_ready, _START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_PATIENCE)

    def are_ready(self) -> bool:
        """Whether all replicas take requests."""
        assert self._process.poll() is None, "the supervisor has ended"
        try:
            return httpx.get(f"{self.supervisor}/health/readiness", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def states(self) -> list[dict[str, Any]]:
        """What the supervisor says of each replica."""
        states: list[dict[str, Any]] = httpx.get(f"{self.supervisor}/health", timeout=30).json()["replicas"]
        return states


class _Streams:
    """Streams of one replica. begun: how many have got a token. ends: how each ended: "done", "error event", or the kind of a failure."""

    def __init__(self, url: str, count: int, tokens: int) -> None:
        self.begun, self.ends = 0, Counter[str]()
        self._lock = threading.Lock()
        self._url, self._tokens = url, tokens
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(_PATIENCE)

    def _run(self, number: int) -> None:
        body = {"prompt": f"Once {number}", "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        end, has_begun = "cut off", False
        try:
            with httpx.Client(timeout=_PATIENCE) as http, http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                for line in _lines(answer):
                    if line == b"data: [DONE]":
                        end = "done"
                    elif line.startswith(b"data: ") and "error" in json.loads(line[6:]):
                        end = "error event"
                        break
                    elif line and not has_begun:
                        has_begun = True
                        with self._lock:
                            self.begun += 1
        except httpx.HTTPError:
            pass
        with self._lock:
            self.ends[end] += 1


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """The lines of an answer. httpx's own also end at separators that texts of random weights contain."""
    rest = b""
    for part in answer.iter_raw():
        *whole, rest = (rest + part).split(b"\n")
        yield from whole


def _kill(servers: _Servers, number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    count = len(servers.urls)
    chosen = random.Random(number).randrange(count)
    shares = [arguments.streams // count + (index < arguments.streams % count) for index in range(count)]
    before = servers.states()
    pid, what = before[chosen]["pid"], "server"
    if number % 2:
        pid, what = _engine_of(pid), "engine"
    streams = [_Streams(url, share, arguments.tokens) for url, share in zip(servers.urls, shares, strict=True)]
    _wait(lambda: all(one.begun == share for one, share in zip(streams, shares, strict=True)), _PATIENCE)
    killed_at = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    _wait(lambda: not servers.are_ready(), _PATIENCE)
    unready = time.perf_counter() - killed_at
    for one in streams:
        one.wait()
    _wait(servers.are_ready, _START_SECONDS)
    answer = httpx.post(f"{servers.urls[chosen]}/v1/completions", json={"prompt": "Once", "max_tokens": 2}, timeout=_PATIENCE)
    back = time.perf_counter() - killed_at
    after = servers.states()
    others = [index for index in range(count) if index != chosen]
    restarted = sum(after[index]["restarts"] - before[index]["restarts"] for index in others)
    restarted += sum(after[index]["pid"] != before[index]["pid"] for index in others)
    whole = sum(streams[index].ends["done"] for index in others)
    ends = streams[chosen].ends
    row = {
        "kill": number,
        "killed": what,
        "replica": chosen,
        "whole": whole,
        "cut": ends["cut off"],
        "error_events": ends["error event"],
        "over_before": ends["done"],
        "unready_ms": round(unready * 1e3),
        "back_s": round(back, 2),
        "others_restarted": restarted,
    }
    row["is_well"] = (
        whole == sum(shares[index] for index in others)
        and ends["cut off" if what == "server" else "error event"] == shares[chosen] - ends["done"] > 0
        and not restarted
        and after[chosen]["restarts"] == before[chosen]["restarts"] + 1
        and answer.status_code == 200
    )
    print(json.dumps(row), flush=True)
    return row


def _engine_of(server: int) -> int:
    """The engine's process of a replica's server."""
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        if "engine.process" in Path(f"/proc/{pid}/cmdline").read_text():
            return int(pid)
    raise AssertionError(f"the server {server} has no engine process")


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing happened in time")
        time.sleep(0.02)


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


if __name__ == "__main__":
    main()
