"""`Disjointness`: proves that the alternatives of a `oneOf` exclude each other, so that it is an `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from compile_and_serve.runtime.structured.negation import TYPES, type_of

_TYPES = frozenset(TYPES)
_MAX_DEPTH = 8  # of references, combinators and discriminators
_MAX_STEPS = 20_000  # for one root: a proof that takes longer is given up


class Disjointness:
    """Disjointness of schemas within one root schema. Everything that it cannot prove counts as overlapping."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._one_base = _has_one_base(root)
        self._known: dict[tuple[int, str], set[str] | None] = {}

    def all_disjoint(self, schemas: Sequence[Any]) -> bool:
        """Whether no value satisfies two of the schemas."""
        return all(self.disjoint(one, other) for one, other in combinations(schemas, 2))

    def disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether no value satisfies both schemas."""
        self._steps += 1
        if depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return False
        common = self._types(one) & self._types(other)
        return all(self._disjoint_in(kind, one, other, depth) for kind in common)

    def _disjoint_in(self, kind: str, one: Any, other: Any, depth: int) -> bool:
        values, other_values = self._cached_values(one, kind), self._cached_values(other, kind)
        if values is not None and other_values is not None:
            return not values & other_values
        return kind == "object" and self._has_discriminator(one, other, depth)

    def _has_discriminator(self, one: Any, other: Any, depth: int) -> bool:
        """Whether a property that one of the schemas requires cannot satisfy both."""
        properties, other_properties = self._properties(one), self._properties(other)
        for name in sorted(self._required(one) | self._required(other)):  # in one order, as the number of steps decides
            for schema in properties.get(name, ()):
                if schema is False or any(self.disjoint(schema, b, depth + 1) for b in other_properties.get(name, ())):
                    return True
            if any(schema is False for schema in other_properties.get(name, ())):
                return True
            if self._forbids(one, name) or self._forbids(other, name):
                return True
        return False

    def _forbids(self, schema: Any, name: str) -> bool:
        for part in self._conjuncts(schema):
            if part.get("additionalProperties") is False and not part.get("patternProperties"):
                properties = part.get("properties", {})
                if isinstance(properties, dict) and name not in properties:
                    return True
        return False

    def _required(self, schema: Any) -> set[str]:
        found = set[str]()
        for part in self._conjuncts(schema):
            names = part.get("required")
            if isinstance(names, list):
                found |= {name for name in names if isinstance(name, str)}
        return found

    def _properties(self, schema: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for part in self._conjuncts(schema):
            properties = part.get("properties")
            for name, child in properties.items() if isinstance(properties, dict) else ():
                found.setdefault(name, []).append(child)
        return found

    def _types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types of values that may satisfy a schema, and perhaps more."""
        if schema is False:
            return frozenset()
        if depth > _MAX_DEPTH:
            return _TYPES
        found = _TYPES
        for part in self._conjuncts(schema):
            self._steps += 1
            if self._steps > _MAX_STEPS:
                return _TYPES
            given = part.get("type")
            names = ["number" if name == "integer" else name for name in (given if isinstance(given, list) else [given])]
            if all(isinstance(name, str) and name in _TYPES for name in names):
                found &= set(names)
            if (values := _listed(part)) is not None:
                found &= {type_of(value) for value in values}
            for name in ("anyOf", "oneOf"):
                if isinstance(part.get(name), list):
                    found &= frozenset().union(*(self._types(branch, depth + 1) for branch in part[name]))
        return found

    def _cached_values(self, schema: Any, kind: str) -> set[str] | None:
        key = (id(schema), kind)  # the root keeps all schemas alive
        if key not in self._known:
            self._known[key] = self._values(schema, kind)
        return self._known[key]

    def _values(self, schema: Any, kind: str) -> set[str] | None:
        """The canonical JSON of the values of a type that may satisfy a schema; None if they are not listed."""
        found: set[str] | None = None
        for part in self._conjuncts(schema):
            if (values := _listed(part)) is not None:
                names = {_canonical(value) for value in values if type_of(value) == kind}
                found = names if found is None else found & names
        return found

    def _conjuncts(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Schemas that every value of a schema satisfies: itself, what it refers to, and its `allOf`."""
        stack, seen = [schema], set[int]()
        while stack:
            part = stack.pop()
            if not isinstance(part, dict) or id(part) in seen or len(seen) > _MAX_DEPTH:
                continue
            seen.add(id(part))
            if "$ref" in part:  # up to draft 7, the keywords beside it are ignored
                stack.append(self._resolve(part["$ref"]))
                continue
            yield part
            if isinstance(part.get("allOf"), list):
                stack += part["allOf"]

    def _resolve(self, ref: Any) -> Any:
        if not self._one_base or not isinstance(ref, str) or not ref.startswith("#/") or "%" in ref:
            return None
        value = self._root
        for name in ref[2:].split("/"):
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
        return value


def _has_one_base(root: Any) -> bool:
    """Whether all references within a schema are relative to its root: no part has an `$id` of its own."""
    stack = list(root.values()) if isinstance(root, dict) else []
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$id"), str) or isinstance(value.get("id"), str):
                return False
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return True


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values to which `enum` or `const` restricts a schema."""
    if isinstance(schema.get("enum"), list):
        values: list[Any] = schema["enum"]
        return values
    return [schema["const"]] if "const" in schema else None


def _canonical(value: Any) -> str:
    """Equal for values that are equal in JSON Schema. Numbers are rounded, so that different ones may be equal, too."""
    return json.dumps(_rounded(value), sort_keys=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(max(min(value, 2**60), -(2**60)))  # 1 and 1.0 are equal
    if isinstance(value, list):
        return [_rounded(child) for child in value]
    if isinstance(value, dict):
        return {name: _rounded(child) for name, child in value.items()}
    return value
