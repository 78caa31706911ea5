"""The tools of a request as functions, in the shapes that clients send.

Cursor sends functions without the object `function`, Codex custom tools and namespaces. Tools that this server would have to run itself
are left out, and the log says so once for each type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compile_and_serve.serve.errors import MAX_ECHO
from compile_and_serve.serve.protocol.client_parts import CUSTOM_ARGUMENT, warn_once

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def function_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools as chat's functions. Wrong functions stay as they are: `tool_use` names what is wrong with them."""
    if tools is None:
        return None
    return [function for tool in tools for function in _functions(tool)]


def leave_out_tool(tool: Mapping[str, Any]) -> None:
    """Log that a tool of this type is left out."""
    warn_once(f"Requests contain tools of the type {tool.get('type')!r:.{MAX_ECHO}}, which this server cannot run: they are left out.")


def in_namespace(namespace: Any, name: str) -> str:
    """The name under which the model sees a function of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if isinstance(namespace, str) and namespace else name


def custom_names(tools: Sequence[Mapping[str, Any]] | None) -> set[str]:
    """The names of the custom tools, as the model sees them."""
    return {in_namespace(namespace, str(tool.get("name"))) for namespace, tool in _flat(tools) if _is_custom(tool)}


def namespaces(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, tuple[str, str]]:
    """The name under which the model sees a tool of a namespace → (namespace, name)."""
    named = ((namespace, str(tool.get("name"))) for namespace, tool in _flat(tools) if namespace)
    return {in_namespace(*pair): pair for pair in named}


def function_choice(choice: Any, tools: list[Any] | None) -> tuple[list[Any] | None, Any]:
    """The tools that the model may see, and tool_choice as chat writes it. Other choices stay as they are, for `tool_use` to refuse."""
    if isinstance(choice, str):
        return tools, _MODES.get(choice, choice)
    if not isinstance(choice, Mapping):
        return tools, choice
    kind = choice.get("type")
    if kind in _MODES:
        return tools, _MODES[kind]
    if kind == "allowed_tools" and isinstance(allowed := choice.get("allowed_tools", choice), Mapping):
        chosen = (_chosen_name(tool) for tool in allowed.get("tools") or () if isinstance(tool, Mapping))
        names = {name for name in chosen if name is not None}  # tools of other types were left out
        kept = [tool for tool in tools or () if _name_of(tool) in names]
        if kept and names <= {_name_of(tool) for tool in kept} and allowed.get("mode") in ("auto", "required"):
            return kept, allowed["mode"]
        return tools, choice
    name = _chosen_name(choice) if kind in ("function", "custom", "tool") else None
    return tools, choice if name is None else {"type": "function", "function": {"name": name}}


def _functions(tool: Any) -> list[Any]:
    if not isinstance(tool, Mapping):
        return [tool]
    kind = tool.get("type")
    if isinstance(tool.get("function"), Mapping) and kind in (None, "function"):
        return [tool]
    if kind == "namespace":
        return [function for namespace, inner in _flat([tool]) for function in _named(_functions(inner), namespace)]
    if _is_custom(tool):
        return [_custom_function(tool.get("custom", tool))]
    schema = tool.get("parameters", tool.get("input_schema"))
    if kind in (None, "function") or (schema is not None and isinstance(tool.get("name"), str)):
        if "name" not in tool:
            return [tool]
        fields = {**tool, "parameters": schema}
        return [{"type": "function", "function": {name: fields[name] for name in _FUNCTION_FIELDS if fields.get(name) is not None}}]
    leave_out_tool(tool)
    return []


def _is_custom(tool: Mapping[str, Any]) -> bool:
    """Whether it is a custom tool of OpenAI's. Anthropic gives this type to functions, which have a schema."""
    return tool.get("type") == "custom" and "input_schema" not in tool


def _flat(tools: Sequence[Any] | None) -> list[tuple[str, Mapping[str, Any]]]:
    """(namespace or "", tool) of each tool and of each tool in a namespace."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            continue
        if tool.get("type") != "namespace":
            found.append(("", tool))
            continue
        inner = tool.get("tools")
        name = tool.get("name")
        if isinstance(inner, list):
            found += [(name if isinstance(name, str) else "", each) for each in inner if isinstance(each, Mapping)]
    return found


def _named(functions: list[Any], namespace: str) -> list[Any]:
    named = []
    for tool in functions:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            tool = {"type": "function", "function": {**function, "name": in_namespace(namespace, function["name"])}}
        named.append(tool)
    return named


def _custom_function(tool: Any) -> dict[str, Any]:
    """A function with one text argument in place of a custom tool. The grammar of its text, if it has one, joins the description."""
    tool = tool if isinstance(tool, Mapping) else {}
    described = [tool["description"]] if isinstance(tool.get("description"), str) else []
    form = tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else {}
    if isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str):
        described.append(f"The text must match this grammar ({grammar.get('syntax')}):\n{grammar['definition']}")
    argument = {"type": "string", "description": "The whole text that the tool takes."}
    schema = {"type": "object", "properties": {CUSTOM_ARGUMENT: argument}, "required": [CUSTOM_ARGUMENT], "additionalProperties": False}
    function = {"name": tool.get("name"), "description": "\n\n".join(described), "parameters": schema}
    return {"type": "function", "function": function}


def _chosen_name(choice: Mapping[str, Any]) -> str | None:
    """The name in a choice, which may lie in an object of the choice's type."""
    inner = choice.get(str(choice.get("type")))
    given = inner if isinstance(inner, Mapping) else choice
    name = given.get("name")
    return in_namespace(choice.get("namespace"), name) if isinstance(name, str) else None


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
