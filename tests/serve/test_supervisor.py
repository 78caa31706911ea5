"""The supervisor of replicas: with stand-ins for their servers, and (slow) with real ones under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.serve.http.listener import ServerStartError
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.supervisor import supervisor as module
from compile_and_serve.serve.supervisor.supervisor import Replica, supervisor_app
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.processes import wait_until
from tests.support.server_process import ServerProcess

# Says that it serves, and answers /health with the status in the file `health-PORT`, or ends where that says "ends".
STAND_IN = """
import http.server, os, pathlib, signal, sys
folder = pathlib.Path({folder!r})
port = {port}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int((folder / "health").read_text()))
        self.end_headers()
    def log_message(self, *args): pass
(folder / "started").open("a").write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
if (folder / "problem").exists():
    os.write(1, b'"Nothing fits into the memory."\\n')
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
os.write(1, b"null\\n")
server.serve_forever()
"""


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            first = one.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@pytest.fixture
def settings() -> ServerSettings:
    return ServerSettings(
        served_model_names=("tiny",), port=free_ports(2), probe_interval=0.02, probe_failures=3, shutdown_timeout=5, admin_routes=True
    )


@pytest.fixture
def replica(settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replica:
    """Replica 1 of 2 of two CUDA devices each, whose server is a stand-in."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "BOOT_CODE", STAND_IN.format(folder=str(tmp_path), port=settings.port + 1))
    (tmp_path / "health").write_text("200")
    return Replica(1, config(tmp_path), settings)


def config(folder: Path) -> EngineConfig:
    made = tiny_config(write_tiny_model(folder / "model"), tensor_parallel_size=2, data_parallel_size=2)
    return replace(made, device="cuda")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_replica_that_was_killed_is_started_again(replica: Replica, tmp_path: Path) -> None:
    await replica.start()
    assert replica.problem is None
    keeping = asyncio.create_task(replica.keep())
    first = replica.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: replica.num_restarts == 1 and replica.state == "serving")
    assert replica.pid not in (None, first)
    assert (tmp_path / "started").read_text() == "2,3\n2,3\n"  # its own devices
    assert await replica.stop()
    await asyncio.wait_for(keeping, 5)
    assert replica.pid is None


