"""Closes objects of JSON schemas: properties that a schema does not declare are forbidden unless it says otherwise.

Small models do not stop inventing keys where they may. What satisfies the closed schema satisfies the given one: only objects are closed
that stand for a value alone. An object that others add to, or that a negation or a condition refers to, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compile_and_serve.runtime.structured.negation import ANNOTATIONS

_COMBINING = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "$ref", "$dynamicRef")
_SAYS_OTHERWISE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_DEFINITIONS = ("$defs", "definitions")
_SILENT = frozenset({*ANNOTATIONS, *_DEFINITIONS, "$schema", "$id", "discriminator", "type"})  # beside anyOf they add nothing to an object
_VALUES = ("items", "prefixItems", "additionalItems", "additionalProperties")  # schemas of other values than the object itself


def close_objects(schema: Any) -> Any:
    """The schema with closed objects. It must not be nested too deeply to be walked; `rewrite` has checked that."""
    walk = _Walk(schema)
    walk.visit(schema, is_free=True)
    return schema if walk.is_unclear else walk.closed(schema)


class _Walk:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._free, self._frozen = set[int](), set[int]()  # ids of objects in the schema
        self.is_unclear = False  # whether something refers to a place that is not a definition, where nothing must change

    def visit(self, schema: Any, *, is_free: bool) -> None:
        """Note which objects stand alone. is_free: whether this one does."""
        seen = self._free if is_free else self._frozen
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        seen.add(id(schema))
        self._visit_reference(schema, is_free)
        mentioned = _mentioned(schema)
        for name, child in _named(schema, "properties", "patternProperties"):
            self.visit(child, is_free=is_free and mentioned is not None and name not in mentioned)
        for child in _listed(schema, _VALUES):
            self.visit(child, is_free=is_free and mentioned == set())
        only_unions = not schema.keys() - _SILENT - {"anyOf"}
        for child in _listed(schema, ("anyOf",)):
            self.visit(child, is_free=is_free and only_unions)
        only_one = not schema.keys() - _SILENT - {"allOf"} and isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1
        for child in _listed(schema, ("allOf",)):
            self.visit(child, is_free=is_free and only_one)
        others = ("oneOf", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
        for child in _listed(schema, others):
            self.visit(child, is_free=False)
        for _, child in _named(schema, "dependentSchemas", "dependencies"):
            self.visit(child, is_free=False)

    def closed(self, schema: Any) -> Any:
        """A copy with the objects closed that stand alone."""
        if isinstance(schema, list):
            return [self.closed(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        result = {name: value if name in ("const", "enum", "default", "examples") else self.closed(value) for name, value in schema.items()}
        if id(schema) in self._free and id(schema) not in self._frozen and _can_be_closed(schema):
            result["additionalProperties"] = False
        return result

    def _visit_reference(self, schema: dict[str, Any], is_free: bool) -> None:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return
        alone = is_free and not schema.keys() - ANNOTATIONS - {"$ref", *_DEFINITIONS, "$schema", "$id"}
        parts = reference.split("/")
        if len(parts) == 3 and parts[0] == "#" and parts[1] in _DEFINITIONS and isinstance(self._root.get(parts[1]), dict):
            self.visit(self._root[parts[1]].get(parts[2].replace("~1", "/").replace("~0", "~")), is_free=alone)
        elif reference == "#":
            self.visit(self._root, is_free=alone)
        elif not alone:
            self.is_unclear = True


def _can_be_closed(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(name in schema for name in _SAYS_OTHERWISE):
        return False
    mentioned = _mentioned(schema)
    required = schema.get("required", [])
    fewest = schema.get("minProperties", 0)
    return (
        mentioned is not None
        and mentioned <= properties.keys()
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(fewest, int | float)
        and fewest <= len(properties)
    )


def _mentioned(schema: dict[str, Any]) -> set[str] | None:
    """The properties that other parts of a schema name for the same object; None if they may be any."""
    names, stack = set[str](), [schema[name] for name in _COMBINING if name in schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, str):  # a reference
            return None
        elif isinstance(part, dict):
            if "$ref" in part or "$dynamicRef" in part or "patternProperties" in part:
                return None
            for name, value in part.items():
                if name == "properties" and isinstance(value, dict):
                    names |= value.keys()
                elif name == "required" and isinstance(value, list):
                    names |= {one for one in value if isinstance(one, str)}
                elif isinstance(value, dict | list) and name not in ("const", "enum", "default", "examples", "required"):
                    stack.append(value)
    return names


def _named(schema: dict[str, Any], *keywords: str) -> Iterator[tuple[str, Any]]:
    for keyword in keywords:
        if isinstance(schema.get(keyword), dict):
            yield from schema[keyword].items()


def _listed(schema: dict[str, Any], keywords: tuple[str, ...]) -> Iterator[Any]:
    for keyword in keywords:
        found = schema.get(keyword)
        yield from found if isinstance(found, list) else [found]
