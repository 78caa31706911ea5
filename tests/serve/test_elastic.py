"""The routes that let ranks join and leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serve.conftest import Server, StartServer


async def test_routes_exist_only_with_the_flag(server: Server) -> None:
    for path in ("/scale_elastic_ep", "/is_scaling_elastic_ep"):
        assert (await server.http.post(path)).status_code == 404


async def test_scaling_waits_for_the_engine(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start_server(admin_routes=True)
    calls, may_end = list[tuple[str, Any]](), asyncio.Event()

    async def utility(method: str, adapter: object = None, options: object = None) -> dict[str, Any]:
        calls.append((method, options))
        if method == "scale_elastic_ep":
            await may_end.wait()
        return {"is_scaling_elastic_ep": not may_end.is_set()}

    monkeypatch.setattr(server.engine, "utility", utility)
    late = await server.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2, "drain_timeout": 0.01})
    assert late.status_code == 408
    assert "takes longer than drain_timeout" in late.json()["error"]["message"]
    assert (await server.http.post("/is_scaling_elastic_ep")).json() == {"is_scaling_elastic_ep": True}
    may_end.set()
    answer = await server.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert answer.json() == {"message": "Scaled to 2 data parallel engines"}
    assert calls[-1] == ("scale_elastic_ep", {"new_data_parallel_size": 2})


@pytest.mark.parametrize("body", [{}, {"new_data_parallel_size": 0}, {"new_data_parallel_size": 2, "drain_timeout": 0}])
async def test_wrong_bodies_are_400(start_server: StartServer, body: dict[str, Any]) -> None:
    server = await start_server(admin_routes=True)
    response = await server.http.post("/scale_elastic_ep", json=body)
    assert response.status_code == 400
    assert not server.engine.calls


async def test_what_the_engine_refuses_is_400(start_server: StartServer) -> None:
    server = await start_server(admin_routes=True)
    server.engine.refuse_adapters = "The number of ranks is fixed: start the server with --enable-elastic-ep."
    response = await server.http.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == server.engine.refuse_adapters
