"""Structural tags (xgrammar's two forms) as a grammar in the library's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from compile_and_serve.runtime.structured.grammar_error import GrammarError

_MAX_RULES = 4096
_MAX_DEPTH = 32
Convert = Callable[[str, Any, str], dict[str, Any]]
_TEXT = "/(.|\\n)*/"


class StructuralTag:
    """Call `build` once.

    special: text of special tokens → id. Such a text within a literal stands for its token. convert: turns (kind, value, path)
    into one of the library's grammars, for the kinds "json", "regex" and "grammar".
    """

    def __init__(self, special: Mapping[str, int], convert: Convert) -> None:
        self._special = {text: token for text, token in special.items() if text}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or "(?!)")
        self._convert = convert
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []

    def build(self, tag: Any) -> list[dict[str, Any]]:
        """The grammars, the main one first. Raises `GrammarError`."""
        if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
            raise GrammarError("A structural tag must be an object of type structural_tag")
        if "format" in tag:
            body = self._format(tag["format"], "$.format", "", 0)
        elif "structures" in tag:
            body = self._format(_from_structures(tag), "$", "", 0)
        else:
            raise GrammarError("A structural tag needs format, or structures and triggers")
        lines = ["%llguidance {}", f"start: {body or _quote('')}", *self._rules]
        return [{"name": "structural_tag", "lark_grammar": "\n".join(lines) + "\n"}, *self._grammars]

    def _format(self, value: Any, path: str, end: str, depth: int) -> str:
        """A Lark expression for a format and the literal `end` behind it."""
        if not isinstance(value, dict):
            raise GrammarError("A format must be an object", path)
        if depth > _MAX_DEPTH:
            raise GrammarError("The structural tag is nested too deeply", path)
        kind = value.get("type")
        if kind == "any_text":
            return self._any_text(value, path, end)
        if kind == "sequence":
            return self._sequence(_list(value, "elements", path), f"{path}.elements", end, depth)
        if kind == "tag":
            return self._join(self._tag(value, path, depth, ""), self._literal(end, path))
        if kind == "or":
            elements = _list(value, "elements", path)
            options = [self._format(one, f"{path}.elements[{i}]", end, depth + 1) for i, one in enumerate(elements)]
            return "(" + " | ".join(option or _quote("") for option in options) + ")"
        if kind == "triggered_tags":
            return self._triggered(value, path, end, depth)
        if kind == "tags_with_separator":
            return self._join(self._separated(value, path, depth), self._literal(end, path))
        if kind == "const_string":
            return self._literal(_text(value, "value", path) + end, path)
        if kind == "json_schema":
            if value.get("style", "json") != "json":
                raise GrammarError("Only the style json is supported", f"{path}.style")
            grammar = self._convert("json", value.get("json_schema"), f"{path}.json_schema")
        elif kind == "regex":
            grammar = self._convert("regex", _text(value, "pattern", path), f"{path}.pattern")
        elif kind == "grammar":
            grammar = self._convert("grammar", _text(value, "grammar", path), f"{path}.grammar")
        else:
            raise GrammarError(f"The format type {kind!r:.50} is not supported", f"{path}.type")
        name = f"part_{len(self._grammars)}"
        self._grammars.append({**grammar, "name": name})
        return self._join(f"@{name}", self._literal(end, path))

    def _any_text(self, value: dict[str, Any], path: str, end: str) -> str:
        if value.get("excludes"):
            raise GrammarError("excludes is not supported", f"{path}.excludes")
        if not end:
            return self._rule("TEXT", _TEXT)
        first = self._pattern.search(end)
        if first is not None and first.start() == 0:  # text never contains a special token
            return self._join(self._rule("TEXT", _TEXT), self._literal(end, path))
        plain = end if first is None else end[: first.start()]
        return self._join(self._rule("until[lazy]", f"{_TEXT} {_quote(plain)}"), self._literal(end[len(plain) :], path))

    def _sequence(self, elements: list[Any], path: str, end: str, depth: int) -> str:
        parts, index = [], 0
        while index < len(elements):
            element, here = elements[index], f"{path}[{index}]"
            index += 1
            behind = end if index == len(elements) else ""
            if isinstance(element, dict) and element.get("type") in ("any_text", "triggered_tags") and index < len(elements):
                following = elements[index]
                if not isinstance(following, dict) or following.get("type") != "const_string" or not following.get("value"):
                    raise GrammarError(f"{element['type']} must be the last element or be followed by a const_string that ends it", here)
                index += 1
                behind = _text(following, "value", f"{path}[{index - 1}]") + (end if index == len(elements) else "")
            parts.append(self._format(element, here, behind, depth + 1))
        if not elements:
            parts.append(self._literal(end, path))
        return self._join(*parts)

    def _tag(self, tag: Any, path: str, depth: int, skip: str) -> str:
        """skip: what of `begin` is written already."""
        if not isinstance(tag, dict):
            raise GrammarError("A tag must be an object", path)
        begin, end = _text(tag, "begin", path), tag.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(one, str) for one in ends):
            raise GrammarError("end must be a string or a list of strings", f"{path}.end")
        bodies = [self._format(tag.get("content"), f"{path}.content", one, depth + 1) for one in ends]
        body = bodies[0] if len(bodies) == 1 else "(" + " | ".join(bodies) + ")"
        return self._join(self._literal(begin[len(skip) :], path), body)

    def _triggered(self, value: dict[str, Any], path: str, end: str, depth: int) -> str:
        tags, triggers = _list(value, "tags", path), _list(value, "triggers", path)
        if value.get("excludes"):
            raise GrammarError("excludes is not supported", f"{path}.excludes")
        by_trigger: dict[str, list[int]] = {}
        for index, tag in enumerate(tags):
            begin = _text(tag, "begin", f"{path}.tags[{index}]") if isinstance(tag, dict) else ""
            found = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
            if not found:
                raise GrammarError("begin must start with one of the triggers", f"{path}.tags[{index}].begin")
            by_trigger.setdefault(max(found, key=len), []).append(index)
        if not tags:
            raise GrammarError("tags must not be empty", f"{path}.tags")
        first = " | ".join(self._tag(tag, f"{path}.tags[{i}]", depth + 1, "") for i, tag in enumerate(tags))
        exactly_one = value.get("at_least_one") and value.get("stop_after_first")
        if exactly_one:
            return self._join(self._rule("tag", first), self._literal(end, path))
        segments = []
        for trigger, indices in by_trigger.items():
            rests = [self._tag(tags[i], f"{path}.tags[{i}]", depth + 1, trigger) or _quote("") for i in indices]
            segments.append(self._join(self._text_until(trigger, path), "(" + " | ".join(rests) + ")"))
        segment = self._rule("segment", " | ".join(segments))
        text = self._any_text({}, path, end)
        if value.get("at_least_one"):
            return self._join(self._rule("tag", first), f"{segment}*", text)
        if value.get("stop_after_first"):
            return f"({self._join(segment, self._literal(end, path))} | {text})"
        return self._join(f"{segment}*", text)

    def _text_until(self, trigger: str, path: str) -> str:
        found = self._pattern.search(trigger)
        if found is None:
            return self._rule("trigger[lazy]", f"{_TEXT} {_quote(trigger)}")
        if found.start() > 0:
            raise GrammarError(f"The trigger {trigger!r:.50} has text before a special token", f"{path}.triggers")
        return self._join(self._rule("TEXT", _TEXT), self._literal(trigger, path))

    def _separated(self, value: dict[str, Any], path: str, depth: int) -> str:
        tags = _list(value, "tags", path)
        if not tags:
            raise GrammarError("tags must not be empty", f"{path}.tags")
        tag = self._rule("tag", " | ".join(self._tag(one, f"{path}.tags[{i}]", depth + 1, "") for i, one in enumerate(tags)))
        many = tag
        if not value.get("stop_after_first"):
            many = f"{tag} ({self._join(self._literal(_text(value, 'separator', path), path), tag)})*"
        return f"({many})" if value.get("at_least_one") else f"({many})?"

    def _literal(self, text: str, path: str) -> str:
        pieces, begin = [], 0
        for found in self._pattern.finditer(text):
            if found.start() > begin:
                pieces.append(_quote(text[begin : found.start()]))
            pieces.append(f"<[{self._special[found[0]]}]>")
            begin = found.end()
        if begin < len(text):
            pieces.append(_quote(text[begin:]))
        return " ".join(pieces)

    def _join(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)

    def _rule(self, name: str, body: str) -> str:
        """A rule of its own. name: with attributes in brackets; upper case is a terminal."""
        base, bracket, attributes = name.partition("[")
        if len(self._rules) >= _MAX_RULES:
            raise GrammarError("The structural tag has too many parts")
        full = f"{base}_{len(self._rules)}"
        self._rules.append(f"{full}{bracket}{attributes}: {body}")
        return full


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    """The older form as a format."""
    tags = []
    for index, one in enumerate(_list(tag, "structures", "$")):
        if not isinstance(one, dict):
            raise GrammarError("A structure must be an object", f"$.structures[{index}]")
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end", "")})
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers", "$"), "tags": tags}


def _list(value: dict[str, Any], name: str, path: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list):
        raise GrammarError(f"{name} must be a list", f"{path}.{name}")
    return found


def _text(value: dict[str, Any], name: str, path: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise GrammarError(f"{name} must be a string", f"{path}.{name}")
    return found


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