async def test_a_replica_that_is_not_well_is_started_again(replica: Replica, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await replica.start()
    keeping = asyncio.create_task(replica.keep())
    (tmp_path / "health").write_text("500")
    await until(lambda: replica.num_restarts == 1)
    (tmp_path / "health").write_text("200")
    await until(lambda: replica.state == "serving" and replica.problem is None)
    assert "Replica 1 of 2" in caplog.text
    assert "answers /health with 500" in caplog.text
    assert "3 times in a row. It is started again." in caplog.text
    await replica.stop()
    await keeping


async def test_a_replica_that_does_not_start_again_is_tried_again(replica: Replica, tmp_path: Path) -> None:
    await replica.start()
    keeping = asyncio.create_task(replica.keep())
    (tmp_path / "problem").touch()
    assert replica.pid is not None
    os.kill(replica.pid, signal.SIGKILL)
    await until(lambda: replica.problem == "did not start: Nothing fits into the memory.")
    (tmp_path / "problem").unlink()
    await until(lambda: replica.state == "serving")
    assert replica.num_restarts == 2
    await replica.stop()
    await keeping


async def test_the_first_start_must_succeed(replica: Replica, tmp_path: Path) -> None:
    (tmp_path / "problem").touch()
    with pytest.raises(ServerStartError, match="Nothing fits into the memory"):
        await replica.start()
    assert replica.pid is None


async def test_routes(replica: Replica, settings: ServerSettings) -> None:
    app = supervisor_app([replica], settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        for path, status in (("/health", 503), ("/health/readiness", 503), ("/health/liveness", 200)):
            assert (await http.get(path)).status_code == status
        await replica.start()
        keeping = asyncio.create_task(replica.keep())
        for path in ("/health", "/health/readiness", "/health/liveness"):
            answer = await http.get(path)
            assert answer.status_code == 200
            told = {"replica": 1, "url": replica.url, "state": "serving", "pid": replica.pid, "restarts": 0}
            assert answer.json() == {"status": "ok", "replicas": [told]}
        assert (await http.post("/restart?replica=7")).status_code == 404
        assert (await http.post("/restart?replica=0")).status_code == 200
        await until(lambda: replica.num_restarts == 1 and replica.state == "serving")
        await replica.stop()
        await keeping
        assert (await http.post("/restart?replica=0")).status_code == 409


async def test_the_restart_needs_the_admin_key(replica: Replica, settings: ServerSettings) -> None:
    app = supervisor_app([replica], replace(settings, api_keys=("user",), admin_keys=("admin",)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        statuses = {}
        for key in ("user", "admin"):
            answer = await http.post("/restart?replica=0", headers={"Authorization": f"Bearer {key}"})
            statuses[key] = answer.status_code
        assert statuses == {"user": 403, "admin": 409}
        assert (await http.get("/health/liveness")).status_code == 200


@pytest.mark.parametrize(("changes", "reason"), [({"port": 0}, "2 ports in a row"), ({"uds": Path("socket")}, "2 ports in a row")])
def test_what_does_not_go_with_it_is_refused(settings: ServerSettings, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ServerStartError, match=reason):
        module.supervise(config(tmp_path), replace(settings, **changes))


@pytest.fixture
def servers(tiny_llama_dir: Path) -> Iterator[tuple[ServerProcess, list[str], str]]:
    """The supervisor of two real servers, their URLs and its own."""
    first, own = free_ports(2), free_ports(1)
    flags = ["-dp", "2", "-dpm", "--port", str(first), "--data-parallel-supervisor-port", str(own)]
    flags += ["--dp-supervisor-probe-interval-s", "0.2", "--served-model-name", "tiny"]
    options = ["--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-model-len", "512", "--num-threads", "1"]
    server = ServerProcess(str(tiny_llama_dir), *flags, *options)
    yield server, [f"http://127.0.0.1:{first + index}" for index in range(2)], f"http://127.0.0.1:{own}"
    assert server.stop() == 0, server.output
    assert "Traceback" not in server.output


@pytest.mark.exhaustive
def test_only_the_streams_of_a_killed_replica_end(servers: tuple[ServerProcess, list[str], str]) -> None:
    _, urls, supervisor = servers
    replicas = httpx.get(f"{supervisor}/health").json()["replicas"]
    ends: dict[int, list[str]] = {0: [], 1: []}

    def stream(index: int) -> None:
        body = {"prompt": "Once", "max_tokens": 490, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=120) as http, http.stream("POST", f"{urls[index]}/v1/completions", json=body) as answer:
            last = ""
            try:
                for line in answer.iter_lines():
                    last = line or last
            except httpx.HTTPError as error:
                last = type(error).__name__
            ends[index].append(last)

    threads = [threading.Thread(target=stream, args=(number % 2,)) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(httpx.get(f"{url}/load").json()["server_load"] == 4 for url in urls))
    os.kill(replicas[1]["pid"], signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{supervisor}/health/readiness").status_code == 503)
    for thread in threads:
        thread.join()
    assert ends[0] == ["data: [DONE]"] * 4
    assert "data: [DONE]" not in ends[1]
    wait_until(lambda: httpx.get(f"{supervisor}/health/readiness").status_code == 200)
    again = httpx.get(f"{supervisor}/health").json()["replicas"]
    assert [one["restarts"] for one in again] == [0, 1]
    assert again[0]["pid"] == replicas[0]["pid"]
    answer = httpx.post(f"{urls[1]}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60)
    assert json.loads(answer.content)["choices"][0]["finish_reason"] == "length"
