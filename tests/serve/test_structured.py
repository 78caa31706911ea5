"""Structured output over HTTP: what reaches the engine, and what is refused before a stream opens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.conftest import Server, StartServer
from tests.serve.http.test_errors import assert_error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
STRUCTURES = [{"begin": "<f>", "schema": {}, "end": "</f>"}]
WRONG = {"type": "object", "properties": {"a": {"type": "array", "contains": {"type": "null"}}}}


def grammar_of(server: Server) -> list[dict[str, Any]]:
    """The grammars of the last request."""
    structured = server.engine.requests[-1].sampling_params.structured_outputs
    assert structured is not None
    assert structured.compiled is not None
    assert structured.json is None
    grammars: list[dict[str, Any]] = json.loads(structured.compiled)["grammars"]
    return grammars


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields,expected",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, '"required"'),
        ({"response_format": {"type": "json_object"}}, '"type": "object"'),
        ({"response_format": {"type": "structural_tag", "triggers": ["<f>"], "structures": STRUCTURES}}, "<f>"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}}, "hello"),
        ({"structured_outputs": {"json": SCHEMA}}, '"required"'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, '"required"'),
        ({"structured_outputs": {"regex": "a+"}, "response_format": {"type": "text"}}, "/a+/"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, '"b'),
        ({"structured_outputs": {"grammar": 'root ::= "abc"'}}, "abc"),
        ({"structured_outputs": {"structural_tag": '{"format": {"type": "regex", "pattern": "x+"}}'}}, "x+"),
    ],
)
async def test_forms_reach_the_engine_as_grammars(server: Server, fields: dict[str, Any], expected: str, stream: bool) -> None:
    for send in (server.chat, server.complete):
        answer = await send(**fields, stream=stream)
        assert answer.status_code == 200, answer.text
        assert expected in json.dumps(grammar_of(server)).replace('\\"', '"')


async def test_text_is_free(server: Server) -> None:
    assert (await server.chat(response_format={"type": "text"}, structured_outputs={})).status_code == 200
    assert server.engine.requests[-1].sampling_params.structured_outputs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields,param,says",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG}}},
            "response_format",
            "$.properties.a.contains",
        ),
        ({"structured_outputs": {"json": WRONG}}, "structured_outputs", "$.properties.a.contains"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "$.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"compiled": "{}"}}, "structured_outputs", "no field 'compiled'"),
        ({"structured_outputs": {"grammar": "root ::= b"}}, "structured_outputs", "'b' not found"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "cannot be combined"),
        ({"response_format": {"type": "json"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "foo"}}}, "response_format", "$.format.type"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "regex and choice"),
        ({"guided_regex": "a", "structured_outputs": {"choice": ["a"]}}, "guided_regex", "cannot be combined"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "structured_outputs", "cannot be combined"),
        ({"structured_outputs": {"json": {"enum": ["x" * (2 << 20)]}}}, "structured_outputs", "at most 1048576 characters"),
    ],
)
async def test_wrong_forms_are_a_400_that_names_the_place(
    server: Server, fields: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    for send in (server.chat, server.complete):
        assert_error(await send(**fields, stream=stream), 400, param=param, says=says)
    assert server.engine.requests == []


@pytest.mark.parametrize(
    ("field", "value", "form"),
    [
        ("guided_json", {"type": "integer"}, {"json": {"type": "integer"}}),
        ("guided_json", '{"type": "integer"}', {"json": '{"type": "integer"}'}),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
        ("guided_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        (
            "structural_tag",
            {"format": {"type": "regex", "pattern": "a"}},
            {"structural_tag": {"format": {"type": "regex", "pattern": "a"}}},
        ),
    ],
)
async def test_older_names_of_the_forms_are_the_same(server: Server, field: str, value: Any, form: dict[str, Any]) -> None:
    for send in (server.chat, server.complete):
        assert (await send(structured_outputs=form)).status_code == 200
        expected = grammar_of(server)
        answer = await send(**{field: value}, guided_decoding_backend="outlines")
        assert answer.status_code == 200, answer.text
        assert grammar_of(server) == expected


async def test_older_names_carry_settings(server: Server) -> None:
    assert (await server.chat(structured_outputs={"json": {}, "whitespace_pattern": "x"})).status_code == 200
    expected = grammar_of(server)
    assert (await server.chat(guided_json={}, guided_whitespace_pattern="x")).status_code == 200
    assert grammar_of(server) == expected


SCHEMA = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CLOSED_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    "tag": (
        "/v1/chat/completions",
        {"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}},
    ),
    "completions": ("/v1/completions", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}),
    "forced tool": ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}),
    "responses": ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    "messages": ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
}


@pytest.mark.parametrize("name", CLOSED_BODIES)
@pytest.mark.parametrize("is_open", [False, True])
async def test_objects_of_schemas_are_closed_unless_they_say_otherwise(start_server: StartServer, name: str, is_open: bool) -> None:
    server = await start_server(open_schemas=is_open, engine={"max_model_len": 1024})
    path, fields = CLOSED_BODIES[name]
    prompt = {"input": "Hi"} if "responses" in path else {"prompt": "Hi"} if path == "/v1/completions" else {}
    messages = {} if prompt else {"messages": [{"role": "user", "content": "Hi"}]}
    limit = {} if "responses" in path else {"max_tokens": 10}
    answer = await server.http.post(path, json={**prompt, **messages, **limit, **fields})
    assert answer.status_code == 200, answer.text
    [schema] = [part["json_schema"] for part in grammar_of(server) if "json_schema" in part]
    for one in (schema, schema["properties"]["a"]):
        assert one.get("additionalProperties") is (None if is_open else False)


async def test_structured_outputs_are_closed_on_request(server: Server) -> None:
    for closes in (False, True):
        assert (await server.chat(structured_outputs={"json": SCHEMA, "disable_additional_properties": closes})).status_code == 200
        [part] = grammar_of(server)
        assert part["json_schema"].get("additionalProperties") is (False if closes else None)


async def test_deep_schemas_are_a_400(server: Server) -> None:
    body = b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"properties": {"a": ' * 200 + b"{}" + b"}}" * 200 + b"}}"
    answer = await server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text


async def test_without_a_tokenizer_it_is_refused(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=None)
    answer = await server.complete(prompt=[1, 2], structured_outputs={"regex": "a"})
    assert_error(answer, 400, says="structured output")
