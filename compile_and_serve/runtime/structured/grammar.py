"""Turns `StructuredOutputsParams` into a grammar of llguidance, as text, and checks it. No torch: the API process does this."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from compile_and_serve.runtime.structured.closing import close_objects
from compile_and_serve.runtime.structured.distinct import Rules, distinct_strings
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.json_schema import locate, original_path, parse_json, rewrite
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.structured.structural_tag import StructuralTag

MAX_BYTES = 1 << 20  # of a JSON schema or a structural tag
MAX_TEXT_BYTES = 1 << 16  # of a regex or an EBNF grammar
MAX_CHOICES = 4096
ANY_TEXT = json.dumps({"grammars": [{"lark_grammar": "start: /(.|\\n)*/"}]})  # any output
_RULES = "distinct_items"  # beside the library's grammars
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

# Enough for indented JSON. Without a bound, small models go on with whitespace for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# A grammar that needs more is refused, and a request whose masks need more ends with an error. A mask then takes at most
# about 15 ms. The defaults of the library are 1 000 000, 200 000, 50 000, 250 000 and 500 000.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}


def limits() -> llguidance.LLParserLimits:
    """The bounds of a grammar's time and memory."""
    return llguidance.LLParserLimits(**_LIMITS, verbose_errors=False)


def to_grammar(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """The checked grammar. special: text of special tokens → id, for structural tags.

    Raises `GrammarError` with the path in the value of the field that is set. Its time is bounded, by about a second.
    """
    kind = check_kind(params)
    value = getattr(params, kind)
    rules: Rules = {}
    if kind == "structural_tag":
        tag = parse_json(_bounded(value, kind), kind) if isinstance(value, str) else value
        _bounded(_dump(tag, kind), kind)
        tags = StructuralTag(special, lambda part, content, path: _part(part, content, path, params, None))
        grammar = json.dumps({"grammars": tags.build(tag)})
        if error := _why_invalid(grammar):
            raise GrammarError(_first_line(error))
        return grammar
    parts: dict[str, Any] = {"grammars": [_part(kind, value, "$", params, rules)]}
    grammar = json.dumps({**parts, _RULES: rules} if rules else parts)
    if kind in ("json", "json_object"):  # `_part` has checked it
        return grammar
    if error := _why_invalid(grammar):
        raise GrammarError(_first_line(error))
    return grammar


def check_kind(params: StructuredOutputsParams) -> str:
    """The name of the field that is set. Raises `GrammarError` unless it is exactly one."""
    given = forms_of(params)
    if len(given) != 1:
        names = ", ".join(KINDS)
        found = " and ".join(given) or "none"
        raise GrammarError(f"Exactly one of {names} must be given, got {found}")
    return given[0]


def forms_of(params: StructuredOutputsParams) -> list[str]:
    """The names of the forms that are set."""
    return [name for name in KINDS if getattr(params, name) not in (None, False) or (name == "json" and params.json is False)]


def split(grammar: str) -> tuple[str, Rules]:
    """The library's grammar, and the rules for distinct items."""
    if f'"{_RULES}"' not in grammar:
        return grammar, {}
    parts = json.loads(grammar)
    rules: Rules = parts.pop(_RULES, {})
    return json.dumps(parts), rules


def _part(kind: str, value: Any, path: str, params: StructuredOutputsParams, rules: Rules | None) -> dict[str, Any]:
    """One of the library's grammars. path: of `value`. rules: gets those for distinct items; None: they cannot be enforced."""
    if kind == "json":
        schema = parse_json(_bounded(value, "The schema"), "The schema") if isinstance(value, str) else value
        return {"json_schema": _schema(schema, path, params, rules)}
    if kind == "json_object":
        return {"json_schema": _schema({"type": "object"}, path, params, None)}
    if kind == "regex":
        if len(value) > MAX_TEXT_BYTES:
            raise GrammarError(f"A regex may have at most {MAX_TEXT_BYTES} characters, this one has {len(value)}", path)
        return {"lark_grammar": _lark(llguidance.LLMatcher.grammar_from_regex(value))}
    if kind == "choice":
        return {"lark_grammar": _choices(value, path)}
    if len(value) > MAX_TEXT_BYTES:
        raise GrammarError(f"A grammar may have at most {MAX_TEXT_BYTES} characters, this one has {len(value)}", path)
    try:
        return {"lark_grammar": any_to_lark(value)}
    except RecursionError:
        raise GrammarError("The grammar is nested too deeply", path) from None
    except Exception as error:  # the converter raises bare Exception
        raise GrammarError(f"The grammar is invalid: {_first_line(str(error))}", path) from None


def _schema(given: Any, path: str, params: StructuredOutputsParams, rules: Rules | None) -> Any:
    _bounded(_dump(given, "The schema"), "The schema")
    if rules is not None:
        try:
            given, found = distinct_strings(given)
        except RecursionError:
            raise GrammarError("The schema is nested too deeply", path) from None
        rules.update(found)
    schema = rewrite(given, path)
    if params.disable_additional_properties:
        schema = close_objects(schema)
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}

    def with_options(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        own = part.get("x-guidance", {})
        return {**part, "x-guidance": {**options, **own} if isinstance(own, dict) else own}

    def fails(part: Any) -> str | None:
        return _why_invalid(json.dumps({"grammars": [{"json_schema": with_options(part)}]}))

    if error := fails(schema):
        place = original_path(given, locate(schema, error, fails))
        raise GrammarError(f"The schema is not supported: {_first_line(error)}", path + place.removeprefix("$"))
    return with_options(schema)


def _choices(value: Sequence[str], path: str) -> str:
    if not value or not all(value):
        raise GrammarError("choice must be a list of texts that are not empty", path)
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_BYTES:
        raise GrammarError(f"choice may have at most {MAX_CHOICES} texts and {MAX_BYTES} characters", path)
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(value))


