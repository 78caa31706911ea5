"""`/start_profile` and `/stop_profile`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from tests.serve.conftest import StartServer
from tests.support.engines import prompt_of, request, tiny_config, write_tiny_model


async def test_the_routes_are_there_only_with_a_folder(start_server: StartServer, tmp_path: Path) -> None:
    without = await start_server()
    assert (await without.http.post("/start_profile")).status_code == 404
    server = await start_server(profile_dir=tmp_path, admin_keys=["secret"])
    assert (await server.http.post("/start_profile")).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert (await server.http.post("/start_profile", headers=key)).json() == {"is_profiling": True}
    assert (await server.http.post("/stop_profile", headers=key)).json() == {"is_profiling": False, "folder": str(tmp_path)}
    assert [method for method, _ in server.engine.calls] == ["profile", "profile"]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_records_the_steps_between(tmp_path: Path, async_scheduling: bool) -> None:
    core = EngineCore(tiny_config(write_tiny_model(tmp_path / "model"), async_scheduling=async_scheduling))
    with pytest.raises(ValueError, match="No profile is being recorded"):
        core.utility("profile", None, {"folder": str(tmp_path / "traces")})
    core.utility("profile", None, {"folder": ""})
    with pytest.raises(ValueError, match="already"):
        core.utility("profile", None, {"folder": ""})
    core.add_request(request("a", prompt_of(1, 9), max_tokens=4))
    for _ in range(3):
        core.step()
    core.utility("profile", None, {"folder": str(tmp_path / "traces")})
    while core.has_work():
        core.step()
    [trace] = (tmp_path / "traces").iterdir()
    assert trace.stat().st_size > 1000
    core.shutdown()
