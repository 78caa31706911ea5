"""`uniqueItems` of strings: which schemas get rules, and that no output repeats an item or gets stuck."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from compile_and_serve.runtime.structured.compiler import CompiledGrammar
from compile_and_serve.runtime.structured.distinct import distinct_strings
from compile_and_serve.runtime.structured.distinct_items import DistinctGrammar, DistinctItems, TokenTexts
from compile_and_serve.runtime.structured.grammar import split, to_grammar
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.masks import GrammarSequence
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def of_enum(*values: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"enum": list(values)}, "uniqueItems": True, **more}


class Vocabulary:
    """Bytes, and tokens that hold several parts of JSON. Id 256 ends the output."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = [256]  # noqa: RUF012
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"] + [
        text.encode() for text in (
            '"a', '"a"', 'a"', '",', '","', '["', '["a"', '","a"', '"a","a"', '"","",""', '"]', '"]}', 'ab', 'b"]', '"ab"', '["a","a"]',
            ',"', '", "b"', '"a":["', '"}', '":["a"',
        )
    ]  # fmt: skip

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()), slices=[])
TEXTS = TokenTexts.of(VOCABULARY)
# Few letters, so that strings are often equal.
CHARS = frozenset(b'ab",:[]{}xyz1')
USED = [token for token, text in enumerate(TEXTS.texts) if set(text) <= CHARS]


def walk(schema: Any, seed: int, *, enforced: bool = True) -> str | None:
    """A random output; None if it got long."""
    grammar, rules = split(to_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True), {}))
    assert rules
    matcher = llguidance.LLMatcher(VOCABULARY, grammar)
    items = DistinctItems(DistinctGrammar.create(rules, TEXTS))
    rng, text = random.Random(seed), b""
    while len(text) < 120:
        mask = np.frombuffer(bytearray(matcher.compute_bitmask()), dtype=np.int32)
        if enforced:
            items.exclude(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, text
        if Vocabulary.eos_token_id in allowed:
            return text.decode()
        likely = [token for token in USED if bits[token]]
        token = rng.choice(likely or allowed)
        assert matcher.consume_token(token)
        items.advance(token)
        text += TEXTS.texts[token]
    return None


@pytest.mark.parametrize(
    "schema",
    [
        {**STRINGS, "minItems": 3},
        of_enum("a", "ab", "b", "abab", minItems=4),
        of_enum("a", "ab", "x", minItems=1, maxItems=9),
        {"properties": {"a": {**STRINGS, "minItems": 2}, "x": {"type": "array", "items": {"const": "a"}, "minItems": 3}},
         "required": ["a", "x"], "additionalProperties": False},
        {"type": "array", "items": {"properties": {"a": {**STRINGS, "minItems": 2}}, "required": ["a"], "additionalProperties": False},
         "minItems": 2, "maxItems": 2},
        {"type": "object", "additionalProperties": {**STRINGS, "minItems": 2}, "minProperties": 1, "maxProperties": 1},
        {"type": "array", "uniqueItems": True, "minItems": 2},
    ],
)  # fmt: skip
def test_outputs_have_distinct_items_and_end(schema: Any) -> None:
    finished = [output for seed in range(30) if (output := walk(schema, seed)) is not None]
    assert len(finished) > 5
    for output in finished:
        jsonschema.validate(json.loads(output), schema)
    free = [output for seed in range(30) if (output := walk(schema, seed, enforced=False)) is not None]
    assert not all(jsonschema.validators.validator_for(schema)(schema).is_valid(json.loads(output)) for output in free)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "object"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True},
        {"type": "array", "items": {"type": "string", "pattern": "^(a|b)$"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "string", "format": "date"}, "uniqueItems": True},
        {"type": "array", "prefixItems": [{"type": "string"}], "uniqueItems": True},
        of_enum("a", "b", minItems=3),
        of_enum(1, 2),
        # Another array at the same place would get stuck.
        {"anyOf": [STRINGS, {"type": "array", "items": {"const": "a"}, "minItems": 2}]},
        {"properties": {"a": STRINGS, "b": {"properties": {"a": of_enum("a", "b")}}}},
        {"properties": {"a": {"type": "array", "items": {"const": "a"}}}, "additionalProperties": STRINGS},
    ],
)
def test_what_could_get_stuck_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        to_grammar(StructuredOutputsParams(json=schema), {})


