"""JSON schemas as the grammar library takes them: equivalent rewrites, and the place of what it does not support."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from compile_and_serve.runtime.structured.grammar_error import GrammarError

MAX_PROPERTIES = 1000  # of one object: the time to compile grows faster than their square
MAX_DEPTH = 64  # the library's JSON reader gives up at 128 levels, of which a property takes two
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_ONE = (
    "additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames", "additionalItems",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_MAX_TRIES, _MAX_SECONDS = 200, 0.5  # of the search for the place of an error

Fails = Callable[[Any], str | None]  # why the library refuses a schema


def parse_json(text: str, what: str) -> Any:
    """The value of JSON text. Raises `GrammarError`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"{what} is not valid JSON: {error}") from None


def rewrite(schema: Any, path: str = "$", depth: int = 0) -> Any:
    """An equivalent schema without some forms that the library refuses.

    A `format` that it does not know is dropped, since formats are annotations. `uniqueItems: false` says nothing. A `oneOf` of
    constants that differ is an `anyOf`. What nothing satisfies (`not: {}`) is `false`. Raises `GrammarError`.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(f"A schema must be an object or a boolean, got {schema!r:.50}", path)
    if depth > MAX_DEPTH:
        raise GrammarError(f"The schema is nested more than {MAX_DEPTH} levels deep", path[:200])
    if isinstance(schema.get("properties"), dict) and len(schema["properties"]) > MAX_PROPERTIES:
        count = len(schema["properties"])
        raise GrammarError(
            f"An object may have at most {MAX_PROPERTIES} properties, this one has {count}", f"{path}.properties"
        )
    if schema.get("not") in ({}, True) and "not" in schema:
        return False
    result = dict(schema)
    if isinstance(result.get("format"), str) and result["format"] not in _FORMATS:
        del result["format"]
    if result.get("uniqueItems") is False:
        del result["uniqueItems"]
    if "anyOf" not in result and _are_distinct_constants(result.get("oneOf")):
        result["anyOf"] = result.pop("oneOf")
    for key, child_path, child in list(_children(result, path)):
        new = rewrite(child, child_path, depth + 1)
        if isinstance(key, str):
            result[key] = new
        else:
            name, index = key
            if result[name] is schema.get(name) or result[name] is schema.get("oneOf"):
                result[name] = result[name].copy()
            result[name][index] = new
    return result


def locate(schema: Any, error: str, fails: Fails) -> str:
    """The path of the part of a schema to which the library's error message refers; "$" if it cannot be told."""
    if found := re.match(r"Unimplemented keys: (\[.*\])", error):
        keys = json.loads(found[1])
        for path, part in _parts(schema):
            for key in keys:
                if key in part:
                    return f"{path}.{key}"
    elif found := re.match(r"(?:Pointer|Resource) '([^']*)'", error):
        for path, part in _parts(schema):
            if isinstance(ref := part.get("$ref"), str) and ref.endswith(found[1].removeprefix("json-schema:///")):
                return f"{path}.$ref"
    elif found := re.match(r"Invalid type: (.*)", error):
        for path, part in _parts(schema):
            types = part.get("type")
            if found[1] in (types if isinstance(types, list) else [types]):
                return f"{path}.type"
    return _search(schema, error.split("\n")[0], fails)


def _search(schema: Any, error: str, fails: Fails) -> str:
    """Descend to the smallest part that is refused with the same message by itself, with the root's definitions beside it."""
    if not isinstance(schema, dict):
        return "$"
    shared = {name: schema[name] for name in ("$defs", "definitions", "components") if name in schema}
    deadline, tries = time.monotonic() + _MAX_SECONDS, 0
    path, part, seen = "$", schema, set[int]()
    while True:
        children = [(child_path, child) for _, child_path, child in _children(part, path) if isinstance(child, dict)]
        target = _resolve(schema, part.get("$ref"))
        if target is not None and id(target[1]) not in seen:
            children.append(target)
        for child_path, child in children:
            tries += 1
            if tries > _MAX_TRIES or time.monotonic() > deadline:
                return path
            if id(child) in seen:
                continue
            if (fails({**shared, **child}) or "").split("\n")[0] == error:
                seen.add(id(child))
                path, part = child_path, child
                break
        else:
            return f"{path}.pattern" if "regex" in error and "pattern" in part else path


def _resolve(root: dict[str, Any], ref: Any) -> tuple[str, Any] | None:
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    path, value = "$", root
    for name in ref[2:].split("/"):
        if not isinstance(value, dict) or name not in value:
            return None
        path, value = path + _step(name), value[name]
    return (path, value) if isinstance(value, dict) else None


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within a schema, itself first."""
    stack = [("$", schema)]
    while stack:
        path, part = stack.pop()
        if isinstance(part, dict):
            yield path, part
            stack += reversed([(child_path, child) for _, child_path, child in _children(part, path)])


def _children(schema: dict[str, Any], path: str) -> Iterator[tuple[str | tuple[str, Any], str, Any]]:
    """(key, or keyword and index; path; schema) of the schemas directly within a schema."""
    for name in _ONE:
        if isinstance(schema.get(name), (dict, bool)):
            yield name, f"{path}.{name}", schema[name]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            for index, child in enumerate(schema[name]):
                yield (name, index), f"{path}.{name}[{index}]", child
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            for key, child in schema[name].items():
                yield (name, key), f"{path}.{name}{_step(key)}", child


def _step(key: str) -> str:
    return f".{key}" if re.fullmatch(r"[\w$-]+", key) else f"[{json.dumps(key)}]"


def _are_distinct_constants(branches: Any) -> bool:
    if not isinstance(branches, list):
        return False
    seen: set[str] = set()
    for branch in branches:
        if not isinstance(branch, dict):
            return False
        values = (
            branch["enum"] if isinstance(branch.get("enum"), list) else [branch["const"]] if "const" in branch else []
        )
        # 1 and 1.0 are equal in JSON Schema, so that numbers are compared as floats.
        names = {json.dumps(float(v) if type(v) in (int, float) else v, sort_keys=True) for v in values if _is_small(v)}
        if not names or len(names) < len(values) or seen & names:
            return False
        seen |= names
    return True


def _is_small(value: Any) -> bool:
    return isinstance(value, (str, bool)) or value is None or (isinstance(value, (int, float)) and abs(value) < 2**53)
