"""A real server, abused: wrong bodies, streams that end early, slow clients, a full queue, killed processes, damaged files.

About a minute; `--abuse long` sends 5 000 bodies and damages more files. Each test prints its figures as a JSON
line (`pytest -s`): /health's times as another process saw them, and what was left over afterwards.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from compile_and_serve.serve.cli.main import app
from tests.serve.http.test_hostile_bodies import BODIES, CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE
from tests.serve.processes.test_parallel import abandoned_shared_memory, descendants, metrics
from tests.support.health_probe import HealthProbe
from tests.support.processes import is_running, wait_until
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

OPTIONS = ("--port", "0", "--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-model-len", "512", "--num-threads", "1")
MAX_WAITING = 300
# p99 of /health: 50 ms on two idle cores. The tests' own load shares the cores, so only a wait for the engine is a failure.
MAX_HEALTH_MS = 2000.0
REFUSALS = {400, 404, 405, 413, 415, 422}


@pytest.fixture(scope="module")
def is_long(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--abuse") == "long"


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ServerProcess]:
    limits = ("--max-num-seqs", "64", "--max-waiting", str(MAX_WAITING), "--served-model-name", "tiny")
    server = ServerProcess(str(tiny_llama_dir), *limits, *OPTIONS)
    with server.client() as client:  # what every server allocates once
        for _ in range(3):
            body = {"prompt": "Hi", "max_tokens": 4, "stream": True}
            assert client.post(COMPLETIONS, json=body).status_code == 200
            assert client.post(CHAT, json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).is_success
    yield server
    assert server.stop() == 0, server.output
    assert "Traceback" not in server.output


def address(server: ServerProcess) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return host, int(port)


class Watch:
    """Probes /health inside the `with` block; afterwards checks that nothing was left over, and prints the figures."""

    def __init__(self, server: ServerProcess, name: str, **figures: Any) -> None:
        self.server, self.name, self.figures = server, name, figures
        self.statuses: Counter[int] = Counter()

    def __enter__(self) -> Watch:
        self._before = self._levels()
        self._began = time.monotonic()
        self._probe = HealthProbe(self.server.url).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._probe.__exit__()
        if error[0] is not None:
            return
        self.figures["seconds"] = round(time.monotonic() - self._began, 1)
        with suppress(AssertionError):
            wait_until(self._is_clean, 60)
        self.figures |= self._probe.figures | self._found
        print(json.dumps({"abuse": self.name, **self.figures, "statuses": dict(self.statuses)}))
        assert self._is_clean(), self._found
        assert set(self._probe.statuses) == {200}, self.figures
        assert self.figures["health_p99_ms"] < MAX_HEALTH_MS
        assert not {500, 502} & set(self.statuses), self.server.output[-4000:]

    def _levels(self) -> dict[str, float]:
        api, engines = self.server.process.pid, self.server.engine_pids()
        return {"sockets": _num_sockets(api), "api_mb": _memory(api), "engine_mb": sum(map(_memory, engines))}

    def _is_clean(self) -> bool:
        self._found = self._left()
        found = self._found
        # One socket: the server may not have closed the connection of `_left` yet.
        return found["leaked_sequences"] == 0 and found["leaked_sockets"] <= 1 and found["kv_cache_in_use"] == 0

    def _left(self) -> dict[str, Any]:
        with self.server.client() as client:
            load = client.get("/load").json()["server_load"]
            found = metrics(client)
        now = self._levels()
        running = sum(value for name, value in found.items() if name.startswith(("cas:num_requests_running{", "cas:num_requests_waiting{")))
        usage = sum(value for name, value in found.items() if name.startswith("cas:kv_cache_usage"))
        return {
            "leaked_sequences": load + running,
            "kv_cache_in_use": usage,
            "leaked_sockets": now["sockets"] - self._before["sockets"],
            "api_growth_mb": round(now["api_mb"] - self._before["api_mb"], 1),
            "engine_growth_mb": round(now["engine_mb"] - self._before["engine_mb"], 1),
        }


def _num_sockets(pid: int) -> int:
    """Without the pipes of template processes, which come and go."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            count += os.readlink(file).startswith("socket:")
    return count


