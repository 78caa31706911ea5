"""`uniqueItems` for arrays of strings: which arrays of an output must have distinct items. `DistinctItems` enforces it.

A grammar cannot say that items differ. The masks can: they exclude the tokens that would close a string which the array already
has. This must never leave a sequence without a token, so it is limited to strings that can go on instead, and to enumerations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from compile_and_serve.runtime.structured.json_schema import FORMATS

ROOT, ITEM, ANY_PROPERTY = "$", "[]", "*"  # where an array stands; "." and a name: in that property

Rules = dict[str, list[str] | None]  # place of arrays → the values of their items; None: other strings

# Strings that JSON writes as they are, so that equal ones are written equally.
_PLAIN = {"type": "string", "pattern": r'^[^"\\\x00-\x1f\x7f]*$'}
_SAME_PLACE = ("not", "if", "then", "else")
_SAME_PLACE_LISTS = ("anyOf", "oneOf", "allOf")
_ITEMS = ("items", "additionalItems", "contains", "unevaluatedItems", "prefixItems")
_MAX_DEPTH = 8
_MAX_PLACES = 20_000

# The strings that a schema accepts: all, or enough that each can go on (free); those of `_Values`; none; or something else.
_FREE, _NONE, _OTHER = "free", "none", "other"
_Values = tuple[str, ...]


def distinct_strings(root: Any) -> tuple[Any, Rules]:
    """The schema without each `uniqueItems: true` that the rules enforce, and the rules.

    The items become strings without quotes, backslashes and control characters, which is narrower. Other arrays at the same place
    are held to the rule, too. A `uniqueItems` that cannot be enforced is left.
    """
    if not isinstance(root, dict) or '"uniqueItems": true' not in json.dumps(root):
        return root, {}
    return _Finder(root).find()


class _Finder:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts: dict[int, dict[str, Any]] = {}
        self._places: dict[int, set[str]] = {}

    def find(self) -> tuple[Any, Rules]:
        if not self._walk():
            return self._root, {}
        rules: Rules = {}
        changes: dict[int, dict[str, Any]] = {}
        found: dict[int, list[str] | None] = {}
        for number, part in self._parts.items():
            if part.get("uniqueItems") is not True:
                continue
            narrowed = self._narrowed(part)
            if narrowed is not None:
                changes[number], found[number] = narrowed
        for number, values in found.items():
            if not all(self._may_rule(place, values, found) for place in self._places[number]):
                del changes[number]
                continue
            rules.update(dict.fromkeys(self._places[number], values))
        return _replaced(self._root, changes), rules

    def _walk(self) -> bool:
        """Find every schema that values may have to satisfy, and the places of these values. False if there are too many."""
        stack: list[tuple[Any, str]] = [(self._root, ROOT)]
        count = 0
        while stack:
            part, place = stack.pop()
            if not isinstance(part, dict) or place in self._places.get(id(part), ()):
                continue
            count += 1
            if count > _MAX_PLACES:
                return False
            self._parts[id(part)] = part
            self._places.setdefault(id(part), set()).add(place)
            stack += self._children(part, place)
        return True

    def _children(self, part: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
        if "$ref" in part:
            yield self._resolve(part["$ref"]), place
        for name in _SAME_PLACE:
            yield part.get(name), place
        for name in _SAME_PLACE_LISTS:
            for child in part[name] if isinstance(part.get(name), list) else ():
                yield child, place
        for name in ("dependencies", "dependentSchemas"):
            for child in part[name].values() if isinstance(part.get(name), dict) else ():
                yield child, place
        for name, child in part["properties"].items() if isinstance(part.get("properties"), dict) else ():
            yield child, "." + name
        for child in part["patternProperties"].values() if isinstance(part.get("patternProperties"), dict) else ():
            yield child, ANY_PROPERTY
        for name in ("additionalProperties", "unevaluatedProperties"):
            yield part.get(name), ANY_PROPERTY
        for child in _item_schemas(part):
            yield child, ITEM

    def _narrowed(self, part: dict[str, Any]) -> tuple[dict[str, Any], list[str] | None] | None:
        """The schema of an array without `uniqueItems`, and its rule; None if there is none."""
        if any(name in part for name in ("enum", "const", "prefixItems", "contains", "additionalItems")):
            return None
        items = part.get("items", True)
        kind = self._strings(items)
        result = {name: value for name, value in part.items() if name != "uniqueItems"}
        if kind == _FREE:
            plain = items is True or items == {}
            return {**result, "items": dict(_PLAIN) if plain else {"allOf": [items, dict(_PLAIN)]}}, None
        if isinstance(kind, str):
            return None
        values = [value for value in dict.fromkeys(kind) if json.dumps(value, ensure_ascii=False) == f'"{value}"']
        most, least = part.get("maxItems"), part.get("minItems", 0)
        if not isinstance(least, int) or least > len(values) or not isinstance(most, int | None):
            return None
        return {**result, "items": {"enum": values}, "maxItems": len(values) if most is None else min(most, len(values))}, values

    def _may_rule(self, place: str, values: list[str] | None, found: dict[int, list[str] | None]) -> bool:
        """Whether all arrays that may stand at a place can follow the rule."""
        for number, part in self._parts.items():
            if not any(_overlap(place, other) for other in self._places[number]):
                continue
            if number in found:
                if found[number] != values:
                    return False
            elif not self._can_follow(part, values):
                return False
        return True

    def _can_follow(self, part: dict[str, Any], values: list[str] | None) -> bool:
        listed = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
        if any(isinstance(value, list) for value in listed):
            return False
        kinds = [self._strings(child) for child in _item_schemas(part)]
        if values is None:
            return all(kind in (_FREE, _NONE) for kind in kinds)
        says_nothing = not _may_be(part, "array") or any(name in part for name in ("$ref", *_SAME_PLACE_LISTS))
        return all(kind == _NONE for kind in kinds) and (bool(kinds) or says_nothing)

    def _strings(self, schema: Any, depth: int = 0) -> str | _Values:
        """The strings that satisfy a schema."""
        if schema is True or schema == {}:
            return _FREE
        if schema is False:
            return _NONE
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return _OTHER
        if not _may_be(schema, "string"):
            return _NONE
        if "enum" in schema or "const" in schema:
            listed = schema.get("enum", [schema.get("const")])
            texts = tuple(v for v in listed if isinstance(v, str)) if isinstance(listed, list) else ()
            return (texts if not self._restricted(schema) else _OTHER) if texts else _NONE
        kinds = [self._strings(part, depth + 1) for part in self._all_of(schema)]
        if _NONE in kinds:
            return _NONE
        if self._bounded(schema):
            return _OTHER
        if len(kinds) == 1:
            return kinds[0]
        # Together with another restriction, strings that can go on are not always both.
        return _FREE if not kinds else _OTHER

    def _all_of(self, schema: dict[str, Any]) -> list[Any]:
        parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
        return [*parts, self._resolve(schema["$ref"])] if "$ref" in schema else parts

    @staticmethod
    def _restricted(schema: dict[str, Any]) -> bool:
        names = ("anyOf", "oneOf", "allOf", "$ref", "not", "if", "pattern", "format", "minLength", "maxLength")
        return any(name in schema for name in names)

    @staticmethod
    def _bounded(schema: dict[str, Any]) -> bool:
        """Whether some string that satisfies the schema's own keywords may be one that cannot go on."""
        return any(name in schema for name in ("anyOf", "oneOf", "pattern", "maxLength", "not", "if")) or schema.get("format") in FORMATS

    def _resolve(self, ref: Any) -> Any:
        """The schema of a reference within the root; None if it is none."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")) or "%" in ref:
            return None
        value: Any = self._root
        for name in ref[1:].split("/")[1:]:
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
        return value


def _item_schemas(part: dict[str, Any]) -> Iterator[Any]:
    for name in _ITEMS:
        if name in part:
            yield from part[name] if isinstance(part[name], list) else [part[name]]


def _may_be(part: dict[str, Any], kind: str) -> bool:
    given = part.get("type")
    return given is None or kind in (given if isinstance(given, list) else [given])


def _overlap(place: str, other: str) -> bool:
    return place == other or (ANY_PROPERTY in (place, other) and {place[0], other[0]} <= {".", "*"})


def _replaced(value: Any, changes: dict[int, dict[str, Any]]) -> Any:
    """A copy of a JSON value in which some objects are others."""
    if isinstance(value, dict):
        return {name: _replaced(child, changes) for name, child in changes.get(id(value), value).items()}
    return [_replaced(child, changes) for child in value] if isinstance(value, list) else value
