"""Objects that a schema does not open are closed, where that only makes the schema narrower and leaves it satisfiable."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest

from benchmarks.grammars import real_schemas
from compile_and_serve.runtime.structured.closing import close_objects
from compile_and_serve.runtime.structured.grammar import to_grammar
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.json_schema import rewrite
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
TYPED: dict[str, Any] = {
    name: {"type": "object", "properties": {"type": {"const": name}, name: {}}, "required": ["type"]} for name in ("x", "y")
}


def places(schema: Any, path: str = "$") -> set[str]:
    """Where a schema is closed."""
    found = {path} if isinstance(schema, dict) and schema.get("additionalProperties") is False else set()
    children = schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    return found.union(*(places(child, f"{path}.{name}") for name, child in children))


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, {"$"}),
        ({"properties": {"o": A, "l": {"type": "array", "items": B}}}, {"$", "$.properties.o", "$.properties.l.items"}),
        ({"anyOf": [A, B]}, {"$.anyOf.0", "$.anyOf.1"}),
        ({"anyOf": [A, {"type": "null"}], "description": "maybe"}, {"$.anyOf.0"}),
        ({"$defs": {"a": A}, "properties": {"x": {"$ref": "#/$defs/a"}}}, {"$", "$.$defs.a"}),
        ({"definitions": {"a": A}, "allOf": [{"$ref": "#/definitions/a"}]}, {"$.definitions.a"}),
        ({**A, "anyOf": [{"required": ["a"]}]}, {"$"}),
        # The schema says otherwise.
        ({**A, "additionalProperties": {"type": "string"}}, set()),
        ({**A, "additionalProperties": True}, set()),
        ({**A, "patternProperties": {"^x": {}}}, set()),
        ({**A, "required": ["z"]}, set()),
        ({**A, "minProperties": 2}, set()),
        ({"type": "object"}, set()),
        # Others add to the object.
        ({**A, "allOf": [B]}, set()),
        ({**A, "anyOf": [{"required": ["c"]}]}, set()),
        ({"allOf": [A, B]}, set()),
        ({**A, "anyOf": [B]}, set()),
        ({"$defs": {"a": A}, "allOf": [{"$ref": "#/$defs/a"}, B]}, set()),
        ({"$defs": {"a": A}, "$ref": "#/$defs/a", "required": ["b"]}, set()),
        ({"$defs": {"a": A}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"allOf": [{"$ref": "#/$defs/a"}, B]}}}, {"$"}),
        ({"properties": {"o": A}, "allOf": [{"properties": {"o": B}}]}, {"$"}),
        ({"properties": {"o": A, "p": B}, "allOf": [{"properties": {"o": {"required": ["a"]}}}]}, {"$", "$.properties.p"}),
        # A narrower part would make the whole wider.
        ({"not": A}, set()),
        ({"oneOf": [A, B]}, set()),
        ({"if": A, "then": B}, set()),
        ({"$defs": {"a": A}, "properties": {"x": {"not": {"$ref": "#/$defs/a"}}}}, {"$"}),
        ({"properties": {"a": A, "x": {"not": {"$ref": "#/properties/a"}}}}, set()),
        ({"default": A, "const": {"properties": A}}, set()),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else str(len(value)),
)
def test_what_is_closed(schema: Any, closed: set[str]) -> None:
    before = json.dumps(schema)
    assert places(close_objects(schema)) == closed
    assert json.dumps(schema) == before


def test_alternatives_that_exclude_each_other_are_closed() -> None:
    """As pydantic writes the union of two models with a discriminator."""
    schema = {"$defs": TYPED, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in TYPED]}
    assert places(close_objects(rewrite(schema))) == {"$.$defs.x", "$.$defs.y"}


def test_a_recursive_schema_is_closed() -> None:
    schema = {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert places(close_objects(schema)) == {"$"}


def accepts(text: str, **params: Any) -> bool:
    """Whether a grammar accepts a text; the tokens are bytes."""
    grammar = to_grammar(StructuredOutputsParams(**params), {})
    matcher = llguidance.LLMatcher(_BYTES, grammar)
    assert not matcher.get_error()
    return matcher.consume_tokens([*text.encode()]) and matcher.is_accepting()


_BYTES = llguidance.LLTokenizer("byte")


@pytest.mark.parametrize(
    ("text", "is_closed", "expected"), [('{"z": 1}', False, True), ('{"z": 1}', True, False), ('{"a": 1}', True, True)]
)
def test_the_grammar_forbids_what_is_not_declared(text: str, is_closed: bool, expected: bool) -> None:
    schema = {"type": "object", **A}
    assert accepts(text, json=schema, disable_additional_properties=is_closed) is expected
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    assert accepts(text, structural_tag=tag, disable_additional_properties=is_closed) is expected


def test_closed_forms_of_real_schemas_are_accepted_as_the_open_ones() -> None:
    """And most schemas have objects to close."""
    num_closed = 0
    for name, text in real_schemas(60):
        try:
            to_grammar(StructuredOutputsParams(json=text), {})
        except GrammarError:
            continue
        to_grammar(StructuredOutputsParams(json=text, disable_additional_properties=True), {})
        schema = json.loads(text)
        closed = close_objects(rewrite(schema))
        num_closed += closed != rewrite(schema)
        jsonschema.validators.validator_for(schema).check_schema(closed)
        assert closed.keys() <= rewrite(schema).keys() | {"additionalProperties"}, name
    assert num_closed > 10
