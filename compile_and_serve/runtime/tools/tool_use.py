"""`ToolUse`: the tools of a chat request, checked, and the grammar that its calls must match."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from compile_and_serve.runtime.parsers.tools.json_list import JsonListParser
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_TOOLS = 512
_MAX_NAME = 256
_MAX_ECHO = 200  # characters of a request's own content that an error message repeats
_warned: set[str] = set()  # names that this process has logged, for whichever engine


class ToolUseError(ValueError):
    """The tools of a request are wrong. param: "tools" or "tool_choice". The message is one sentence."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. schema: JSON schema of its parameters."""

    name: str
    schema: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one completion may use tools. parser: None if the output is not searched for calls. shown: the tools for the template.

    grammar: the form of the output; None if it is free. forced: whether the output must be calls.
    """

    parser: type[ToolParser] | None = None
    shown: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Tool] = ()
    forced: bool = False
    parallel: bool = True
    grammar: StructuredOutputsParams | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def tool_use(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parsers: Parsers,
    *,
    parallel: bool,
    only_shown: bool = False,
    open_schemas: bool = False,
) -> ToolUse:
    """The checked use of tools. Raises `ToolUseError`.

    only_shown: no answer is generated, so no parser is needed. open_schemas: arguments may have properties that a schema does not declare.
    """
    known = _tools(tools or ())
    mode, name = _choice(choice, known)
    if mode == "none" or not known:
        return ToolUse()
    if only_shown and mode == "auto" and parsers.tools is None:
        return ToolUse(shown=tools or ())
    parser = _parser(parsers, forced=mode != "auto")
    allowed = [tool for tool in known if name is None or tool.name == name]
    tag: dict[str, Any] | None
    try:
        if mode != "auto":
            tag = _forced(parser, allowed, parallel=parallel and name is None)
        else:
            tag = _triggered(parser, allowed, parallel=parallel) if any(tool.strict for tool in allowed) else None
    except RecursionError:
        raise ToolUseError("The schemas of the tools are nested too deeply.", "tools") from None
    grammar = None
    if tag is not None:
        structural_tag = {"type": "structural_tag", "format": tag}
        grammar = StructuredOutputsParams(structural_tag=structural_tag, disable_additional_properties=not open_schemas)
    return ToolUse(
        parser=parser,
        shown=tools or (),
        tools=known,
        forced=mode != "auto",
        parallel=parallel and name is None,
        grammar=grammar,
        schemas={tool.name: tool.schema for tool in allowed},
    )


def parsed_params(
    params: SamplingParams, prompt: str, use: ToolUse, parsers: Parsers, *, thinking_token_budget: int | None = None
) -> SamplingParams:
    """The parameters with the grammar of the tools, which begins after the reasoning, and the tokens that parsers read.

    prompt: the rendered conversation. thinking_token_budget: tokens of the reasoning; None: no limit.
    """
    changes: dict[str, Any] = {}
    structured = use.grammar if use.grammar is not None else params.structured_outputs
    if parsers.reasoning is not None and parsers.reasoning.begins_with_reasoning(prompt):
        if thinking_token_budget is not None and structured is None:
            structured = StructuredOutputsParams()
        if structured is not None:
            structured = msgspec.structs.replace(
                structured,
                begins_after=parsers.reasoning_ends(),
                thinking_token_budget=thinking_token_budget,
                thinking_starts=parsers.reasoning_start(prompt),
                may_end_before=parsers.reasoning.parses_tools and bool(use.shown) and not use.forced,
            )
    if structured is not None:
        changes["structured_outputs"] = structured
    if parsers.needs_special_tokens(use.parser):
        changes["skip_special_tokens"] = False
    return msgspec.structs.replace(params, **changes) if changes else params


def _tools(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    if len(given) > MAX_TOOLS:
        raise ToolUseError(f"tools has {len(given)} entries, but at most {MAX_TOOLS} are accepted.", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]


def _tool(given: Mapping[str, Any], where: str) -> Tool:
    if not isinstance(given, Mapping):
        raise ToolUseError(f"{where} must be an object like {{'type': 'function', 'function': {{…}}}}.", "tools")
    if given.get("type", "function") != "function":
        sentence = f"{where}.type must be 'function', got {given['type']!r:.{_MAX_ECHO}}."
        raise ToolUseError(sentence, "tools")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise ToolUseError(f"{where}.function must be an object with a name.", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        sentence = f"{where}.function.name must be a text of 1 to {_MAX_NAME} printable characters."
        raise ToolUseError(sentence, "tools")
    schema = function.get("parameters")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise ToolUseError(f"{where}.function.parameters must be a JSON schema, which is an object.", "tools")
    return Tool(name, {"type": "object", **schema}, strict=function.get("strict") is True)


def _choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> tuple[Literal["none", "auto", "required"], str | None]:
    """The mode, and the name of the only tool that may be called."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            sentence = "tool_choice must be 'none', 'auto', 'required' or an object that names a function."
            raise ToolUseError(sentence, "tool_choice")
        if choice == "required" and not tools:
            raise ToolUseError("tool_choice needs tools.", "tool_choice")
        return choice, None  # type: ignore[return-value]
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        sentence = "tool_choice must be like {'type': 'function', 'function': {'name': …}}."
        raise ToolUseError(sentence, "tool_choice")
    if not tools:
        raise ToolUseError("tool_choice needs tools.", "tool_choice")
    if name not in {tool.name for tool in tools}:
        raise ToolUseError(f"tool_choice names {name!r:.{_MAX_ECHO}}, which is not one of the tools.", "tool_choice")
    return "required", name