def _memory(pid: int) -> float:
    try:
        [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    except (FileNotFoundError, ValueError):  # a process of the template pool that has ended
        return 0.0
    return int(line.split()[1]) * 1024 / 1e6


VALUES: list[Any] = [None, True, 0, -1, 1e308, 2**70, "", "x" * 5000, "\x00", "🙂", [], {}, [[]], [None], {"a": {"b": []}}, [1, "a"], -0.5]
FIELDS = (
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logprobs", "logit_bias", "stream",
    "stream_options", "echo", "tools", "model", "stop_token_ids", "bad_words", "user", "truncate_prompt_tokens", "priority", "cache_salt",
)  # fmt: skip


def make_body(generator: random.Random) -> tuple[str, bytes]:
    """(path, body) of a kind drawn at random; a few are valid."""
    kind = generator.random()
    if kind < 0.04:
        path, make = BODIES[generator.choice(list(BODIES))]
        return path, make()
    path = generator.choice((CHAT, CHAT, COMPLETIONS, COMPLETIONS, TOKENIZE, DETOKENIZE))
    body: dict[str, Any] = {"max_tokens": 3, "model": "tiny"}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi", "tokens": [5, 6]}
    if kind < 0.6:
        for field in generator.sample(FIELDS, generator.randint(1, 2)):
            body[field] = generator.choice(VALUES)
        if "n" in body and isinstance(body["n"], int):
            body["n"] = min(body["n"], 4)
    raw = bytearray(json.dumps(body).encode())
    if 0.6 <= kind < 0.9:
        for _ in range(generator.randint(1, 3)):
            raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
    elif kind >= 0.9:
        raw = raw[: generator.randrange(len(raw))] + generator.randbytes(generator.choice((0, 1, 50)))
    return path, bytes(raw)


@pytest.mark.exhaustive
def test_bodies_of_every_kind(server: ServerProcess, is_long: bool) -> None:
    count, generator = (5000 if is_long else 300), random.Random(5)
    seeds = [generator.random() for _ in range(count)]

    def send(seed: float) -> int:
        path, body = make_body(random.Random(seed))
        with httpx.Client(base_url=server.url, timeout=300) as client:
            return client.post(path, content=body, headers={"Content-Type": "application/json"}).status_code

    with Watch(server, "bodies", bodies=count) as watch, ThreadPoolExecutor(8) as pool:
        watch.statuses.update(pool.map(send, seeds))
    assert set(watch.statuses) <= {200, *REFUSALS}
    assert len(watch.statuses) > 2


async def _stream(server: ServerProcess, index: int, leave_after: int | None) -> int:
    """A stream's status; 0 if the client left after that many bytes, -1 if the stream ended before [DONE]."""
    body = json.dumps({"prompt": f"{index} times", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*address(server))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    received = 0
    tail = b""
    status = -1
    try:
        while data := await reader.read(1 << 14):
            if status < 0 and received == 0:
                status = int(data.split(None, 2)[1])
            received += len(data)
            tail = (tail + data)[-200:]
            if status != 200 or b"[DONE]" in tail:
                return status
            if leave_after is not None and received > leave_after:
                return 0
        return -1
    finally:
        writer.transport.abort()


def test_streams_with_disconnects(server: ServerProcess, is_long: bool) -> None:
    generator = random.Random(6)
    num_streams = 256 if is_long else 128
    leaving = [generator.randrange(20_000) if generator.random() < 0.5 else None for _ in range(num_streams)]

    async def run() -> list[int]:
        return await asyncio.gather(*(_stream(server, i, leave) for i, leave in enumerate(leaving)))

    with Watch(server, "streams with disconnects", streams=num_streams) as watch:
        watch.statuses.update(asyncio.run(run()))
    assert set(watch.statuses) == {0, 200}
    assert watch.statuses[200] >= leaving.count(None)


def test_slow_clients(server: ServerProcess) -> None:
    """Half headers, half bodies and unread streams delay nobody else."""
    beginnings = [
        b"GET /health HTT",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{",
    ]
    body = b'{"prompt": "Hi", "max_tokens": 300, "ignore_eos": true, "stream": true}'
    unread = beginnings[1] + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with Watch(server, "slow clients", connections=120) as watch:
        sockets = [socket.create_connection(address(server)) for _ in range(120)]
        try:
            for i, connection in enumerate(sockets):
                connection.sendall(unread if i % 6 == 0 else beginnings[i % 3])
            with server.client() as client:
                for _ in range(10):
                    for connection in sockets[1::6]:
                        connection.sendall(b"x")
                    answer = client.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 5})
                    watch.statuses[answer.status_code] += 1
        finally:
            for connection in sockets:
                connection.close()
    assert set(watch.statuses) == {200}


def test_full_queue(server: ServerProcess) -> None:
    """What does not fit is refused at once with 503 and Retry-After; everything else is answered."""
    count, clients = 2 * (MAX_WAITING + 64), 200
    # So that the first requests come at once, however slow this process is.
    all_are_connected = threading.Barrier(clients)

    def send(index: int) -> tuple[int, bool]:
        connection = http.client.HTTPConnection(*address(server), timeout=120)
        body = json.dumps({"prompt": f"{index}", "max_tokens": 20, "ignore_eos": True, "n": 4})
        if index < clients:
            connection.connect()
            all_are_connected.wait(60)
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, response.getheader("retry-after") is not None

    with Watch(server, "full queue", requests=count, sequences_each=4) as watch, ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(send, range(count)))
        watch.statuses.update(status for status, _ in answers)
    assert set(watch.statuses) == {200, 503}
    assert all(has_retry == (status == 503) for status, has_retry in answers)


