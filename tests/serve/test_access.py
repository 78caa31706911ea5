"""Who may use which routes: API keys, the admin key, web pages; and that keys do not show in the process list."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import StartServer

ROOT = Path(__file__).parents[2]
UNLOAD = "/v1/unload_lora_adapter"
ORIGIN = {"Origin": "https://app.example"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), ("user", 403), ("admin", 404), ("second admin", 404)])
async def test_the_admin_key_alone_opens_admin_routes(start_server: StartServer, tmp_path: Path, key: str | None, status: int) -> None:
    server = await start_server(api_keys=("user",), admin_keys=("admin", "second admin"), lora_dir=tmp_path)
    response = await server.http.post(UNLOAD, json={"lora_name": "x"}, headers=bearer(key) if key else {})
    assert response.status_code == status  # 404: there is no such adapter
    assert response.json()["error"]["code"] == status


@pytest.mark.parametrize("prefix", ["/", "/proxy", "/proxy/"])
async def test_the_admin_key_is_needed_behind_a_proxy(start_server: StartServer, tmp_path: Path, prefix: str) -> None:
    server = await start_server(api_keys=("user",), admin_keys=("admin",), lora_dir=tmp_path, root_path=prefix)
    for key, status in (("user", 403), ("admin", 404)):
        response = await server.http.post(UNLOAD, json={"lora_name": "x"}, headers=bearer(key))
        assert response.status_code == status
    assert (await server.http.get("/health")).status_code == 200


async def test_the_admin_key_opens_everything_else_too(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(api_keys=("user",), admin_keys=("admin",), lora_dir=tmp_path)
    for key, status in (("user", 200), ("admin", 200), ("other", 401)):
        assert (await server.http.get("/v1/models", headers=bearer(key))).status_code == status


async def test_an_admin_key_alone_leaves_the_api_open(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(admin_keys=("admin",), lora_dir=tmp_path)
    assert (await server.http.get("/v1/models")).status_code == 200
    assert (await server.http.post(UNLOAD, json={"lora_name": "x"})).status_code == 401


async def test_web_pages_cannot_call_admin_routes(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(allowed_origins=("*",), lora_dir=tmp_path, allow_lora_without_admin_key=True)
    preflight = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert (await server.http.options(UNLOAD, headers=preflight)).status_code == 405
    response = await server.http.post(UNLOAD, json={"lora_name": "x"}, headers=ORIGIN)
    assert not [name for name in response.headers if name.startswith("access-control")]
    allowed = await server.http.get("/v1/models", headers=ORIGIN)
    assert allowed.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415), ({}, 404), (ORIGIN, 415)],
)
async def test_admin_routes_take_json_only(start_server: StartServer, tmp_path: Path, headers: dict[str, str], status: int) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    response = await server.http.post(UNLOAD, content=b'{"lora_name": "x"}', headers=headers)
    assert response.status_code == status


def _shown_arguments(code: str, *arguments: str) -> str:
    """The command line that others see of a process that has run `code`."""
    body = textwrap.dedent(code) + "\nprint('done', flush=True); input()"
    command = [sys.executable, "-c", body, *arguments]
    environment: Any = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        process.communicate("\n")
    return shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_keys_are_hidden_from_the_process_list() -> None:
    code = """
        import sys
        from compile_and_serve.serve.cli.api_keys import read_api_keys
        assert read_api_keys(["s3cret", "ke=y"], None) == ("s3cret", "ke=y")
        assert sys.argv[-2:] == ["--host", "s3"]
    """
    shown = _shown_arguments(code, "--api-key", "s3cret", "--api-key=ke=y", "--host", "s3")
    assert shown.endswith("--api-key\0xxxxxx\0--api-key=xxxx\0--host\0s3\0")
    assert 'read_api_keys(["s3cret"' in shown  # only whole arguments are overwritten
