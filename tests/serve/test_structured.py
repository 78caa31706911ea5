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
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"enum": ["x" * (2 << 20)]}}}, "structured_outputs", "at most 1048576 characters"),
    ],
)
async def test_wrong_forms_are_a_400_that_names_the_place(
    server: Server, fields: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    for send in (server.chat, server.complete):
        assert_error(await send(**fields, stream=stream), 400, param=param, says=says)
    assert server.engine.requests == []


async def test_deep_schemas_are_a_400(server: Server) -> None:
    body = b'{"prompt": "x", "structured_outputs": {"json": ' + b'{"properties": {"a": ' * 200 + b"{}" + b"}}" * 200 + b"}}"
    answer = await server.http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text


async def test_without_a_tokenizer_it_is_refused(start_server: StartServer) -> None:
    server = await start_server(with_tokenizer=None)
    answer = await server.complete(prompt=[1, 2], structured_outputs={"regex": "a"})
    assert_error(answer, 400, says="structured output")
