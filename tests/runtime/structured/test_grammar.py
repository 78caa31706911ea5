"""Grammars from requests: what they accept, what is refused and where, and hostile ones."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance
import pytest

from compile_and_serve.runtime.structured import grammar as grammars
from compile_and_serve.runtime.structured.checker import GrammarChecker
from compile_and_serve.runtime.structured.grammar import to_grammar
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.params import StructuredOutputsParams as Params

STRING = {"type": "string"}
CALL = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def accepts(params: Params, text: str) -> bool:
    """Whether `text` is a complete output."""
    matcher = llguidance.LLMatcher(grammars.byte_tokenizer(), to_grammar(params, {}), log_level=0)
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "fields,good,bad",
    [
        ({"json": CALL}, ['{"x": 1}', '{\n  "x":1\n}'], ['{"y": 1}', "{}", '{"x": 1', '{"x": 1}{"x": 1}']),
        ({"json": json.dumps(CALL)}, ['{"x": -5}'], ['{"x": "1"}']),
        ({"json": CALL, "disable_any_whitespace": True}, ['{"x":1}'], ['{"x": 1}']),
        ({"json": CALL, "whitespace_pattern": " "}, ['{ "x": 1}'], ['{  "x": 1}', '{\n"x": 1}']),
        ({"json": True}, ["1", '"a"', "[{}]"], ["a"]),
        ({"json_object": True}, ["{}", '{"a": [1, {}]}'], ["[]", "1"]),
        ({"regex": r"^[a-c]{2}/\d$"}, ["ab/1"], ["ab1", "abc/1"]),
        ({"choice": ["a", 'b"\\', "é\n"]}, ["a", 'b"\\', "é\n"], ["b", ""]),
        ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" tail'}, ["ab", "accb"], ["a", "abb"]),
        ({"grammar": 'start: "a" B+\nB: /[0-9]/'}, ["a12"], ["a"]),
    ],
)
def test_accepts_what_the_form_says(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    params = Params(**fields)
    assert [text for text in good if not accepts(params, text)] == []
    assert [text for text in bad if accepts(params, text)] == []


CONTENT = {"type": "json_schema", "json_schema": CALL}
TAG = {"begin": "<call=f>", "content": CONTENT, "end": "</call>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<call"], "tags": [TAG]}


@pytest.mark.parametrize(
    "tag,good,bad",
    [
        (
            {"triggers": ["<call"], "structures": [{"begin": "<call=f>", "schema": CALL, "end": "</call>"}]},
            ["", "hi", 'hi <call=f>{"x":1}</call> and <call=f>{"x":2}</call>'],
            ["<call=g>", '<call=f>{"y":1}</call>', '<call=f>{"x":1}'],
        ),
        ({"format": TRIGGERED | {"at_least_one": True}}, ['<call=f>{"x":1}</call> hi'], ["", "hi", "hi <call=f>"]),
        ({"format": TRIGGERED | {"at_least_one": True, "stop_after_first": True}}, ['<call=f>{"x":1}</call>'], ['<call=f>{"x":1}</call> ']),
        ({"format": TRIGGERED | {"stop_after_first": True}}, ["hi", 'hi<call=f>{"x":1}</call>'], ['<call=f>{"x":1}</call> ']),
        (
            {"format": {"type": "tags_with_separator", "tags": [TAG], "separator": ";", "at_least_one": True}},
            ['<call=f>{"x":1}</call>', '<call=f>{"x":1}</call>;<call=f>{"x":1}</call>'],
            ["", ";"],
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                        {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "no+"}]},
                    ],
                }
            },
            ["<think>a<b></think>yes", "<think></think>noo"],
            ["yes", "<think></think>", "<think></think>yesno"],
        ),
        ({"format": {"type": "grammar", "grammar": 'root ::= "a" | "b"'}}, ["a"], ["c"]),
    ],
    ids=["older form", "at least one", "exactly one", "up to one", "separator", "sequence", "grammar"],
)
def test_structural_tags(tag: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for given in (tag | {"type": "structural_tag"}, json.dumps(tag)):
        params = Params(structural_tag=given)
        assert [text for text in good if not accepts(params, text)] == []
        assert [text for text in bad if accepts(params, text)] == []


def test_special_tokens_in_a_tag_stand_for_their_ids() -> None:
    tag = {"format": {"type": "tag", "begin": "<|call|>f", "content": CONTENT, "end": "<|end|>"}}
    [main, _] = json.loads(to_grammar(Params(structural_tag=tag), {"<|call|>": 7, "<|end|>": 9}))["grammars"]
    assert 'start: <[7]> "f" @part_0 <[9]>' in main["lark_grammar"]


@pytest.mark.parametrize(
    "schema,path",
    [
        ({"type": "strng"}, "$.type"),
        ({"properties": {"a b": {"items": {"type": "foo"}}}}, '$.properties["a b"].items.type'),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"not": {"pattern": "a"}}]}}}, "$.$defs.x.anyOf[0].not"),
        ({"properties": {"a": {"items": {"type": "number"}, "uniqueItems": True}}}, "$.properties.a.uniqueItems"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "$.properties.a.pattern"),
        ({"properties": {"a": {"$ref": "https://example.com/x"}}}, "$.properties.a.$ref"),
        *(
            ({"not": one}, "$.not")
            for one in (STRING, {"not": STRING}, {"anyOf": [{"required": ["a"]}]}, {"const": 1}, {"enum": ["a", True]})
        ),
        ({"not": {"const": "a" * 1000}}, "$.not"),
        ({"properties": {"a": {"propertyNames": {"pattern": "^a"}}}}, "$.properties.a.propertyNames"),
        ({"minProperties": 1, "properties": {"a": STRING}}, "$"),
        ({"dependentRequired": {"a": ["b"]}}, "$.dependentRequired"),
        ({"properties": {"a": {"$ref": "#/definitions/q"}}}, "$.properties.a.$ref"),
        ({"allOf": [STRING, {"oneOf": [STRING, {"type": "string", "minLength": 2}]}]}, "$.allOf[1]"),
        ({"properties": {"a": 5}}, "$.properties.a"),
        ({"items": {"properties": {f"p{i}": STRING for i in range(1001)}}}, "$.items.properties"),
    ],
)
def test_refused_schema_names_the_place(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(GrammarError) as caught:
        to_grammar(Params(json=schema), {})
    assert caught.value.path == path, caught.value


def test_refused_schema_in_a_tag_names_the_place() -> None:
    tag = {"format": TRIGGERED | {"tags": [TAG, TAG | {"content": {"type": "json_schema", "json_schema": {"type": "foo"}}}]}}
    with pytest.raises(GrammarError) as caught:
        to_grammar(Params(structural_tag=tag), {})
    assert caught.value.path == "$.format.tags[1].content.json_schema.type"


def fields(**properties: Any) -> dict[str, Any]:
    """An object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


