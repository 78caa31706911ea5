"""`/graphs` of a server: present if enabled, one sentence if there is no dump."""

from __future__ import annotations

import base64
from pathlib import Path

from compile_and_serve.serve.inspect.data import load_dump
from compile_and_serve.serve.inspect.page import build_page
from tests.serve.conftest import StartServer


async def test_the_page_is_served(start_server: StartServer, dump: Path) -> None:
    server = await start_server(graphs_dir=dump)
    response = await server.http.get("/graphs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    links = '<a href="./">chat</a> <a href="docs">API</a> <a href="metrics">metrics</a>'
    assert response.text == build_page(load_dump(dump), links)


async def test_a_browser_sends_the_api_key_as_a_password(start_server: StartServer, dump: Path) -> None:
    server = await start_server(graphs_dir=dump, api_keys=("sécret:1",))
    refused = await server.http.get("/graphs")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic realm=")
    for user in ("", "me"):
        assert (await server.http.get("/graphs", headers=basic(f"{user}:sécret:1"))).status_code == 200
    bearer = {"Authorization": "Bearer sécret:1".encode("latin-1")}
    assert (await server.http.get("/graphs", headers=bearer)).status_code == 200
    for wrong in (basic("me:other"), basic("sécret:1"), basic(""), {"Authorization": "Basic me:sécret:1".encode()}):
        assert (await server.http.get("/graphs", headers=wrong)).status_code == 401
    elsewhere = await server.http.get("/v1/models", headers=basic("me:sécret:1"))
    assert elsewhere.status_code == 401
    assert elsewhere.headers["www-authenticate"] == "Bearer"


def basic(credentials: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


async def test_there_is_no_page_unless_enabled(start_server: StartServer) -> None:
    server = await start_server()
    assert (await server.http.get("/graphs")).status_code == 404


async def test_missing_dump_is_one_sentence(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(graphs_dir=tmp_path)
    response = await server.http.get("/graphs")
    assert response.status_code == 503
    assert "contains no dump of a compilation" in response.json()["error"]["message"]
