"""The parsers of a server, from its options and the model's chat template."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.registry import ParserError
from compile_and_serve.runtime.parsers.selection import Parsers, select_parsers
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.settings import ServerSettings


def served_parsers(tokenizer: Tokenizer | None, settings: ServerSettings) -> Parsers:
    """Raises `ParserError` for an unknown name, and if the settings require a tool parser and none is found."""
    parsers = select_parsers(
        tokenizer, chat_template=settings.chat_template, tools=settings.tool_call_parser, reasoning=settings.reasoning_parser
    )
    reads_calls = parsers.tools is not None or (parsers.reasoning is not None and parsers.reasoning.parses_tools)
    if settings.enable_auto_tool_choice and not reads_calls:
        raise ParserError(
            "--enable-auto-tool-choice needs a tool parser, and none was detected from the chat template: name it with --tool-call-parser."
        )
    return parsers
