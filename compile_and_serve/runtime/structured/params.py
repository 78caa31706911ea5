"""`StructuredOutputsParams`: the form that a request's output must have. Names are those of vLLM."""

from __future__ import annotations

from typing import Any

import msgspec


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of the output: exactly one of the first six fields is set.

    json: a JSON schema, as an object or as JSON text. json_object: True for any JSON object. regex: the whole output
    matches it. choice: the output is one of these texts. grammar: EBNF (GBNF's notation, `root ::= …`, or Lark's,
    `start: …`). structural_tag: text in which tags hold a structured part, in either of xgrammar's two forms, as an object
    or as JSON text:
        {"type": "structural_tag", "triggers": ["<call"], "structures": [{"begin": "<call>", "schema": {…}, "end": "</call>"}]}
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<call"], "at_least_one": true,
            "tags": [{"begin": "<call>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</call>"}]}}
        The types of a format are const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags and
        tags_with_separator.

    disable_additional_properties: objects of the schemas have only properties that a schema declares, unless it has additionalProperties
    (`closing.close_objects`).
    disable_any_whitespace: JSON is written without optional whitespace. whitespace_pattern: a regex for JSON's optional
    whitespace; by default up to 32 spaces, tabs and line ends at each place.
    begins_after: token id sequences. Tokens are free until the first of them was generated, and structured after it. Empty:
    structured from the first token. The output does not end before, unless may_end_before is set. A reasoning parser puts the
    ids of its end marker here.

    thinking_token_budget: after so many free tokens the first of begins_after is forced, one token per step. None: no limit.
    May be set without any form. thinking_starts: token ids with which the free tokens must begin; an output that
    begins otherwise is structured from its first token. Empty: the first token is free.

    is_free: nothing but the budget restricts the output. compiled: the checked grammar. `InputProcessor` puts both in place of
    the form for the engine.

    A request carries them in `SamplingParams.structured_outputs`. `InputProcessor.prepare` checks them and raises
    `SamplingParamsError` with the path of the part that is wrong. The end-of-sequence ids are allowed only where the output
    is complete, and where nothing else can follow the request ends.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_additional_properties: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    begins_after: list[list[int]] = []
    thinking_token_budget: int | None = None
    thinking_starts: list[int] = []
    may_end_before: bool = False
    is_free: bool = False
    compiled: str | None = None

    @property
    def draft_ends(self) -> frozenset[int]:
        """Tokens at which a draft ends, themselves excluded: behind them a grammar or a budget may begin."""
        return frozenset(marker[-1] for marker in [*self.begins_after, self.thinking_starts] if marker)
