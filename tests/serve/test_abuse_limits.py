"""Limits that the docs and messages promise: what is just within them works, and what is beyond them is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from typer.testing import CliRunner

from compile_and_serve.runtime.structured.checker import GrammarChecker
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.json_schema import MAX_DEPTH, MAX_PROPERTIES
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.serve.cli.main import app

Nest = Callable[[Any], Any]  # of a schema, or of a value of it

# How a level is added to a schema, and to a value of it.
LEVELS: dict[str, tuple[Nest, Nest]] = {
    "properties": (
        lambda s: {"type": "object", "properties": {"a": s}, "required": ["a"], "additionalProperties": False},
        lambda v: {"a": v},
    ),
    "other properties": (lambda s: {"type": "object", "additionalProperties": s}, lambda v: {"x": v}),
    "patterns": (lambda s: {"type": "object", "patternProperties": {"^a": s}, "additionalProperties": False}, lambda v: {"ab": v}),
    "items": (lambda s: {"type": "array", "items": s}, lambda v: [v]),
    "first items": (lambda s: {"type": "array", "prefixItems": [s], "minItems": 1, "items": False}, lambda v: [v]),
    "any of": (lambda s: {"anyOf": [{"type": "null"}, s]}, lambda v: v),
    "all of": (lambda s: {"allOf": [s]}, lambda v: v),
    "of all kinds": (
        lambda s: {"type": "object", "properties": {"a": {"anyOf": [{"type": "array", "items": s}, {"type": "null"}]}}, "required": ["a"]},
        lambda v: {"a": [v]},
    ),
}
LEVELS_OF = {"of all kinds": 3}


def nested(kind: str, levels: int, leaf: Any, which: int) -> Any:
    value = leaf
    for _ in range(levels // LEVELS_OF.get(kind, 1)):
        value = LEVELS[kind][which](value)
    return value


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(seconds=20.0)  # the machine may be busy
    yield checker
    checker.close()


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    content = list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and bool(matcher.is_accepting())


@pytest.mark.parametrize("levels", [20, MAX_DEPTH - 1, MAX_DEPTH])
@pytest.mark.parametrize("kind", LEVELS)
def test_schemas_of_64_levels_are_followed(checker: GrammarChecker, kind: str, levels: int) -> None:
    schema = nested(kind, levels, {"type": "integer", "minimum": 3, "maximum": 5}, 0)
    grammar = checker.check(StructuredOutputsParams(json=schema), {})
    for leaf, is_right in ((4, True), (6, False), ("4", False)):
        text = json.dumps(nested(kind, levels, leaf, 1), separators=(",", ":"))
        assert accepts(grammar, text) == is_right, text


def test_definitions_of_a_deep_schema_stay(checker: GrammarChecker) -> None:
    schema = nested("properties", MAX_DEPTH, {"$ref": "#/$defs/leaf"}, 0) | {"$defs": {"leaf": {"enum": ["x", "y"]}}}
    grammar = checker.check(StructuredOutputsParams(json=schema), {})
    for leaf in ("x", "z"):
        assert accepts(grammar, json.dumps(nested("properties", MAX_DEPTH, leaf, 1), separators=(",", ":"))) == (leaf == "x")


@pytest.mark.parametrize("kind", LEVELS)
def test_deeper_schemas_are_a_sentence(checker: GrammarChecker, kind: str) -> None:
    for levels in (MAX_DEPTH + LEVELS_OF.get(kind, 1), 200):
        with pytest.raises(GrammarError, match=f"more than {MAX_DEPTH} levels deep"):
            checker.check(StructuredOutputsParams(json=nested(kind, levels, {"type": "integer"}, 0)), {})


@pytest.mark.parametrize(
    "kind", [{"type": "string"}, {"type": "string", "format": "date-time"}, {"type": "array", "items": {"type": "number"}}]
)
@pytest.mark.parametrize("is_required", [False, True])
def test_objects_of_1000_properties_are_followed(checker: GrammarChecker, kind: dict[str, Any], is_required: bool) -> None:
    names = [f"a_property_with_number_{i}" for i in range(MAX_PROPERTIES + 1)]
    schemas = [
        {"type": "object", "properties": dict.fromkeys(some, kind), "required": some if is_required else [], "additionalProperties": False}
        for some in (names[:-1], names)
    ]
    assert checker.check(StructuredOutputsParams(json=schemas[0]), {})
    with pytest.raises(GrammarError, match=f"at most {MAX_PROPERTIES} properties, this one has {MAX_PROPERTIES + 1}"):
        checker.check(StructuredOutputsParams(json=schemas[1]), {})


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["content0", "content2", "content9", "&a [*a]", "!!python"])
@pytest.mark.parametrize(
    "content",
    [
        "[" * 20_000, "{a: " * 20_000, "port: " + "[" * 5000 + "1" + "]" * 5000, "- " * 10_000 + "a",
        "a:\n" + "".join(" " * i + "- \n" for i in range(2000)),
        "port: 2026-99-99", "port: !!int x", "port: !!python/object:os.system {}", "port: *nothing", "? " * 20_000, "&a [*a]",
        "port: &a [*a]",
    ],
)  # fmt: skip
def test_yaml_of_any_depth_is_a_sentence(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    result = CliRunner().invoke(app, ["serve", "model", "--config", str(file)])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "config.yaml" in result.output.replace("\n", "")
