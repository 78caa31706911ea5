"""Chat templates: render a conversation into the prompt's text, in a sandbox, with the helpers that templates expect."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

logger = logging.getLogger(__name__)

ContentFormat = Literal["auto", "string", "openai"]
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SYSTEM_ROLES = ("system", "developer")
_CONTENT_IS_NONE = re.compile(r"\bcontent\b['\"\]]*\s+is\s+(not\s+)?none\b", re.IGNORECASE)
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplateError(ValueError):
    """The messages cannot be rendered. The message is one sentence for the user."""


class HasTemplates(Protocol):
    """What rendering needs of a tokenizer."""

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...


class _Compiled(NamedTuple):
    """A template, whether it iterates over a message's content parts itself and compares content to none, and its string
    constants."""

    template: jinja2.Template
    iterates_parts: bool
    knows_none: bool
    constants: frozenset[str]


class _Arguments(dict[str, Any]):
    """Arguments of a tool call: an object for most templates, and JSON text for those that concatenate it with text."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class _RawArguments(_Arguments):
    """Arguments that are no JSON object, such as those of a call that was cut off: their text, and an object without entries."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __deepcopy__(self, memo: dict[int, Any]) -> _RawArguments:
        return self


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training. The body is rendered and the mark ignored."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    if isinstance(value, _RawArguments):
        return value.text
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@lru_cache(maxsize=32)
def _compile(source: str) -> _Compiled:
    environment = _environment()
    try:
        tree = environment.parse(source)
        constants = (node.value for node in tree.find_all(jinja2.nodes.Const))
        strings = frozenset(value for value in constants if isinstance(value, str))
        return _Compiled(environment.from_string(source), _iterates_content(tree), _CONTENT_IS_NONE.search(source) is not None, strings)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The chat template is not valid Jinja: {error}") from error


def _iterates_content(tree: jinja2.nodes.Template) -> bool:
    def is_content(node: jinja2.nodes.Node) -> bool:
        if isinstance(node, jinja2.nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, jinja2.nodes.Getitem):
            return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
        return isinstance(node, jinja2.nodes.Name) and node.name in aliases

    aliases: set[str] = set()
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and is_content(assign.node):
            aliases.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def check_template(source: str) -> None:
    """Raise `ChatTemplateError` if the template is not valid Jinja."""
    _compile(source)


def render_chat(
    tokenizer: HasTemplates,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    content_format: ContentFormat = "auto",
) -> str:
    """The prompt's text for a conversation.

    messages: {"role": …, "content": …, …}; content is a string or a list of text parts.
    template: Jinja source; None is the tokenizer's own: "tool_use" if there are tools and it has one, else "default".
    add_generation_prompt: end with the beginning of an assistant's message.
    continue_final_message: leave the last message open, so that the model continues it.
    tools, documents: passed to the template. template_kwargs: further variables of the template.
    content_format: how the template takes contents: "string", "openai" (a list of parts), or as `_compile` has found out.
    Raises `ChatTemplateError` for messages or variables that the template cannot render.
    """
    if add_generation_prompt and continue_final_message:
        raise ChatTemplateError("continue_final_message and add_generation_prompt cannot both be set: set one of them.")
    further = dict(template_kwargs or {})
    taken = _RESERVED.intersection(further)
    if taken:
        raise ChatTemplateError(f"chat_template_kwargs must not set {', '.join(sorted(taken))}, which the conversation defines.")
    source = template if template is not None else _choose(tokenizer, has_tools=bool(tools))
    compiled = _compile(source)
    if content_format != "auto":
        compiled = compiled._replace(iterates_parts=content_format == "openai")
    conversation = [_normalize(message, index, compiled) for index, message in enumerate(messages)]
    if not conversation:
        raise ChatTemplateError("messages must hold at least one message.")
    if content_format == "openai":
        conversation = [_with_parts(message) for message in conversation]
    if any(message["role"] in _SYSTEM_ROLES for message in conversation[1:]) and not _takes_late_instructions(source):
        conversation = _with_early_instructions(conversation)
    if continue_final_message:
        conversation[-1] = _mark_end(conversation[-1])
    variables = {
        **tokenizer.special_tokens,
        **further,
        "messages": conversation,
        "tools": None if not tools else [dict(tool) for tool in tools],
        "documents": None if documents is None else [dict(document) for document in documents],
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = compiled.template.render(variables)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The chat template refused the messages: {error!s:.200}") from error
    except Exception as error:  # a template is a foreign program and may raise anything
        logger.debug("chat template failed", exc_info=True)
        raise ChatTemplateError(f"The chat template failed on these messages ({type(error).__name__}: {error!s:.200}).") from error
    return _cut_at_mark(text) if continue_final_message else text


def _choose(tokenizer: HasTemplates, *, has_tools: bool) -> str:
    templates = tokenizer.chat_templates
    name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ChatTemplateError("The model has no chat template: use the completions endpoint, or start the server with a chat template.")
    return templates[name]


def _normalize(message: Mapping[str, Any], index: int, compiled: _Compiled) -> dict[str, Any]:
    """A copy of a message, with its content in the form that the template expects and tool arguments as objects."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content, got a {type(message).__name__}.")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ChatTemplateError(f"{where}.role must be a string such as 'user', got {message.get('role')!r:.200}.")
    result = copy.deepcopy(dict(message))
    result["role"] = _known_role(message["role"], where, compiled.constants)
    calls = result.get("tool_calls") or []
    if not calls:
        result.pop("tool_calls", None)  # templates take the key for calls
    content = result.get("content")
    if content is None:
        result["content"] = None if calls and compiled.knows_none else ""
    elif isinstance(content, list):
        parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        if compiled.iterates_parts:
            result["content"] = [{name: part[name] for name in part if name != "placeholder"} for part in parts]
        else:
            result["content"] = "\n".join(part.get("placeholder") or part.get("text", "") for part in parts)
    elif not isinstance(content, str):
        raise ChatTemplateError(f"{where}.content must be a string or a list of parts, got a {type(content).__name__}.")
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where}.tool_calls must be a list, got a {type(calls).__name__}.")
    for call in calls:
        _parse_arguments(call, where)
    # Clients send back the name of the answer's field; templates read the older one.
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        if isinstance(result.get(name), str):
            result.setdefault(other, result[name])
    return result


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) and content else message