A_OR_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "additionalProperties": False}
KINDS = {"$defs": {"x": fields(kind={"const": "x"}), "y": {"allOf": [fields(kind={"enum": ["y", "z"]})]}}}

CASE = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer"}},
    "additionalProperties": False,
    "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
}
X, X1, Y, Y1 = '{"kind": "x"}', '{"kind": "x", "n": 1}', '{"kind": "y"}', '{"kind": "y", "n": 1}'


@pytest.mark.parametrize(
    "schema,good,bad",
    [
        ({"oneOf": [STRING, {"type": ["array", "null"]}, fields()]}, ['"a"', "[]", "null", "{}"], ["1", '{"a": 1}']),
        ({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]} | KINDS, ['{"kind": "x"}', '{"kind": "z"}'], ['{"kind": 1}', "{}"]),
        ({"oneOf": [{"const": 1}, {"enum": [2, "1"]}]}, ["1", "2", '"1"'], ["3"]),
        (STRING | {"format": "regex", "uniqueItems": False}, ['"x"'], ["1"]),
        ({"oneOf": [fields(a=STRING), fields(b=STRING)]}, ['{"a": ""}', '{"b": ""}'], ["{}", '{"a": "", "b": ""}']),
        ({"oneOf": [{"anyOf": [STRING, {"type": "null"}]}, {"type": "boolean"}]}, ['"a"', "true", "null"], ["1"]),
        (A_OR_B | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a": 1}', '{"b": 1}'], ["{}", '{"a": 1, "b": 1}']),
        (A_OR_B | {"not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}', '{"a": 1, "b": 1}']),
        (A_OR_B | {"not": {"required": ["a", "b"]}}, ["{}", '{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
        ({"not": {"required": ["a"]}}, ["{}", '{"b": 1}'], ['{"a": 1}', "1", "[]"]),
        ({"not": {"enum": ["a", "ab c"]}}, ['"b"', '"ab"', '"ab cd"', '""', "false", "null", "2", "[]"], ['"a"', '"ab c"']),
        (CASE | {"then": {"required": ["n"]}, "else": {"properties": {"n": False}}}, [X1, Y, "{}"], [X, Y1, '{"n": 1}']),
        (CASE | {"then": {"required": ["n"]}}, [X1, Y, Y1, "{}"], [X]),
        (CASE | {"else": {"required": ["n"]}}, [X, X1, Y1], [Y, "{}"]),
        (STRING | {"$schema": "https://json-schema.org/draft-04/schema#"}, ['"a"'], ["1"]),
        (STRING | {"$schema": "http://json-schema.org/schema"}, ['"a"'], ["1"]),
    ],
)
def test_rewritten_schemas_accept_the_same_values(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    assert [validator.is_valid(json.loads(text)) for text in good + bad] == [True] * len(good) + [False] * len(bad)
    assert [text for text in good if not accepts(Params(json=schema), text)] == []
    assert [text for text in bad if accepts(Params(json=schema), text)] == []


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "object", "properties": {"k": {"const": 1}}}, {"type": "object", "properties": {"k": {"const": 2}}}],  # {} is both
        [fields(a=STRING), {"type": "object", "properties": {"b": STRING}}],
        [STRING, {"$ref": "https://example.com/x"}],
        [STRING, {"$id": "https://example.com/x", "$ref": "#/$defs/n"}],
        [STRING, {"type": "null"}, {"enum": [1, None]}],
        [{"required": ["a"]}, {"required": ["a", "b"]}],
        [{"type": "array", "items": STRING}, {"type": "array", "items": {"type": "null"}}],  # [] is both
        [{"properties": {name: STRING}, "required": [name]} for name in "ab"],  # {"a": "", "b": ""} is both
        *([{"const": value} for value in values] for values in ([1, 1.0], [True, True], [["a"], ["a"]])),
    ],
)
def test_one_of_that_may_overlap_is_refused(branches: list[Any]) -> None:
    with pytest.raises(GrammarError) as caught:
        to_grammar(Params(json={"properties": {"v": {"oneOf": branches}}, "$defs": {"n": {"type": "null"}}}), {})
    assert caught.value.path.startswith("$.properties.v")


def test_long_one_of_is_refused_in_bounded_time() -> None:
    branches = [{"type": "object", "properties": {f"p{index}": STRING}} for index in range(2000)]
    start = time.perf_counter()
    with pytest.raises(GrammarError):
        to_grammar(Params(json={"oneOf": branches}), {})
    assert time.perf_counter() - start < 10


def test_place_in_a_rewritten_schema_is_that_of_the_original() -> None:
    with pytest.raises(GrammarError) as caught:
        to_grammar(Params(json={"items": {"oneOf": [STRING, {"type": "array", "items": {"type": "object"}, "uniqueItems": True}]}}), {})
    assert caught.value.path == "$.items.oneOf[1].uniqueItems"


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json": {}}, {"json": {"$ref": "#"}}, {"json": False}, {"choice": []},
                                    {"choice": [""]}, {"grammar": "root ::= missing"}, {"grammar": 'root ::= "a'}, {"regex": "(a"},
                                    {"json": "{"}, {"structural_tag": {}}])  # fmt: skip
