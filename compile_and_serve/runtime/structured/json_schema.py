"""JSON schemas as the grammar library takes them: equivalent rewrites, and the place of what it does not support."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.negation import ANNOTATIONS, negated
from compile_and_serve.runtime.structured.one_of import Disjointness

MAX_PROPERTIES = 1000  # of one object: the time to compile grows faster than their square
MAX_DEPTH = 64
# The library's JSON reader gives up at 128 levels of JSON. A schema of 64 levels may have more, because a property takes two.
_MOST_JSON_LEVELS, _LEVELS_TOGETHER = 100, 24
_OWN_REFERENCE = re.compile(r"#(?:/(?:\$defs|definitions)/[^/]+)?")
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_ONE = (
    "additionalProperties",
    "items",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "additionalItems",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DIALECTS = re.compile(r"https?://json-schema\.org/(?:(draft-0[4-7])|(draft/20(?:19-09|20-12)))/schema#?")
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


def rewrite(schema: Any, path: str = "$") -> Any:
    """An equivalent or narrower schema without some forms that the library refuses.

    - A `format` that it does not know is dropped, since formats are annotations. `uniqueItems: false` says nothing.
    - A `$schema` that it does not know is dropped or spelled as it knows it.
    - A `oneOf` whose alternatives exclude each other is an `anyOf`. One of `required` lists of one name each says which of these
      properties are absent.
    - `not` is the schema that `negated` makes of it.
    - `if`: the condition and `then`, or the negated condition and `else`.
    - Deep parts become definitions, to which the parts above refer.

    Raises `GrammarError`.
    """
    if isinstance(schema, dict) and isinstance(schema.get("$schema"), str):
        dialect = schema["$schema"]
        schema = {name: value for name, value in schema.items() if name != "$schema"}
        if found := _DIALECTS.fullmatch(dialect):
            schema["$schema"] = f"http://json-schema.org/{found[1]}/schema#" if found[1] else f"https://json-schema.org/{found[2]}/schema"
    return _without_deep_parts(_Rewriter(schema).rewrite(schema, path, 0))


def _without_deep_parts(schema: Any) -> Any:
    if not isinstance(schema, dict) or _num_levels(schema) <= _MOST_JSON_LEVELS or not _refers_to_definitions_only(schema):
        return schema
    moved: dict[str, Any] = {}
    result = _move_deep_parts(schema, 0, moved)
    definitions = result.get("$defs", {})
    return {**result, "$defs": {**definitions, **moved}} if isinstance(definitions, dict) else schema


def _num_levels(value: Any) -> int:
    """Of JSON."""
    most, level = 0, [value]
    while level:
        most += 1
        nested = [one for one in level if isinstance(one, (dict, list))]
        level = [child for one in nested for child in (one.values() if isinstance(one, dict) else one)]
    return most


def _refers_to_definitions_only(schema: dict[str, Any]) -> bool:
    """Whether parts can be moved without any reference missing them."""
    for _, part in _parts(schema):
        reference = part.get("$ref", "#")
        names = part.keys() & {"$id", "$anchor", "$dynamicRef", "$dynamicAnchor"}
        if names or not isinstance(reference, str) or not _OWN_REFERENCE.fullmatch(reference):
            return False
    return True


def _move_deep_parts(schema: Any, level: int, moved: dict[str, Any]) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = _with_copied_children(schema)
    for key, _, child in list(_children(schema, "$")):
        _put_child(result, key, _move_deep_parts(child, level + 1, moved))
    if level == 0 or level % _LEVELS_TOGETHER:
        return result
    name = f"_deep_part_{len(moved)}_"
    moved[name] = result
    return {"$ref": f"#/$defs/{name}"}


def _with_copied_children(schema: dict[str, Any]) -> dict[str, Any]:
    result = dict(schema)
    for name in {*_LISTS, *_MAPS} & result.keys():
        if isinstance(result[name], (list, dict)):
            result[name] = result[name].copy()
    return result


def _put_child(schema: dict[str, Any], key: str | tuple[str, Any], child: Any) -> None:
    if isinstance(key, str):
        schema[key] = child
    else:
        name, index = key
        schema[name][index] = child


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._disjointness: Disjointness | None = None

    def rewrite(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"A schema must be an object or a boolean, got {schema!r:.50}", path)
        if depth > MAX_DEPTH:
            raise GrammarError(f"The schema is nested more than {MAX_DEPTH} levels deep", path[:200])
        if isinstance(schema.get("properties"), dict) and len(schema["properties"]) > MAX_PROPERTIES:
            count = len(schema["properties"])
            raise GrammarError(f"An object may have at most {MAX_PROPERTIES} properties, this one has {count}", f"{path}.properties")
        result = _with_copied_children(schema)
        for key, child_path, child in list(_children(schema, path)):
            _put_child(result, key, self.rewrite(child, child_path, depth + 1))
        if isinstance(result.get("format"), str) and result["format"] not in FORMATS:
            del result["format"]
        if result.get("uniqueItems") is False:
            del result["uniqueItems"]
        added: list[Any] = []
        self._rewrite_one_of(schema, result)
        self._rewrite_not(schema, result, added, path, depth)
        self._rewrite_if(schema, result, added, path, depth)
        if added and isinstance(result.get("allOf", []), list):
            result["allOf"] = [*result.get("allOf", []), *added]
        return result

    def _rewrite_not(self, schema: dict[str, Any], result: dict[str, Any], added: list[Any], path: str, depth: int) -> None:
        if "not" in schema and (found := negated(schema["not"])) is not None:
            del result["not"]
            added.append(self.rewrite(found, f"{path}.not", depth + 1))

    def _rewrite_if(self, schema: dict[str, Any], result: dict[str, Any], added: list[Any], path: str, depth: int) -> None:
        given = {name: result.get(name, True) for name in ("if", "then", "else")}
        if "if" not in schema or not all(isinstance(part, dict | bool) for part in given.values()):
            return
        otherwise = negated(schema["if"])
        if otherwise is None:
            return
        otherwise = self.rewrite(otherwise, f"{path}.if", depth + 1)
        for name in given:
            result.pop(name, None)
        if given["else"] is True:  # what satisfies `then` need not satisfy the condition
            branches = [given["then"], otherwise]
        elif given["then"] is True:
            branches = [given["if"], given["else"]]
        else:
            branches = [{"allOf": [given["if"], given["then"]]}, {"allOf": [otherwise, given["else"]]}]
        if True not in [branch for branch in branches if isinstance(branch, bool)]:
            added.append({"anyOf": [branch for branch in branches if branch is not False] or [False]})

    def _rewrite_one_of(self, schema: dict[str, Any], result: dict[str, Any]) -> None:
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in schema:
            return
        names = [_only_required(branch) for branch in branches]
        if len(names) > 1 and all(name is not None for name in names) and len(set(names)) == len(names):
            result["anyOf"] = [
                {"type": "object", "required": [name], "properties": {other: False for other in names if other != name}} for name in names
            ]
        elif self._all_disjoint(branches):
            result["anyOf"] = result["oneOf"]
        else:
            return
        del result["oneOf"]

    def _all_disjoint(self, branches: list[Any]) -> bool:
        self._disjointness = self._disjointness or Disjointness(self._root)
        return self._disjointness.all_disjoint(branches)


def _only_required(schema: Any) -> str | None:
    """The property if a schema only says that one property is required."""
    if not isinstance(schema, dict) or schema.keys() - {"required", *ANNOTATIONS}:
        return None
    names = schema.get("required")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None


def original_path(schema: Any, path: str) -> str:
    """The path in the schema that was rewritten: as far as it exists, with `oneOf` for the `anyOf` that it became."""
    result, value = "$", schema
    for step in re.findall(r'\.[\w$-]+|\["(?:[^"\\]|\\.)*"\]|\[\d+\]', path):
        key = step[1:] if step[0] == "." else json.loads(step)[0]
        if key == "anyOf" and isinstance(value, dict) and key not in value and "oneOf" in value:
            key, step = "oneOf", ".oneOf"
        try:
            value = value[key]
        except (LookupError, TypeError):
            break
        result += step
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