@pytest.mark.parametrize("victim", ["api", "template"])
@pytest.mark.exhaustive_cases(but=["api"])
def test_a_killed_process_leaves_nothing(tiny_llama_dir: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """test_parallel.py and test_end_to_end.py kill engines and ranks."""
    monkeypatch.setenv("TMPDIR", str(short_dir))
    before = abandoned_shared_memory()
    server = ServerProcess(str(tiny_llama_dir), *OPTIONS, "--shutdown-timeout", "1")
    try:
        with server.client() as client:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert client.post(CHAT, json=body).status_code == 200  # starts a template process
            children = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(server.process.pid)}
            if victim == "template":
                os.kill(next(pid for pid, line in children.items() if "template_worker" in line), signal.SIGKILL)
                wait_until(lambda: client.post(CHAT, json=body).status_code == 200, 10)
                assert client.get("/health").status_code == 200
                assert server.stop() == 0
            else:
                server.process.kill()
                assert server.wait() == -signal.SIGKILL
        wait_until(lambda: not any(map(is_running, children)), 30)
        ours = ("cas-", "compile-and-serve-")
        wait_until(lambda: not [path for path in short_dir.iterdir() if path.name.startswith(ours)])
        wait_until(lambda: abandoned_shared_memory() <= before)
    finally:
        server.process.kill()
        server.wait()


def damage(file: Path, generator: random.Random) -> str:
    """Damage a file at random. → how"""
    kind = generator.choice(("empty", "cut", "bit", "bit", "noise", "folder", "missing"))
    content = bytearray(file.read_bytes())
    if kind == "empty" or (not content and kind in ("cut", "bit", "noise")):
        content = bytearray()
    elif kind == "cut":
        content = content[: generator.randrange(len(content))]
    elif kind == "bit":
        content[generator.randrange(min(len(content), 20_000))] ^= 1 << generator.randrange(8)
    elif kind == "noise":
        at = generator.randrange(len(content))
        content[at : at + 64] = generator.randbytes(64)
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind != "missing":
        file.write_bytes(content)
    return kind


def generate(model: Path, *options: str) -> tuple[int, str, str]:
    """(exit code, answer, log) of `generate`. Nothing but an exit may be raised."""
    engine = ("--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--num-threads", "1")
    result = CliRunner().invoke(app, ["generate", str(model), "the one", "--max-tokens", "4", *engine, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), (result.exception, result.stderr)
    return result.exit_code, result.stdout, result.stderr


def test_damaged_model_files(tiny_llama_dir: Path, tmp_path: Path, is_long: bool) -> None:
    """Each is refused with a sentence, or does not matter."""
    generator, outcomes = random.Random(7), Counter[str]()
    for number in range(200 if is_long else 12):
        model = tmp_path / "model"
        shutil.copytree(tiny_llama_dir, model)
        file = generator.choice(sorted(path for path in model.iterdir() if path.is_file()))
        kind = damage(file, generator)
        code, _, log = generate(model, "--eager")
        assert code in (0, 1, 2), (number, file.name, kind, log)
        assert "Traceback" not in log, (number, file.name, kind, log)
        outcomes["answered" if code == 0 else "refused"] += 1
        shutil.rmtree(model)
    print(json.dumps({"abuse": "damaged model files", **outcomes}))


@pytest.mark.exhaustive
def test_damaged_cache_files(tiny_llama_dir: Path, tmp_path: Path, is_long: bool) -> None:
    """Everything in the cache is rebuilt or ignored: the answer is the same."""
    store = tmp_path / "store"
    code, answer, log = generate(tiny_llama_dir, "--cache-dir", str(store))
    assert code == 0, log
    whole = tmp_path / "whole"
    shutil.copytree(store, whole)
    generator = random.Random(8)
    for number in range(60 if is_long else 3):
        shutil.rmtree(store)
        shutil.copytree(whole, store)
        file = generator.choice(sorted(path for path in store.rglob("*") if path.is_file()))
        kind = damage(file, generator)
        code, found, log = generate(tiny_llama_dir, "--cache-dir", str(store))
        assert code == 0, (number, file, kind, log)
        assert found == answer, (number, file, kind, log)
    print(json.dumps({"abuse": "damaged cache files", "rebuilt or ignored": number + 1}))