def test_wrong_forms_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(GrammarError):
        to_grammar(Params(**fields), {})


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


HOSTILE = {
    "deep schema": {"json": nested(5000)},
    "deep text": {"json": '{"a":' * 100_000},
    "10 MB": {"json": {"enum": ["x" * (10 << 20)]}},
    "10 MB of text": {"json": '"' + "x" * (10 << 20) + '"'},
    "chain of references": {
        "json": {"$ref": "#/definitions/d0", "definitions": {f"d{i}": {"$ref": f"#/definitions/d{i + 1}"} for i in range(5000)}}
    },
    "intersections": {"json": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b.{{100}}"} for i in range(300)]}},
    "many properties": {"json": {"properties": {f"p{i}": STRING for i in range(10_000)}}},
    "chain of rules": {"grammar": "\n".join(["start: r0", *(f'r{i}: "x" r{i + 1}?' for i in range(2500)), 'r2500: "y"'])},
    "deep regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "deep grammar": {"grammar": "root ::= " + "(" * 20_000},
    "huge regex": {"regex": "a" * 100_000},
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_bounded_time(checker: GrammarChecker, name: str) -> None:
    checker.check(Params(regex="warm"), {})  # the process has started
    begin = time.monotonic()
    with pytest.raises(GrammarError):
        checker.check(Params(**HOSTILE[name]), {})
    assert time.monotonic() - begin < 25.0  # the deadline, and the start of a process where this one died
    assert checker.check(Params(json=CALL), {})


@pytest.mark.parametrize("regex", ["(a+)+$", "(a|a)*b", "((a{1,1000}){1,1000}){1,1000}b", "(.{0,1000}x){1000}", "(.*a){300}.{500}x"])
def test_exponential_regexes_are_compiled_or_refused_at_once(checker: GrammarChecker, regex: str) -> None:
    checker.check(Params(regex="warm"), {})
    begin = time.monotonic()
    with contextlib.suppress(GrammarError):
        assert checker.check(Params(regex=regex), {})
    assert time.monotonic() - begin < 10.0


def test_results_are_cached_by_content(checker: GrammarChecker) -> None:
    params = Params(json={"type": "object", "title": "cached by content"})
    assert not checker.knows(params, {})
    first = checker.check(params, {})
    assert checker.knows(Params(json={"type": "object", "title": "cached by content"}), {})
    assert checker.check(params, {}) is first
    wrong = Params(json={"type": "foo"})
    checker.check_ahead(wrong, {})
    assert checker.knows(wrong, {})
    with pytest.raises(GrammarError, match=r"at \$\.type"):
        checker.check(wrong, {})
