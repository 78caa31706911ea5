"""`/graphs` of a server: there when asked for, a sentence when the dump is not."""

from __future__ import annotations

from pathlib import Path

from serve.inspect.data import load_dump
from serve.inspect.page import build_page
from tests.serve.conftest import StartServer


async def test_the_page_is_served(start_server: StartServer, dump: Path) -> None:
    server = await start_server(graphs_dir=dump)
    response = await server.http.get("/graphs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == build_page(load_dump(dump))


async def test_there_is_no_page_unless_asked_for(start_server: StartServer) -> None:
    server = await start_server()
    assert (await server.http.get("/graphs")).status_code == 404


async def test_a_dump_that_failed_is_a_sentence(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(graphs_dir=tmp_path)
    response = await server.http.get("/graphs")
    assert response.status_code == 503
    assert "holds no dump of a compilation" in response.json()["error"]["message"]
