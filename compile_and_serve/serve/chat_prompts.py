"""`ChatPrompts`: turns conversations into the text that the model continues."""

from __future__ import annotations

from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.tools.tool_prompt import show_tools
from compile_and_serve.runtime.tools.tool_use import ToolUse, tool_use
from compile_and_serve.serve.errors import user_errors
from compile_and_serve.serve.protocol.chat import ChatFields


class ChatPrompts:
    """template: source of the chat template that replaces the model's own."""

    def __init__(self, inputs: InputProcessor, templates: TemplatePool, parsers: Parsers, template: str | None) -> None:
        self._inputs, self._parsers, self._template = inputs, parsers, template
        self.templates = templates

    def tool_use(self, body: ChatFields, *, only_prompt: bool = False) -> ToolUse:
        """How the answer may use the request's tools. only_prompt: there is no answer. Raises a 400."""
        parallel = body.parallel_tool_calls is not False
        with user_errors():
            return tool_use(body.tools, body.tool_choice, self._parsers, parallel=parallel, only_shown=only_prompt)

    def render(self, body: ChatFields, use: ToolUse) -> str:
        """The text of a conversation with its tools. Raises a `ValueError` of the runtime."""
        messages, tools = show_tools(body.messages, use, self._parsers)
        tokenizer = self._inputs.require_tokenizer("a conversation")
        return self.templates.render(tokenizer, messages, template=self._template, tools=tools or None, **body.template_options())
