"""Options of the server that vLLM has, too: what they change in requests and answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.serve.server import ServerStartError, complete_settings
from compile_and_serve.serve.settings import ServerSettings
from tests.serve.conftest import Server, StartServer
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.sse import read_events

VARIABLES = "{{ enable_thinking }}/{{ reasoning_effort }}{% for message in messages %}{{ message.content }}{% endfor %}"
KIND_OF_CONTENT = (
    "{% for message in messages %}{% if message.content is string %}text:{{ message.content }}"
    "{% else %}parts:{{ message.content | map(attribute='text') | join('+') }}{% endif %}{% endfor %}"
)


async def prompt_text(server: Server, **fields: Any) -> str:
    answer = await server.chat(**fields)
    assert answer.status_code == 200, answer.text
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_variables_of_the_template_have_defaults(start_server: StartServer) -> None:
    server = await start_server(chat_template=VARIABLES, default_chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "low"})
    assert await prompt_text(server) == "False/lowHi"
    assert await prompt_text(server, chat_template_kwargs={"enable_thinking": True}) == "True/lowHi"
    assert await prompt_text(server, reasoning_effort="high") == "False/highHi"
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    ids = (await server.http.post("/tokenize", json=body)).json()["tokens"]
    assert server.tokenizer.decode(ids) == "False/lowHi"


async def test_efforts_have_other_words(start_server: StartServer) -> None:
    server = await start_server(chat_template=VARIABLES, reasoning_effort_map={"medium": "low", "xhigh": "max"})
    efforts = {"medium": "low", "xhigh": "max", "high": "high"}
    for effort, word in efforts.items():
        assert (await prompt_text(server, reasoning_effort=effort)).endswith(f"/{word}Hi")
        answer = await server.http.post("/v1/responses", json={"input": "Hi", "reasoning": {"effort": effort}})
        assert answer.status_code == 200, answer.text
        assert server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids).endswith(f"/{word}Hi")


@pytest.mark.parametrize(("given", "as_text", "as_parts"), [("auto", "text:Hi", "text:Hi\nyou"), ("string", "text:Hi", "text:Hi\nyou")])
async def test_the_form_of_contents_is_found_or_given(start_server: StartServer, given: str, as_text: str, as_parts: str) -> None:
    server = await start_server(chat_template=KIND_OF_CONTENT, chat_template_content_format=given)
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    assert await prompt_text(server) == as_text
    assert await prompt_text(server, messages=[{"role": "user", "content": parts}]) == as_parts


async def test_contents_are_parts_where_the_server_says_so(start_server: StartServer) -> None:
    server = await start_server(chat_template=KIND_OF_CONTENT, chat_template_content_format="openai")
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    assert await prompt_text(server) == "parts:Hi"
    assert await prompt_text(server, messages=[{"role": "user", "content": parts}]) == "parts:Hi+you"
    assert await prompt_text(server, messages=[{"role": "user", "content": "A"}, {"role": "assistant", "content": None}]) == "parts:Atext:"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("always", "asked"), [(False, False), (False, True), (True, False), (True, True)])
async def test_streams_end_with_their_usage_on_request_or_always(start_server: StartServer, path: str, always: bool, asked: bool) -> None:
    server = await start_server(force_include_usage=always)
    body: dict[str, Any] = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    options = {"stream_options": {"include_usage": True}} if asked else {}
    *chunks, done = read_events((await server.http.post(path, json={**body, "stream": True, **options})).text)
    assert done == "[DONE]"
    assert (chunks[-1]["choices"] == []) is (always or asked)
    if always or asked:
        assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_the_documents_can_be_switched_off(start_server: StartServer) -> None:
    paths = ("/docs", "/redoc", "/openapi.json")
    server = await start_server()
    assert [(await server.http.get(path)).status_code for path in paths] == [200, 200, 200]
    server = await start_server(disable_fastapi_docs=True)
    assert [(await server.http.get(path)).status_code for path in paths] == [404, 404, 404]
    assert (await server.chat()).status_code == 200


@pytest.mark.parametrize(("prefix", "expected"), [("cas", ["cas"]), ("vllm", ["vllm"]), ("both", ["cas", "vllm"])])
async def test_metrics_have_the_prefix_of_ours_and_of_vllm(start_server: StartServer, prefix: str, expected: list[str]) -> None:
    server = await start_server(metrics_prefix=prefix, served_model_names=("cas:model",))
    assert (await server.complete()).status_code == 200
    text = (await server.http.get("/metrics")).text
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            start, _, name = sample.name.partition(":")
            assert sample.labels["model_name"] == "cas:model"
            found.setdefault(start, {})[name + str(sorted(sample.labels.items()))] = sample.value
        assert family.documentation
        assert family.type != "unknown"
    assert sorted(found) == expected
    assert all(found[one] == found[expected[0]] for one in expected)
    assert sum(name.startswith("request_success_total") for name in found[expected[0]]) == 1


def test_sampling_defaults_come_from_where_the_flag_says(tmp_path: Path, templates: TemplatePool) -> None:
    model, other = write_tiny_model(tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    for folder, temperature in ((model, 0.6), (other, 0.2)):
        (folder / "generation_config.json").write_text(json.dumps({"temperature": temperature}))
    settings, config = ServerSettings(served_model_names=("m",)), tiny_config(model)
    for given, expected in (("auto", {"temperature": 0.6}), ("vllm", {}), (str(other), {"temperature": 0.2})):
        assert complete_settings(config, replace(settings, generation_config=given), templates).default_sampling == expected
    with pytest.raises(ServerStartError, match="--generation-config must be auto, vllm or a folder with generation_config.json"):
        complete_settings(config, replace(settings, generation_config=str(tmp_path)), templates)
