"""`ChatPrompts`: turns conversations into the text that the model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compile_and_serve.runtime.media.prepared import MediaKind
from compile_and_serve.runtime.media.sources import show_marks
from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.special_text import ChatText, Placeholders
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.runtime.tools.tool_prompt import show_tools
from compile_and_serve.runtime.tools.tool_use import ToolUse, tool_use
from compile_and_serve.serve.errors import user_errors
from compile_and_serve.serve.protocol.chat import ChatFields
from compile_and_serve.serve.protocol.client_parts import readable_messages
from compile_and_serve.serve.protocol.client_tools import function_choice, function_tools
from compile_and_serve.serve.settings import ServerSettings


class ChatPrompts:
    """settings: the chat template that replaces the model's own, its defaults, and whether special tokens stay text.

    They do in the text of users, systems and tools, and in the tools and documents themselves.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        templates: TemplatePool,
        parsers: Parsers,
        settings: ServerSettings,
        media_texts: Mapping[MediaKind, str],
    ) -> None:
        """media_texts: what stands for media in a prompt."""
        self._media_texts = media_texts
        self._inputs, self._parsers, self._settings = inputs, parsers, settings
        self.templates = templates

    def tool_use(self, body: ChatFields, *, only_prompt: bool = False) -> ToolUse:
        """How the answer may use the request's tools. only_prompt: there is no answer. Raises a 400."""
        parallel = body.parallel_tool_calls is not False
        tools, choice = function_choice(body.tool_choice, function_tools(body.tools))
        with user_errors():
            return tool_use(
                tools, choice, self._parsers, parallel=parallel, only_shown=only_prompt, open_schemas=self._settings.open_schemas
            )

    def render(self, body: ChatFields, use: ToolUse) -> ChatText:
        """The text of a conversation with its tools. Raises a 400, or a `ValueError` of the runtime."""
        tokenizer = self._inputs.require_tokenizer("a conversation")
        given, options = readable_messages(body.messages), self._options(body)
        taken = body.taken_media
        if not self._settings.escape_special_tokens:
            given = given if taken is None else show_marks(given, taken, self._media_texts)
            return ChatText(self._render(tokenizer, given, use, options))
        hidden = Placeholders(tokenizer)
        try:
            given = hidden.hide_in_messages(given)
            given = given if taken is None else show_marks(given, taken, self._media_texts)
            use = replace(use, shown=hidden.hide(list(use.shown)))
            options["documents"] = hidden.hide(options["documents"])
            return hidden.restore(self._render(tokenizer, given, use, options))
        except ChatTemplateError as error:
            raise ChatTemplateError(hidden.restore(str(error)).text) from error
        except RecursionError:
            raise ChatTemplateError("The messages are nested too deeply.") from None

    def _options(self, body: ChatFields) -> dict[str, Any]:
        """The request's options of the template, and the server's where the request has none."""
        settings, options = self._settings, body.template_options()
        variables = {**(settings.default_chat_template_kwargs or {}), **options["template_kwargs"]}
        effort, other_words = variables.get("reasoning_effort"), settings.reasoning_effort_map or {}
        if isinstance(effort, str) and effort in other_words:
            variables["reasoning_effort"] = other_words[effort]
        return options | {"template_kwargs": variables, "content_format": settings.chat_template_content_format}

    def _render(self, tokenizer: Tokenizer, given: Sequence[Any], use: ToolUse, options: dict[str, Any]) -> str:
        messages, tools = show_tools(given, use, self._parsers)
        return self.templates.render(tokenizer, messages, template=self._settings.chat_template, tools=tools or None, **options)
