"""Adapters over HTTP: `model` selects, /v1/models lists, requests load and unload from below one folder."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.lora.request import LoRARequest
from tests.serve.conftest import StartServer


async def load(server: Any, name: str, path: str | Path) -> Any:
    return await server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


async def unload(server: Any, name: str) -> Any:
    return await server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def test_a_loaded_adapter_is_a_model(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    (tmp_path / "own").mkdir()
    assert (await load(server, "style", "own")).status_code == 200
    assert server.engine.calls == [("load_adapter", LoRARequest("style", 1, str(tmp_path / "own")))]
    cards = {card["id"]: card for card in (await server.http.get("/v1/models")).json()["data"]}
    assert cards["style"]["parent"] == "test-model"
    assert cards["test-model"]["parent"] is None
    for answer in (await server.chat(model="style"), await server.complete(model="style")):
        assert answer.json()["model"] == "style"
    assert (await server.chat(model="test-model")).status_code == 200
    loras = [request.lora and request.lora.lora_int_id for request in server.engine.requests]
    assert loras == [1, 1, None]
    assert [request.prefix_key for request in server.engine.requests] == ["lora 1", "lora 1", None]

    assert (await unload(server, "style")).status_code == 200
    assert (await server.chat(model="style")).status_code == 404
    assert (await unload(server, "style")).status_code == 404
    assert (await load(server, "style", tmp_path / "own")).status_code == 200
    await server.chat(model="style")
    assert server.engine.requests[-1].prefix_key == "lora 2"  # another load: it may have other weights


async def test_a_request_keeps_an_adapter_that_is_unloaded_while_it_is_prepared(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    assert (await load(server, "style", "own")).status_code == 200
    context = server.app.state.context
    render = context.prompts.templates.render

    def unload_and_render(*args: Any, **options: Any) -> str:
        context.adapters._adapters.clear()
        return str(render(*args, **options))

    monkeypatch.setattr(context.prompts.templates, "render", unload_and_render)
    answer = await server.chat(model="style")
    assert (answer.status_code, answer.json()["model"]) == (200, "style")
    assert server.engine.requests[-1].prefix_key == "lora 1"


async def test_only_folders_below_the_servers_are_loaded(start_server: StartServer, tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    for folder in (allowed, outside):
        folder.mkdir()
    (allowed / "link").symlink_to(outside)
    server = await start_server(lora_dir=allowed, allow_lora_without_admin_key=True)
    for path in ("..", "../outside", outside, "link", ".", "", "a\0b", "/etc"):
        answer = await load(server, "style", path)
        assert answer.status_code == 400, path
        assert "--lora-dir" in answer.json()["error"]["message"]
    assert server.engine.calls == []


async def test_refusals_are_sentences(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    server.engine.refuse_adapters = "It has rank 64."
    answer = await load(server, "style", "x")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "It has rank 64.")
    assert (await server.chat(model="style")).status_code == 404
    server.engine.refuse_adapters = None
    assert (await load(server, "alias", "x")).status_code == 400  # the base model's name
    assert (await server.chat()).status_code == 200


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_without_a_folder_there_are_no_such_routes(start_server: StartServer, path: str) -> None:
    server = await start_server()
    assert (await server.http.post(path, json={"lora_name": "x", "lora_path": "y"})).status_code == 404


async def test_pinned_adapters_are_said_to_the_engine(start_server: StartServer, tmp_path: Path) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    body = {"lora_name": "style", "lora_path": "own", "pinned": True}
    assert (await server.http.post("/v1/load_lora_adapter", json=body)).status_code == 200
    assert server.engine.calls == [("load_adapter", LoRARequest("style", 1, str(tmp_path / "own"), pinned=True))]


async def test_metrics_count_by_adapter_up_to_a_number_of_names(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compile_and_serve.serve.observe.metrics._MAX_ADAPTERS", 2)
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    for name in ("a", "b", "c", "d"):
        assert (await load(server, name, name)).status_code == 200
    for name in ("a", "a", "b", "c", "d", "test-model"):
        assert (await server.chat(model=name)).status_code == 200
    lines = (await server.http.get("/metrics")).text.splitlines()
    counted = [line for line in lines if line.startswith("cas:lora_request_success_total{")]
    counts = {line.split('adapter="')[1].split('"')[0]: float(line.split()[-1]) for line in counted}
    assert counts == {"a": 2, "b": 1, "other": 2}
    assert any(line.startswith('cas:lora_generation_tokens_total{adapter="a"') for line in lines)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_without_an_admin_key_the_routes_are_closed(start_server: StartServer, tmp_path: Path, path: str) -> None:
    for keys in ({}, {"api_keys": ("user",)}):
        server = await start_server(lora_dir=tmp_path, **keys)
        headers = {"Authorization": "Bearer user"}
        for body in ({"lora_name": "x", "lora_path": "y"}, {}):
            answer = await server.http.post(path, json=body, headers=headers)
            assert answer.status_code == 403
            assert "--allow-lora-without-admin-key" in answer.json()["error"]["message"]
        assert server.engine.calls == []


@pytest.mark.parametrize("name", ["x" * 257, "a\nb", "a\0", ""])
async def test_names_are_short_and_printable(start_server: StartServer, tmp_path: Path, name: str) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    assert (await load(server, name, "own")).status_code == 400
    assert server.engine.calls == []


async def test_a_file_system_that_does_not_answer_stops_one_load(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(lora_dir=tmp_path, allow_lora_without_admin_key=True)
    answers = threading.Event()
    monkeypatch.setattr("compile_and_serve.serve.engine.adapters._RESOLVE_SECONDS", 0.2)
    monkeypatch.setattr("compile_and_serve.serve.engine.adapters._resolve_below", lambda *_: answers.wait(60))
    loading = asyncio.create_task(load(server, "style", "own"))
    assert (await server.chat()).status_code == 200
    answer = await loading
    answers.set()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")
