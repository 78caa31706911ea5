"""/tokenizer_info, /server_info, /invocations, /load, ORCA headers, metrics of the cache, and overridden sampling defaults."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_and_serve.runtime.config import EngineConfig, ModelConfig
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.pooling_params import PoolingInfo
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.serve.server import ServerStartError, complete_settings
from compile_and_serve.serve.settings import ServerSettings, parse_sampling_defaults
from tests.serve.conftest import ANSWER, Server, StartServer, eventually


async def test_tokenizer_info(server: Server, start_server: StartServer) -> None:
    assert (await server.http.get("/tokenizer_info")).status_code == 404
    server = await start_server(tokenizer_info=True)
    info = (await server.http.get("/tokenizer_info")).json()
    assert info["vocab_size"] == server.tokenizer.vocab_size
    assert info["eos_token_ids"] == server.tokenizer.eos_token_ids
    assert info["eos_token"] == server.tokenizer.special_tokens["eos_token"]
    assert info["chat_template"] == server.tokenizer.chat_templates["default"]
    assert dict(zip(info["all_special_tokens"], info["all_special_ids"], strict=True)) == server.tokenizer.special_texts


async def test_server_info_shows_no_secret(server: Server, start_server: StartServer) -> None:
    assert (await server.http.get("/server_info")).status_code == 404
    server = await start_server(admin_routes=True, api_keys=("secret-1",), admin_keys=("secret-2",), lora_dir=Path("/secret-3"))
    assert (await server.http.get("/server_info")).status_code == 401
    assert (await server.http.get("/server_info", headers={"Authorization": "Bearer secret-1"})).status_code == 403
    response = await server.http.get("/server_info", headers={"Authorization": "Bearer secret-2"})
    assert "secret" not in response.text
    info = response.json()
    assert info["engine"]["max_model_len"] == 256
    assert info["models"] == ["test-model", "alias"]
    assert info["server"]["shutdown_timeout"] == 30.0
    assert "fastapi" in info["packages"]


async def test_invocations(server: Server, start_server: StartServer) -> None:
    answer = (await server.http.post("/invocations", json={"prompt": "Hi", "max_tokens": 100})).json()
    assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", ANSWER)
    messages = [{"role": "user", "content": "Hi"}]
    answer = (await server.http.post("/invocations", json={"messages": messages, "model": "alias"})).json()
    assert (answer["object"], answer["model"]) == ("chat.completion", "alias")
    large = {"prompt": "Hi", "max_tokens": 1, "stop": ["x"], "user": "u" * 100_000}
    assert (await server.http.post("/invocations", json=large)).status_code == 200
    response = await server.http.post("/invocations", json={"prompt": "Hi", "max_tokens": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert (await server.http.post("/invocations", json={"foo": 1})).status_code == 400
    assert (await server.http.post("/invocations", json={"input": "Hi"})).status_code == 501

    server = await start_server(engine={"pooling": PoolingInfo(kind="embed", width=4)})
    for body, kind in (
        ({"input": "Hi"}, "embedding"),
        ({"input": "Hi", "task": "embed"}, "pooling"),
        ({"text_1": "Hi", "text_2": "H"}, "score"),
        ({"queries": "Hi", "documents": ["H"]}, "score"),
    ):
        answer = (await server.http.post("/invocations", json=body)).json()
        assert answer["data"][0]["object"] == kind
    answer = (await server.http.post("/invocations", json={"query": "Hi", "documents": ["H"]})).json()
    assert len(answer["results"]) == 1
    server = await start_server(engine={"pooling": PoolingInfo(kind="classify", width=2, activation="softmax")})
    answer = (await server.http.post("/invocations", json={"input": "Hi"})).json()
    assert np.isclose(sum(answer["data"][0]["probs"]), 1)


async def test_load_counts_sequences(server: Server) -> None:
    assert (await server.http.get("/load")).json() == {"server_load": 0}
    server.engine.hold.clear()
    request = asyncio.create_task(server.complete(n=3))
    await eventually(lambda: len(server.engine.requests) == 3)
    assert (await server.http.get("/load")).json() == {"server_load": 3}
    server.engine.hold.set()
    await request
    assert (await server.http.get("/load")).json() == {"server_load": 0}


async def test_orca_headers(server: Server) -> None:
    header = "endpoint-load-metrics"
    body = {"prompt": "Hi", "max_tokens": 4}

    async def load(**headers: str) -> str | None:
        return (await server.http.post("/v1/completions", json=body, headers=headers)).headers.get(header)

    await server.complete()
    stats = EngineStats(num_waiting=7, num_running=2, kv_cache_usage=0.5)
    server.app.state.context.metrics.last_stats = {0: stats, 1: replace_usage(stats)}
    server.engine.hold.clear()
    waiting = asyncio.create_task(load(**{f"{header}-format": "TEXT"}))
    await asyncio.sleep(0.01)
    server.engine.hold.set()
    assert (await waiting or "").startswith("TEXT named_metrics.kv_cache_usage_perc=0.")
    found = await load(**{f"{header}-format": "json"})
    assert found is not None
    named = json.loads(found.removeprefix("JSON "))["named_metrics"]
    assert named["num_requests_waiting"] == 7  # of the replica that has not run since
    assert set(named) == {"kv_cache_usage_perc", "num_requests_waiting", "num_requests_running"}
    assert await load() is None
    assert await load(**{f"{header}-format": "xml"}) is None


def replace_usage(stats: EngineStats) -> EngineStats:
    return EngineStats(num_waiting=stats.num_waiting, num_running=stats.num_running, kv_cache_usage=0.25)


async def test_metrics_of_the_cache_and_of_steps(server: Server) -> None:
    await server.complete()
    text = (await server.http.get("/metrics")).text
    [line] = [line for line in text.splitlines() if line.startswith("cas:cache_config_info{")]
    for label in ('block_size="16"', 'num_gpu_blocks="1000"', 'enable_prefix_caching="True"', 'cache_dtype="'):
        assert label in line
    steps = float(text.split('cas:iteration_tokens_total_count{model_name="test-model"} ')[1].split("\n")[0])
    assert steps == server.engine.steps > 0


def test_override_generation_config(tmp_path: Path, templates: TemplatePool) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    config = EngineConfig(model=ModelConfig(model="m", path=tmp_path))
    settings = ServerSettings(served_model_names=("m",), override_sampling={"temperature": 0.2, "top_k": 5})
    found = complete_settings(config, settings, templates).default_sampling
    assert found == {"temperature": 0.2, "top_p": 0.9, "top_k": 5}
    with pytest.raises(ServerStartError, match="--override-generation-config cannot be used: top_p must be"):
        complete_settings(config, replace(settings, override_sampling={"top_p": 7}), templates)


@pytest.mark.parametrize(
    "given", ['{"temperature": "hot"}', '{"max_new_tokens": 5.5}', '{"length_penalty": 1}', "[1]", "{", '{"top_k": true}']
)
def test_wrong_overrides(given: Any) -> None:
    with pytest.raises(ValueError, match="--override-generation-config"):
        parse_sampling_defaults(given)
    assert parse_sampling_defaults('{"temperature": 0.5, "max_new_tokens": 5}') == {"temperature": 0.5, "max_tokens": 5}


@pytest.mark.parametrize(("asked", "given"), [(None, 3), (2, 2), (50, 3)])
async def test_new_tokens_are_limited_for_all(start_server: StartServer, asked: int | None, given: int) -> None:
    server = await start_server(default_sampling={"max_tokens": 3})
    for response in (await server.chat(max_tokens=asked), await server.complete(max_tokens=asked)):
        assert response.status_code == 200, response.text
        assert server.engine.requests[-1].sampling_params.max_tokens == given