def _parser(parsers: Parsers, *, forced: bool) -> type[ToolParser] | None:
    if parsers.reasoning is not None and parsers.reasoning.parses_tools and not forced:
        return None
    if parsers.tools is None and not forced:
        raise ToolUseError(
            "tool_choice 'auto' needs a tool parser, which could not be detected from the model's chat template: start the server "
            "with --enable-auto-tool-choice --tool-call-parser NAME, or set tool_choice to 'required', 'none' or a function.",
            "tool_choice",
        )
    parser = parsers.tools
    if parser is None:
        parser = JsonListParser if parsers.template_uses_tools else HermesParser
    if parser.call_format("name") is None and (forced or not parsers.template_uses_tools):
        if not parsers.template_uses_tools:
            raise ToolUseError(
                f"The chat template does not know tools, and the format {parser.name!r} is not known well enough to describe "
                "it: start the server with --chat-template, or with --tool-call-parser hermes.",
                "tools",
            )
        parser = JsonListParser
    return parser


def _tags(parser: type[ToolParser], tools: Sequence[Tool], *, only_strict: bool) -> list[dict[str, Any]]:
    tags = []
    for tool in tools:
        texts = parser.call_format(tool.name)
        assert texts is not None
        schema = _enforced(tool) if tool.strict or not only_strict else {"type": "object"}
        tags.append({"begin": texts[0], "content": {"type": "json_schema", "json_schema": schema}, "end": texts[1]})
    return tags


def _enforced(tool: Tool) -> Any:
    kind = tool.schema["type"]
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        sentence = f"The parameters of {tool.name!r:.{_MAX_ECHO}} must have the type 'object', got {kind!r:.{_MAX_ECHO}}."
        raise ToolUseError(sentence, "tools")
    return {**tool.schema, "type": "object"}


def _calls(parser: type[ToolParser], tags: list[dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": parser.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _forced(parser: type[ToolParser] | None, tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """The structural tag of an output that is one call, or any number of calls."""
    assert parser is not None
    calls = _calls(parser, _tags(parser, tools, only_strict=False), parallel=parallel)
    if not parser.list_opener:
        return calls
    elements = [{"type": "const_string", "value": parser.list_opener}, calls, {"type": "const_string", "value": parser.list_closer}]
    return {"type": "sequence", "elements": elements}


def _triggered(parser: type[ToolParser] | None, tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any] | None:
    """The structural tag of free text in which calls of strict tools match their schemas; None if nothing marks calls."""
    if parser is None or not parser.trigger or parser.call_format("name") is None:
        name = "gpt-oss" if parser is None else parser.name
        if name not in _warned:
            _warned.add(name)
            logger.warning("Strict tools are not enforced with tool_choice 'auto' in the format %r.", name)
        return None
    tags = _tags(parser, tools, only_strict=True)
    if parser.list_opener:
        tags = [{"begin": parser.list_opener, "content": _calls(parser, tags, parallel=parallel), "end": parser.list_closer}]
    return {"type": "triggered_tags", "triggers": [parser.trigger], "tags": tags, "at_least_one": False, "stop_after_first": not parallel}
