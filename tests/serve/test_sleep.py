"""The sleep routes: 503 meanwhile, accepted requests finish, and 20 sleeps of a real engine under load lose none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.serve.app import create_app
from compile_and_serve.serve.settings import ServerSettings
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.fake_engine import says


async def is_sleeping(server: Server) -> bool:
    sleeping: bool = (await server.http.get("/is_sleeping")).json()["is_sleeping"]
    return sleeping


async def test_routes_exist_only_with_the_flag(server: Server) -> None:
    for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
        assert (await server.http.post(path)).status_code == 404
    assert (await server.http.get("/is_sleeping")).status_code == 404


async def test_accepted_requests_finish_and_new_ones_are_refused(start_server: StartServer, tokenizer: Any) -> None:
    server = await start_server(admin_routes=True, script=says(tokenizer, ANSWER))
    server.engine.hold.clear()
    accepted = asyncio.create_task(server.chat())
    await eventually(lambda: server.engine.num_running == 1)
    sleeping = asyncio.create_task(server.http.post("/sleep?level=2"))
    await eventually(lambda: bool(server.engine.calls))
    assert await is_sleeping(server)
    refused = await server.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "10"
    assert (await server.http.get("/ready")).status_code == 503
    assert (await server.http.get("/health")).status_code == 200
    server.engine.hold.set()
    assert (await accepted).json()["choices"][0]["message"]["content"] == ANSWER
    assert (await sleeping).json() == {"is_sleeping": True}
    assert (await server.http.post("/wake_up")).json() == {"is_sleeping": False}
    assert (await server.chat()).status_code == 200
    assert (await server.http.get("/ready")).status_code == 200


@pytest.mark.parametrize("path", ["/sleep?level=0", "/sleep?level=3", "/sleep?level=x", "/sleep?mode=x", "/wake_up?tags=graphs"])
async def test_wrong_parameters_are_400(start_server: StartServer, path: str) -> None:
    server = await start_server(admin_routes=True)
    response = await server.http.post(path)
    assert response.status_code == 400
    assert response.json()["error"]["param"].endswith(("level", "mode", "tags.0"))
    assert not server.engine.calls


async def test_web_pages_and_other_keys_cannot_sleep(start_server: StartServer) -> None:
    server = await start_server(admin_routes=True, api_keys=("user",), admin_keys=("admin",), allowed_origins=("*",))
    for key, headers, status in (
        ("user", {}, 403),
        ("admin", {"Content-Type": "text/plain"}, 415),
        ("admin", {"Origin": "https://app.example"}, 415),
        ("admin", {}, 200),
        ("admin", {"Content-Type": "application/json"}, 200),
    ):
        response = await server.http.post("/sleep", headers={"Authorization": f"Bearer {key}", **headers})
        assert response.status_code == status, (key, headers)


async def test_an_engine_that_cannot_sleep_stays_awake(start_server: StartServer) -> None:
    server = await start_server(admin_routes=True)
    server.engine.refuse_adapters = "There is no room."
    response = await server.http.post("/sleep")
    assert response.status_code == 400
    assert "There is no room." in response.text
    assert not await is_sleeping(server)
    server.engine.refuse_adapters = None
    assert (await server.chat()).status_code == 200


async def test_prefix_cache_reset(start_server: StartServer) -> None:
    server = await start_server(admin_routes=True)
    assert (await server.http.post("/reset_prefix_cache")).json() == {"ok": True}
    assert server.engine.calls == [("reset_prefix_cache", None)]


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
async def test_sleeps_under_load_lose_no_accepted_request(tmp_path: Path, tokenizer: Any, rounds: int) -> None:
    config = tiny_config(write_tiny_model(tmp_path / "model"), max_num_seqs=8, num_kv_blocks=512)
    client = AsyncEngineClient(config)
    await client.start()
    settings = ServerSettings(served_model_names=("m",), admin_routes=True, access_log=False, throughput_log=0)
    app = create_app(client, None, settings)
    counts = {200: 0, 503: 0}
    stop = asyncio.Event()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as http:
            body = {"prompt": [5, 6, 7], "max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}

            async def ask() -> list[int]:
                response = await http.post("/v1/completions", json=body)
                counts[response.status_code] += 1
                if response.status_code == 503:
                    await asyncio.sleep(0.01)
                    return []
                tokens: list[int] = response.json()["choices"][0]["token_ids"]
                return tokens

            expected = await ask()
            assert len(expected) == 24

            async def load() -> None:
                while not stop.is_set():
                    assert await ask() in (expected, [])

            clients = [asyncio.create_task(load()) for _ in range(6)]
            for round in range(rounds):
                answered = counts[200]
                async with asyncio.timeout(60):
                    while counts[200] == answered:
                        await asyncio.sleep(0.005)
                assert (await http.post(f"/sleep?level={1 + round % 2}")).status_code == 200
                assert (await http.post("/wake_up")).status_code == 200
            stop.set()
            await asyncio.gather(*clients)
            assert counts[503] > 0
            metrics = (await http.get("/metrics")).text
            assert 'finished_reason="error"' not in metrics
            assert 'finished_reason="abort"' not in metrics
