"""Servers with several ranks or replicas: behaviour at their end, and that no process or file is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import children, is_running, wait_until
from tests.support.server_process import ServerProcess

OPTIONS = ("--port", "0", "--dtype", "float32", "--device", "cpu", "--max-model-len", "512", "--max-num-seqs", "32")
THREADS = ("--num-threads", "1")


@pytest.fixture
def temporary(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for the server's files and sockets. Nothing may be left there or in shared memory."""
    monkeypatch.setenv("TMPDIR", str(short_dir))
    before = abandoned_shared_memory()
    yield short_dir
    ours = ("cas-", "compile-and-serve-")
    wait_until(lambda: not any(path.name.startswith(ours) for path in short_dir.iterdir()))
    wait_until(lambda: abandoned_shared_memory() <= before)


def abandoned_shared_memory() -> set[str]:
    """Names in shared memory that no process has mapped. Other programs may use theirs meanwhile."""
    names = set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            names -= {line.rpartition("/dev/shm/")[2] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return names


def metrics(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [further for child in found for further in descendants(child)]


class Streams:
    """Concurrent completions. texts: what has arrived so far. ends: the last events."""

    def __init__(self, server: ServerProcess, count: int, **body: Any) -> None:
        self.texts = [""] * count
        self.ends: list[Any] = [None] * count
        self._server, self._body = server, body
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), self._server.output

    def _run(self, index: int) -> None:
        body = {"prompt": f"{index} is one", "stream": True, "temperature": 0, "ignore_eos": True, **self._body}
        with self._server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.ends[index] = self.ends[index] or data
                elif data and "error" in (event := json.loads(data)):
                    self.ends[index] = event["error"]
                elif data:
                    self.texts[index] += event["choices"][0]["text"]


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.wait()


@pytest.mark.slow  # not exhaustive: a server starts ranks as for users
def test_32_streams_over_two_ranks_and_their_end(tiny_llama_dir: Path, temporary: Path, shared_cache_dir: Path) -> None:
    options = [*OPTIONS, *THREADS, "-tp", "2", "--cache-dir", str(shared_cache_dir), "--shutdown-timeout", "0.2"]
    with started(str(tiny_llama_dir), *options) as server:
        [engine] = server.engine_pids()
        ranks = [pid for pid in children(engine) if "rank_process" in Path(f"/proc/{pid}/cmdline").read_text()]
        assert len(ranks) == 2
        processes = descendants(server.process.pid)
        assert "2 × cpu, float32" in server.output
        streams = Streams(server, 32, max_tokens=450)
        wait_until(lambda: all(streams.texts), 60)
        began = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        streams.wait()
        code = server.wait()
        assert time.monotonic() - began < 10
        reason = "Rank 1 of 2 was ended by signal 9."
        cut_off = [event for event in streams.ends if event != "[DONE]"]  # some may have ended before
        assert cut_off
        assert {(event["message"], event["code"]) for event in cut_off} == {(reason, 503)}
        assert code == 1
        assert f"The engine is dead: {reason}" in server.output
        wait_until(lambda: not any(map(is_running, processes)), 10)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["1"])
@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_a_dead_replica_is_started_again_while_the_other_serves(tiny_llama_dir: Path, temporary: Path, num_processes: str) -> None:
    options = ["--enforce-eager", "-dp", "2", "--api-server-count", num_processes]
    with started(str(tiny_llama_dir), *OPTIONS, *THREADS, *options) as server:
        engines = set(server.engine_pids())
        dead = server.engine_pids()[1]
        assert "2 replicas, each cpu, float32" in server.output
        with server.client() as client:
            os.kill(dead, signal.SIGSTOP)  # so that none of its streams ends before it is killed
            streams = Streams(server, 8, max_tokens=400)
            wait_until(lambda: streams.ends.count("[DONE]") >= 2)  # several processes do not divide them evenly
            assert client.get("/health", timeout=5).status_code == 200  # does not wait for the engine
            os.kill(dead, signal.SIGKILL)
            streams.wait()
            failed = [end for end in streams.ends if end != "[DONE]"]
            assert 0 < len(failed) <= 6
            reason = "Replica 1 of 2: The engine process was ended by signal 9."
            assert {(end["message"], end["code"]) for end in failed} == {(reason, 503)}
            for _ in range(8):  # the other takes them meanwhile
                answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
                assert answer.status_code == 200
            assert client.get("/ready").status_code == 200
            wait_until(lambda: "Replica 1 of 2 serves again." in server.output, 60)
            again = Streams(server, 8, max_tokens=8)
            again.wait()
            assert again.ends == ["[DONE]"] * 8
            assert len(engines & set(server.engine_pids())) == len(engines) - 1
        assert server.stop() == 0


@pytest.mark.exhaustive
def test_replicas_follow_grammars(tiny_llama_dir: Path, temporary: Path) -> None:
    values = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 3, "uniqueItems": True}
    schema = {"type": "object", "properties": {"v": values}, "required": ["v"], "additionalProperties": False}
    structured = {"json": schema, "disable_any_whitespace": True}
    with started(str(tiny_llama_dir), *OPTIONS, *THREADS, "--enforce-eager", "-dp", "2") as server:
        streams = Streams(server, 8, max_tokens=60, temperature=1, structured_outputs=structured)
        with server.client() as client:
            body = {"prompt": "x", "structured_outputs": {"json": {"properties": {"v": {"contains": {}}}}}}
            refused = client.post("/v1/completions", json=body)
            assert (refused.status_code, "(at $.properties.v.contains)" in refused.text) == (400, True)
            streams.wait()
            hits = [f'cas:replica_prefix_cache_queries{{model_name="{tiny_llama_dir}",replica="{r}"}}' for r in "01"]
            assert all(metrics(client)[name] > 0 for name in hits)  # both replicas had requests
    assert streams.ends == ["[DONE]"] * 8
    assert [sorted(json.loads(text)["v"]) for text in streams.texts] == [["a", "b", "c"]] * 8
