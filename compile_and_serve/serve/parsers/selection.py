"""Which parsers a server uses, from its options and the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.parsers.output import OutputParser
from compile_and_serve.serve.parsers.reasoning.base import ReasoningParser
from compile_and_serve.serve.parsers.registry import (
    ParserError,
    detect_reasoning_parser,
    detect_tool_parser,
    reasoning_parser,
    tool_parser,
)
from compile_and_serve.serve.parsers.tools.base import ToolParser, uses_tools
from compile_and_serve.serve.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of one server. template_uses_tools: whether the chat template renders tools."""

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
        self,
        prompt: str,
        tools: type[ToolParser] | None,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        max_calls: int | None,
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


def select_parsers(tokenizer: Tokenizer | None, settings: ServerSettings) -> Parsers:
    """The parsers that the settings name, or else those whose formats the chat templates use.

    Raises `ParserError` for an unknown name, and if the settings require a tool parser and none is found.
    """
    tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
    templates: list[str] = []
    if settings.chat_template is not None:
        templates = [settings.chat_template]
    elif tokenizer is not None:
        templates = list(tokenizer.chat_templates.values())
    found = tool_parser(tools) if tools is not None else detect_tool_parser(templates)
    if settings.enable_auto_tool_choice and found is None:
        raise ParserError(
            "--enable-auto-tool-choice needs a tool parser, and none was detected from the chat template: name it with "
            "--tool-call-parser."
        )
    return Parsers(
        tools=found,
        reasoning=reasoning_parser(reasoning) if reasoning is not None else detect_reasoning_parser(templates),
        template_uses_tools=any(map(uses_tools, templates)),
        tokenizer=tokenizer,
    )
