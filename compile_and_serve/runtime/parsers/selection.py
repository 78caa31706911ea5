"""Which parsers read a model's output, by name or from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compile_and_serve.runtime.parsers.output import OutputParser
from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser
from compile_and_serve.runtime.parsers.registry import (
    READ_BY_REASONING,
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)
from compile_and_serve.runtime.parsers.tools.base import ToolParser, uses_tools
from compile_and_serve.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one model. template_uses_tools: whether the chat template renders tools."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    template_uses_tools: bool = False
    tokenizer: Tokenizer | None = None

    def needs_special_tokens(self, tools: type[ToolParser] | None) -> bool:
        """Whether one of the parsers reads special tokens, which must then be part of the text."""
        special = {} if self.tokenizer is None else self.tokenizer.special_texts
        used = [parser for parser in (tools, self.reasoning) if parser is not None]
        return any(marker in special for parser in used for marker in parser.markers)

    def reasoning_ends(self) -> list[list[int]]:
        """Token ids of each text that ends the reasoning."""
        if self.reasoning is None or self.tokenizer is None:
            return []
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in self.reasoning.end_texts()]

    def reasoning_start(self, prompt: str) -> list[int]:
        """Token ids that begin the reasoning; empty if the output begins with it."""
        parser = self.reasoning
        if parser is None or self.tokenizer is None or parser.opened_by_default or not parser.starts:
            return []
        if prompt.rstrip().endswith(parser.starts):
            return []
        return self.tokenizer.encode(parser.starts[0], add_special_tokens=False)

    def output_parser(
        self, prompt: str, tools: type[ToolParser] | None, schemas: Mapping[str, Mapping[str, Any]], *, max_calls: int | None
    ) -> OutputParser | None:
        """A parser of one completion; None if there is nothing to find. prompt: the rendered conversation."""
        if tools is None and self.reasoning is None:
            return None
        ends: list[int] = []
        if self.reasoning is not None and self.tokenizer is not None:
            encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in self.reasoning.ends]
            ends = [ids[0] for ids in encoded if len(ids) == 1]
        return OutputParser(
            None if self.reasoning is None else self.reasoning(prompt),
            None if tools is None else tools(schemas),
            end_ids=ends,
            calls=bool(schemas),
            max_calls=max_calls,
        )


def select_parsers(
    tokenizer: Tokenizer | None, *, chat_template: str | None = None, tools: str | None = None, reasoning: str | None = None
) -> Parsers:
    """The parsers of these names, or else those whose formats the chat templates use.

    chat_template: replaces the tokenizer's. Raises `ParserError` for an unknown name.
    """
    templates: list[str] = []
    if chat_template is not None:
        templates = [chat_template]
    elif tokenizer is not None:
        templates = list(tokenizer.chat_templates.values())
    if tools in READ_BY_REASONING:
        return Parsers(
            reasoning=reasoning_parser(reasoning or "gpt-oss"), template_uses_tools=any(map(uses_tools, templates)), tokenizer=tokenizer
        )
    return Parsers(
        tools=tool_parser(tools) if tools is not None else detect_tool_parser(templates),
        reasoning=reasoning_parser(reasoning) if reasoning is not None else detect_reasoning_parser(templates),
        template_uses_tools=any(map(uses_tools, templates)),
        tokenizer=tokenizer,
    )
