"""TLS and the Unix socket, with the server's own uvicorn configuration."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import pytest_asyncio
import uvloop

from compile_and_serve.runtime.config import EngineConfig, ModelConfig
from compile_and_serve.serve import server
from compile_and_serve.serve.http.listener import ServerStartError, open_socket, open_unix_socket
from compile_and_serve.serve.server import _Server, _uvicorn_config
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.tls import TlsSettings
from tests.serve.conftest import ANSWER, StartServer

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates")
Listening = Callable[..., Any]


@pytest.fixture(scope="session")
def event_loop_policy() -> Any:
    return uvloop.EventLoopPolicy()  # what the server runs on


@pytest_asyncio.fixture
async def listening(start_server: StartServer) -> AsyncIterator[Listening]:
    """Serve on a listener: `async with listening(listener, **settings):`."""

    @asynccontextmanager
    async def serve(listener: socket.socket, **settings: Any) -> AsyncIterator[None]:
        app = (await start_server(**settings)).app
        web = _Server(_uvicorn_config(app, app.state.context.settings))
        web.config.lifespan = "off"
        task = asyncio.create_task(web.serve(sockets=[listener]))
        while not web.started:
            await asyncio.sleep(0.005)
        yield
        web.should_exit = True
        await task

    yield serve


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    options = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", *options.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@needs_openssl
async def test_tls_with_a_streamed_answer(listening: Listening, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with listening(listener, tls=TlsSettings(certfile=certificate, keyfile=key)):
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=trusting, base_url=f"https://127.0.0.1:{port}") as http:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
            assert (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"] == ANSWER
            async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
                assert (await response.aread()).endswith(b"data: [DONE]\n\n")
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(f"http://127.0.0.1:{port}/health")


@needs_openssl
async def test_a_client_certificate_can_be_required(listening: Listening, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    client, client_key = make_certificate(tmp_path, "client")
    tls = TlsSettings(certfile=certificate, keyfile=key, ca_certs=client, require_client_certificate=True)
    listener = open_socket("127.0.0.1", 0)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}/health"
    async with listening(listener, tls=tls):
        context = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=context) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get(url)
        context.load_cert_chain(client, client_key)
        async with httpx.AsyncClient(verify=context) as http:
            assert (await http.get(url)).status_code == 200


@needs_openssl
def test_unusable_certificates_are_one_sentence(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other_key = make_certificate(tmp_path, "other")
    (tmp_path / "empty").touch()
    for wrong, message in (
        (TlsSettings(certfile=tmp_path / "missing"), "are not a readable PEM certificate"),
        (TlsSettings(certfile=certificate, keyfile=other_key), "are not a readable PEM certificate"),
        (TlsSettings(certfile=certificate, keyfile=key, ca_certs=tmp_path / "empty"), "--ssl-ca-certs"),
        (TlsSettings(certfile=certificate, keyfile=key, ciphers="none such"), "names no cipher"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong.context()


async def test_unix_socket_that_only_this_user_can_open(listening: Listening, short_dir: Path) -> None:
    path = short_dir / "api.sock"
    async with listening(open_unix_socket(path), uds=path, access_log=True):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            body = {"prompt": "Hi", "max_tokens": 100}
            assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == ANSWER
        with pytest.raises(ServerStartError, match="Another server listens"):
            open_unix_socket(path)


def test_the_socket_of_a_dead_server_is_replaced(short_dir: Path) -> None:
    path = short_dir / "api.sock"
    for _ in range(2):  # closing does not remove the file
        listener = open_unix_socket(path)
        listener.listen()
        listener.close()
        assert path.exists()
    (short_dir / "file").touch()
    for wrong, message in (
        (short_dir / "file", "is not a socket"),
        (short_dir / "none" / "x", "cannot be created"),
        (short_dir / ("x" * 200), "cannot be created"),
    ):
        with pytest.raises(ServerStartError, match=message):
            open_unix_socket(wrong)


def test_a_server_leaves_the_socket_of_the_one_that_replaced_it(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = short_dir / "api.sock"
    replaced: list[socket.socket] = []

    async def ends_while_loading(*arguments: Any) -> int:
        replaced.append(open_unix_socket(path))  # nobody listens on the first one yet
        return 0

    monkeypatch.setattr(server, "_serve", ends_while_loading)
    settings = ServerSettings(served_model_names=("m",), uds=path)
    assert server.run(EngineConfig(model=ModelConfig(model="m", path=short_dir)), settings) == 0
    assert path.exists()
    replaced[0].close()
    monkeypatch.setattr(server, "_serve", AsyncMock(return_value=0))
    assert server.run(EngineConfig(model=ModelConfig(model="m", path=short_dir)), settings) == 0
    assert not path.exists()


START = """\
import sys, time
from pathlib import Path
from compile_and_serve.serve import server
from compile_and_serve.serve.settings import ServerSettings

def load(*_):
    print("loading", flush=True)
    time.sleep(float(sys.argv[3]))

server._loop_factory = load  # as if the model were loaded then: the socket is bound, and nobody listens
where = {"uds": Path(sys.argv[1])} if sys.argv[1] != "-" else {"port": int(sys.argv[2])}
try:
    server.run(None, ServerSettings(served_model_names=("m",), **where))
except ValueError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["port"])
@pytest.mark.parametrize("kind", ["port", "path"])
def test_a_server_that_still_loads_keeps_its_address(short_dir: Path, kind: str) -> None:
    path = short_dir / "socket"
    with open_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    where = [str(path) if kind == "path" else "-", str(port)]

    def start(seconds: float) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", START, *where, str(seconds)], stdout=subprocess.PIPE, text=True)

    with start(60) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "loading\n"
        with start(0) as second:
            assert second.stdout is not None
            assert "another" in second.stdout.read().lower()
        assert kind == "port" or path.exists()
        first.kill()
    with start(60) as third:  # what a dead server left behind keeps nobody out
        assert third.stdout is not None
        assert third.stdout.readline() == "loading\n"
        third.kill()