@lru_cache(maxsize=32)
def _takes_late_instructions(source: str) -> bool:
    """Whether the template prints a system message that does not come first. Some refuse it, others leave it out."""
    compiled = _compile(source)
    mark = "LATE INSTRUCTIONS"
    texts = (("system", "a"), ("user", "b"), ("assistant", "c"), ("system", mark), ("user", "d"))
    messages = [{"role": role, "content": [{"type": "text", "text": text}] if compiled.iterates_parts else text} for role, text in texts]
    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    try:
        return mark in compiled.template.render(**tokens, messages=messages, tools=None, documents=None, add_generation_prompt=True)
    except Exception:  # a template is a foreign program and may raise anything
        return False


def _with_early_instructions(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with at most one system message, which comes first.

    The system messages at the beginning are joined. Later ones stay in their places as text of the user, in the neighbouring message of
    the user if there is one, because many templates demand that the roles alternate.
    """
    placed: list[dict[str, Any]] = []
    joins = False  # whether the last message takes the text of the next one of its role
    for message in conversation:
        is_system = message["role"] in _SYSTEM_ROLES
        if is_system and all(earlier["role"] in _SYSTEM_ROLES for earlier in placed):
            joins = bool(placed)
        elif is_system:
            message = {"role": "user", "content": message["content"]}
            joins = placed[-1]["role"] == "user"
        else:
            joins = joins and message["role"] == placed[-1]["role"] == "user"
        if joins:
            placed[-1] = {**placed[-1], "content": _joined(placed[-1]["content"], message["content"])}
        else:
            placed.append(message)
        joins = is_system and placed[-1]["role"] == "user"
    return placed


def _joined(first: Any, second: Any) -> Any:
    """Two contents of messages as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in (first, second)]
    return [*parts[0], *parts[1]]


def _known_role(role: str, where: str, constants: frozenset[str]) -> str:
    # A template that treats a role in a special manner contains its name as a string.
    if role in _ROLES or role in constants:
        # "developer" is OpenAI's newer name of "system". Templates that do not know it use the older one.
        return "system" if role == "developer" and role not in constants else role
    raise ChatTemplateError(f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r:.200}.")


def _part(part: Any, where: str) -> dict[str, str]:
    """A part of text, or one of media that is known where to stand (`runtime/media/sources.py`)."""
    if isinstance(part, Mapping) and isinstance(part.get("placeholder"), str):
        return {"type": str(part["type"]), "placeholder": part["placeholder"]}
    return {"type": "text", "text": _part_text(part, where)}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ChatTemplateError(f"{where} must be an object with a type, got a {type(part).__name__}.")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where}.text must be a string, got a {type(text).__name__}.")
        return text
    raise ChatTemplateError(f"{where} has type {kind!r:.200}, but this model only reads text.")


def _parse_arguments(call: Any, where: str) -> None:
    # OpenAI's clients send the arguments as a JSON string, but templates expect an object.
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ChatTemplateError(f"{where}.tool_calls must be objects with the key function.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # cut off, or written by a model that does not know better
            arguments = json.loads(arguments or "{}")
    if isinstance(arguments, dict) or arguments is None:
        function["arguments"] = _Arguments(arguments or {})
    else:
        given = function["arguments"]
        function["arguments"] = _RawArguments(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _mark_end(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    if not content:
        raise ChatTemplateError("continue_final_message is set, but the final message has no text to continue.")
    if "text" not in content[-1]:
        raise ChatTemplateError("continue_final_message is set, but the final message ends with an image.")
    last = {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}
    return {**message, "content": [*content[:-1], last]}


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise ChatTemplateError("continue_final_message is set, but the chat template does not render the final message.")
    whole = text.startswith(_CONTINUE_MARK, at)
    # If the mark's space is gone, the template trims messages, and would have trimmed this one without the mark too.
    return text[:at] if whole else text[:at].rstrip()
