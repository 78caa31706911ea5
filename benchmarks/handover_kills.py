"""What happens when one side of a pair is killed: `python -m benchmarks.handover kills` and `kills-under-load`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx

_PATIENCE = 60.0  # seconds after which a request is stuck
_START_SECONDS = 240.0


class _Server:
    """A server or a router as a user starts it, on a port that stays the same when it is started again."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "compile_and_serve.serve.cli", *arguments, "--port", str(port)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{' '.join(self._command)} did not start")

    def kill(self) -> None:
        """-9, with its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=30).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"cas:{name}"))


@contextmanager
def _servers(arguments: argparse.Namespace, flags: Sequence[str]) -> Iterator[tuple[_Server, _Server, _Server]]:
    """Two servers that hand requests over, the one that gives first, and `route` before them."""
    transfer = {"kv_connector": "socket", "kv_connector_extra_config": {"lease_seconds": 3, "load_seconds": 2}}
    options = ["serve", arguments.model, "--served-model-name", "m", "--device", "cpu" if arguments.device == "cpu" else "auto", *flags]
    options += ["--kv-transfer-config", json.dumps(transfer), *(["--enforce-eager"] if arguments.eager else [])]
    first, second, third = _free_ports(3)
    giver, taker = _Server(first, *options), _Server(second, *options)
    servers = [giver, taker]
    try:
        for one in servers:
            one.wait()
        route = _Server(third, "route", "--prefill", giver.url, "--decode", taker.url)
        servers.append(route)
        route.wait()
        yield giver, taker, route
    finally:
        for one in servers:
            one.kill()


def kills(arguments: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """Kill and start servers behind `route`; the row to print. arguments: of `benchmarks.handover`. flags: of `serve`."""
    with _servers(arguments, flags) as (giver, taker, route):
        bodies = [_body(number) for number in range(arguments.streams)]
        expected = _expected(taker, bodies)
        began = time.monotonic()
        asyncio.run(_answers(route.url, bodies))
        duration = time.monotonic() - began
        rng, rows = random.Random(0), []
        for number in range(arguments.kills):
            which = number % 2 if arguments.victims == "both" else arguments.victims == "takers"
            victim, other = (taker, giver) if which else (giver, taker)
            ends = asyncio.run(_with_kill(route.url, bodies, expected, victim, rng.random() * duration))
            victim.start()
            victim.wait()
            _wait_until_up(route.url)
            row = {"kill": number, "victim": "taker" if which else "giver", **ends, "is_free": _is_free(other) and _is_free(victim)}
            row["is_well"] = row["is_free"] and not ends.get("stuck") and not ends.get("wrong")
            rows.append(row)
            print(json.dumps(row), flush=True)
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: row.get(name, 0) for name in ("as_expected", "errors", "wrong", "stuck")})
    is_well = all(row["is_well"] for row in rows)
    return {"what": "kills", "victims": arguments.victims, "kills": len(rows), "is_well": is_well, **total}


def kills_under_load(arguments: argparse.Namespace, flags: Sequence[str]) -> dict[str, Any]:
    """The same while requests come all the time, for `arguments.seconds`; the row to print."""
    with _servers(arguments, flags) as (giver, taker, route):
        bodies = [_body(number) for number in range(arguments.streams)]
        expected = _expected(taker, bodies)
        ends, killed = asyncio.run(_kill_under_load(route.url, bodies, expected, [giver, taker], arguments.seconds))
        is_free = _is_free(giver) and _is_free(taker)
    is_well = is_free and not ends["stuck"] and not ends["wrong"] and bool(ends["as_expected"])
    found = {name: ends[name] for name in ("as_expected", "errors", "wrong", "stuck")}
    return {"what": "kills-under-load", "seconds": arguments.seconds, "kills": killed, "is_free": is_free, "is_well": is_well, **found}


async def _kill_under_load(
    url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[str], victims: Sequence[_Server], seconds: float
) -> tuple[Counter[str], int]:
    """→ how requests ended, and how often a server was killed."""
    end, ends, rng, killed = time.monotonic() + seconds, Counter[str](), random.Random(0), 0

    async def stream(http: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < end:
            kind = _kind(await _answer(http, bodies[number]), expected[number])
            ends[kind] += 1
            if kind == "errors":
                await asyncio.sleep(0.1)  # as a client that tries again

    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:
        streams = asyncio.gather(*(stream(http, number) for number in range(len(bodies))))
        while True:
            await asyncio.sleep(rng.uniform(0, 8))
            if time.monotonic() > end:
                break
            victim = rng.choice(victims)
            await asyncio.to_thread(victim.kill)
            killed += 1
            victim.start()
            await asyncio.to_thread(victim.wait)
            await asyncio.to_thread(_wait_until_up, url)
        await streams
    return ends, killed


def _body(number: int) -> dict[str, Any]:
    text = f"{number} " + "once upon a time " * (1 + number * 3 % 11)
    return {"prompt": text, "max_tokens": 96, "temperature": 0.0, "ignore_eos": True, "stream": number % 2 == 1}


def _expected(server: _Server, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of a server that nobody kills."""
    texts = asyncio.run(_answers(server.url, bodies))
    for text in texts:
        if text.startswith(("error: ", "stuck", "wrong: ")):
            raise RuntimeError(f"{server.url} does not answer as it should: {text}")
    return texts


async def _answers(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts; "stuck", or "error: " and why."""
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:
        return list(await asyncio.gather(*(_answer(http, body) for body in bodies)))


async def _answer(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    try:
        if not body["stream"]:
            answer = await http.post("/v1/completions", json=body)
            found = answer.json()
            return str(found["choices"][0]["text"]) if answer.status_code == 200 else f"error: {found['error']['message']}"
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            content = await answer.aread()
    except httpx.TimeoutException:
        return "stuck"
    except httpx.HTTPError as error:
        return f"stuck: the router itself failed: {error}"
    texts, has_ended = [], False
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return f"error: {event['error']['message']}"
            texts.append(event["choices"][0]["text"] if event.get("choices") else "")
        has_ended |= line == b"data: [DONE]"
    if answer.status_code != 200:
        return f"error: {content[:200]!r}"
    return "".join(texts) if has_ended else "wrong: the stream has no end"


async def _with_kill(url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[str], victim: _Server, after: float) -> dict[str, int]:
    answering = asyncio.create_task(_answers(url, bodies))
    await asyncio.sleep(after)
    victim.kill()
    ends: Counter[str] = Counter()
    for found, wanted in zip(await answering, expected, strict=True):
        ends[_kind(found, wanted)] += 1
    return dict(ends)


def _kind(found: str, expected: str) -> str:
    """How a request has ended."""
    if found.startswith("stuck"):
        return "stuck"
    return "as_expected" if found == expected else "errors" if found.startswith("error: ") else "wrong"


def _is_free(server: _Server) -> bool:
    """Whether no request and no lease holds blocks, soon."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if server.metric("kv_cache_usage_perc") == 0 and server.metric("kv_handover_leases{") == 0:
            return True
        time.sleep(0.1)
    return False


def _wait_until_up(route: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = httpx.get(route + "/health", timeout=10).json()
        if all(is_up for kind in found.values() for is_up in kind.values()):
            return
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    import socket

    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