def test_rules_name_the_places_of_arrays() -> None:
    schema = {
        "$defs": {"set": STRINGS, "unused": of_enum("a")},
        "properties": {"a": {"$ref": "#/$defs/set"}, "b": {"type": "array", "items": {"$ref": "#/$defs/set"}}},
        "additionalProperties": {"anyOf": [{"type": "null"}, of_enum("x", 'quo"ted', "y")]},
    }
    assert distinct_strings(schema)[1] == {}  # an additional property may be named a
    del schema["additionalProperties"]
    assert distinct_strings(schema)[1] == {"[]": None, ".a": None}
    other = {"additionalProperties": {"anyOf": [{"type": "null"}, of_enum("x", 'quo"ted', "y")]}}
    assert distinct_strings(other)[1] == {"*": ["x", "y"]}
    assert distinct_strings({"properties": {"uniqueItems": {"type": "boolean"}}})[1] == {}


def test_each_row_of_guessed_tokens_has_its_mask() -> None:
    grammar, rules = split(to_grammar(StructuredOutputsParams(json=STRINGS, disable_any_whitespace=True), {}))
    matcher = llguidance.LLMatcher(VOCABULARY, grammar)
    compiled = CompiledGrammar(matcher, DistinctGrammar.create(rules, TEXTS))
    sequence = GrammarSequence(compiled, [], 0, [])
    sequence.advance(list(b'["a","'))
    masks = np.full((3, -(-len(TEXTS.texts) // 32)), -1, dtype=np.int32)
    sequence.exclude_repeated(masks, [ord("a"), ord("b")])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert bits[:, [ord('"'), TEXTS.texts.index(b'a"')]].tolist() == [[1, 0], [0, 1], [1, 1]]
    assert sequence.error is None
    masks[:] = 0
    masks[0, ord('"') // 32] = 1 << ord('"') % 32
    sequence.advance([ord("a")])
    sequence.exclude_repeated(masks[:1], [])
    assert sequence.error is not None  # never happens, but would otherwise sample any token


def test_rows_behind_a_refused_guess_are_left_alone() -> None:
    grammar, rules = split(to_grammar(StructuredOutputsParams(json=of_enum("a", "b"), disable_any_whitespace=True), {}))
    compiled = CompiledGrammar(llguidance.LLMatcher(VOCABULARY, grammar), DistinctGrammar.create(rules, TEXTS))
    sequence = GrammarSequence(compiled, [], 0, [])
    sequence.advance(list(b'["a","'))
    masks = np.zeros((2, -(-len(TEXTS.texts) // 32)), dtype=np.int32)
    for row, chars in enumerate((b"ab", b'"')):  # what the grammar allows
        for char in chars:
            masks[row, char // 32] |= 1 << char % 32
    sequence.exclude_repeated(masks, [ord("a")])
    assert sequence.error is None
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[ord("b")], [ord('"')]]


def mask_after(schema: Any, text: bytes) -> np.ndarray:
    """The mask behind an output, each of whose tokens the masks before allow. bool [tokens]"""
    grammar, rules = split(to_grammar(StructuredOutputsParams(json=schema, disable_any_whitespace=True), {}))
    matcher = llguidance.LLMatcher(VOCABULARY, grammar)
    items = DistinctItems(DistinctGrammar.create(rules, TEXTS))
    for token in [*text, None]:
        mask = np.frombuffer(bytearray(matcher.compute_bitmask()), dtype=np.int32)
        items.exclude(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        if token is not None:
            assert bits[token]
            assert matcher.consume_token(token)
            items.advance(token)
    return bits


def test_arrays_that_the_schema_does_not_describe_hold_other_strings() -> None:
    assert mask_after({"properties": {"a": of_enum("a", "b")}}, b'{"x":{"a":["cab","a","c\\"b')[ord("b")]


def test_an_escaped_quote_does_not_end_a_string() -> None:
    schema = {"properties": {"x": {"type": "object"}}, "additionalProperties": of_enum("a", "b")}
    bits = mask_after(schema, b'{"x":{"y":"c\\"d"},"z":["a","')
    assert bits[[ord("a"), ord("b")]].tolist() == [False, True]


def test_tags_do_not_enforce_distinct_items() -> None:
    tag = {"begin": "<a>", "content": {"type": "json_schema", "json_schema": STRINGS}, "end": "</a>", "type": "tag"}
    with pytest.raises(GrammarError, match="uniqueItems"):
        to_grammar(StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": tag}), {})