def _lark(grammar: str) -> str:
    text = json.loads(grammar)["grammars"][0]["lark_grammar"]
    assert isinstance(text, str)
    return text


def _bounded(text: str, what: str) -> str:
    if len(text) > MAX_BYTES:
        raise GrammarError(f"{what} may have at most {MAX_BYTES} characters, this one has {len(text)}")
    return text


def _dump(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except RecursionError:
        raise GrammarError(f"{what} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{what} is not JSON: {error}") from None


class _ByteVocabulary:
    """A vocabulary of single bytes, which is enough to check a grammar."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteVocabulary()), slices=[])


def _why_invalid(grammar: str) -> str | None:
    if "<[" in grammar:  # it may name tokens that the byte vocabulary does not have
        return llguidance.LLMatcher.validate_grammar(grammar, None, limits=limits()) or None
    matcher = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits())
    return matcher.get_error() or why_unsatisfiable(matcher)


def first_masks(grammar: str, count: int = 4) -> None:
    """Compute masks along some output, so that a grammar that would overflow the stack does so here."""
    grammar, _ = split(grammar)
    if "<[" in grammar:
        return
    matcher = llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=limits())
    for _ in range(count):
        mask = matcher.compute_bitmask()
        token = next((8 * i + byte.bit_length() - 1 for i, byte in enumerate(mask[:32]) if byte), None)
        if token is None or not matcher.consume_token(token):
            return


def why_unsatisfiable(matcher: llguidance.LLMatcher) -> str | None:
    """Why no output satisfies a grammar, as far as its first mask shows; None if one may."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        return "Nothing can satisfy it" if error.startswith("NoExtension") else error
    return None if any(mask) else "Nothing can satisfy it"


def _first_line(error: str) -> str:
    """The informative part of the library's message: a parse error's last line, or the first line."""
    lines = [line.strip() for line in error.strip().split("\n")]
    chosen = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return chosen.rstrip(".")[:300]
