"""`Disjointness`: turns the alternatives of a `oneOf` into those of an `anyOf`, where it can prove that they exclude each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})  # an integer is a number
_MAX_DEPTH = 8  # of references, combinators and discriminators
_MAX_STEPS = 20_000  # for one root: a proof that takes longer is given up


class Disjointness:
    """Disjointness of schemas within one root schema. Everything that it cannot prove counts as overlapping."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._one_base = _has_one_base(root)
        self._temporary: list[Any] = []
        self._known: dict[tuple[int, str], set[str] | None] = {}

    def exclusive(self, schemas: Sequence[Any]) -> list[dict[str, Any]] | None:
        """What to add to each schema (in an `allOf`) so that none accepts what another one does; None if that fails.

        - Arrays of which only `[]` satisfies two schemas must not be empty.
        - Of objects that have one optional property only, `{}` satisfies two schemas: the property is required.
        - Of objects with a required property each, those with both properties are excluded. Some of them satisfy only one
          of the schemas, so this is narrower than `oneOf`.
        """
        added: list[dict[str, Any]] = [{} for _ in schemas]
        for i, j in combinations(range(len(schemas)), 2):
            if self.disjoint(schemas[i], schemas[j]):
                continue
            if self._steps > _MAX_STEPS:
                return None
            common = self._types(schemas[i]) & self._types(schemas[j])
            for k, other in ((i, j), (j, i)):
                if "array" in common:
                    added[k]["minItems"] = 1
                if "object" in common and (name := self._only_property(schemas[k])) is not None:
                    added[k]["required"] = [name]
                elif "object" in common:
                    names = self._required(schemas[other]) - self._required(schemas[k])
                    if names:
                        added[k].setdefault("properties", {})[min(names)] = False
        narrow = [{"allOf": [schema, more]} if more else schema for schema, more in zip(schemas, added, strict=True)]
        self._temporary.append(narrow)
        proven = all(
            self.disjoint(narrow[k], schemas[other]) for i, j in combinations(range(len(schemas)), 2) for k, other in ((i, j), (j, i))
        )
        return added if proven else None

    def _only_property(self, schema: Any) -> str | None:
        """The property if an object may have only one."""
        for part in self._conjuncts(schema):
            properties = part.get("properties")
            if part.get("additionalProperties") is False and not part.get("patternProperties"):
                return next(iter(properties)) if isinstance(properties, dict) and len(properties) == 1 else None
        return None

    def disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Whether no value satisfies both schemas."""
        self._steps += 1
        if depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return False
        for union, against in ((one, other), (other, one)):
            for part in self._conjuncts(union):
                for name in ("anyOf", "oneOf"):
                    branches = part.get(name)
                    if isinstance(branches, list) and all(self.disjoint(b, against, depth + 1) for b in branches):
                        return True
        common = self._types(one) & self._types(other)
        return all(self._disjoint_in(kind, one, other, depth) for kind in common)

    def _disjoint_in(self, kind: str, one: Any, other: Any, depth: int) -> bool:
        values, other_values = self._cached_values(one, kind), self._cached_values(other, kind)
        if values is not None and other_values is not None:
            return not values & other_values
        if kind == "array":
            return self._have_other_items(one, other, depth)
        return kind == "object" and self._has_discriminator(one, other, depth)

    def _have_other_items(self, one: Any, other: Any, depth: int) -> bool:
        """Whether an array must have items, which cannot satisfy both schemas."""
        parts, other_parts = list(self._conjuncts(one)), list(self._conjuncts(other))
        minimums = [part.get("minItems") for part in parts + other_parts]
        if not any(isinstance(minimum, (int, float)) and minimum >= 1 for minimum in minimums):
            return False
        # `items` says nothing about the first item beside `prefixItems`.
        items = [part["items"] for part in parts if "prefixItems" not in part and isinstance(part.get("items"), dict)]
        others = [part["items"] for part in other_parts if "prefixItems" not in part and isinstance(part.get("items"), dict)]
        return any(self.disjoint(item, against, depth + 1) for item in items for against in others)

    def _has_discriminator(self, one: Any, other: Any, depth: int) -> bool:
        """Whether a property that one of the schemas requires cannot satisfy both."""
        properties, other_properties = self._properties(one), self._properties(other)
        for name in self._required(one) | self._required(other):
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
                found &= {_type_of(value) for value in values}
            for name in ("anyOf", "oneOf"):
                if isinstance(part.get(name), list):
                    found &= frozenset().union(*(self._types(branch, depth + 1) for branch in part[name]))
            if isinstance(part.get("allOf"), list) and any(child is False for child in part["allOf"]):
                return frozenset()
        return found

    def _cached_values(self, schema: Any, kind: str) -> set[str] | None:
        key = (id(schema), kind)  # the root and `_temporary` keep all schemas alive
        if key not in self._known:
            self._known[key] = self._values(schema, kind)
        return self._known[key]

    def _values(self, schema: Any, kind: str) -> set[str] | None:
        """The canonical JSON of the values of a type that may satisfy a schema; None if they are not listed."""
        found: set[str] | None = None
        for part in self._conjuncts(schema):
            if (values := _listed(part)) is not None:
                names = {_canonical(value) for value in values if _type_of(value) == kind}
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


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


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
