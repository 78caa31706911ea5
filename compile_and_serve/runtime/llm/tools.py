"""Tools of `LLM.chat`: how they are shown to the model, the grammar of forced calls, and the calls in an output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from compile_and_serve.runtime.parsers.events import Call, ParsedMessage
from compile_and_serve.runtime.parsers.selection import select_parsers
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from compile_and_serve.runtime.sampling_params import SamplingParams, SamplingParamsError
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.runtime.tools.tool_prompt import show_tools
from compile_and_serve.runtime.tools.tool_use import ToolUseError, parsed_params, tool_use


class ChatTools:
    """The tools of some conversations. Raises `ToolUseError`.

    tools, choice, parallel: as in OpenAI's API. chat_template: replaces the tokenizer's. The format of the calls is the one that the
    template uses; where it knows no tools, Hermes' format is described in the system message.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: str | Mapping[str, Any] | None,
        *,
        parallel: bool,
        chat_template: str | None,
    ) -> None:
        parsers = select_parsers(tokenizer, chat_template=chat_template)
        if parsers.tools is None and not parsers.template_uses_tools:
            parsers = replace(parsers, tools=HermesParser)
        finds_calls = parsers.reasoning is not None and parsers.reasoning.parses_tools
        self._parsers = parsers
        # With an unknown format the caller finds the calls in the text.
        self._use = tool_use(tools, choice, parsers, parallel=parallel, only_shown=not finds_calls)

    def show(self, messages: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Mapping[str, Any]]]:
        """The messages and the tools for the chat template."""
        return show_tools(messages, self._use, self._parsers)

    def params(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """The parameters with the grammar of the calls. prompt: the rendered conversation. Raises `ToolUseError`."""
        if self._use.grammar is not None and params.structured_outputs is not None:
            raise ToolUseError("tool_choice and structured_outputs cannot both restrict the output: leave one of them out.", "tool_choice")
        return parsed_params(params, prompt, self._use, self._parsers)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Say of errors in the grammar of the calls that they are in the tools."""
        try:
            yield
        except SamplingParamsError as error:
            if self._use.grammar is None or error.param != "structured_outputs":
                raise
            raise ToolUseError(str(error).replace("structured_outputs", "tools", 1), "tools") from error

    def calls(self, prompt: str, text: str) -> list[Call]:
        """The complete calls in an output."""
        use = self._use
        parser = self._parsers.output_parser(prompt, use.parser, use.schemas, max_calls=None if use.parallel else 1)
        return [] if parser is None else ParsedMessage().add(parser.feed(text, (), last=True)).calls
