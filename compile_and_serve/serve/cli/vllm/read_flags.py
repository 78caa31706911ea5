"""Reads vLLM's flags from its source into `flags.json`, without importing vLLM.

    pip download --no-deps --dest /tmp vllm==0.33.0
    python -m compile_and_serve.serve.cli.vllm.read_flags /tmp/vllm-0.33.0-*.whl

vLLM makes its flags from fields of config dataclasses: `get_kwargs` turns a field's annotation into arguments of argparse. This script
reads the calls of `add_argument` and the fields with `ast`.
"""

from __future__ import annotations

import ast
import datetime
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS_FILE = Path(__file__).with_name("flags.json")
_SOURCES = re.compile(r"vllm/(config/\w+|engine/arg_utils|entrypoints/(openai|common)/cli_args|tool_parsers/\w+)\.py")
_PARSER_FUNCTIONS = (("EngineArgs", "add_cli_args"), ("AsyncEngineArgs", "add_cli_args"), (None, "make_arg_parser"))
_FRONTEND = "FrontendArgs"
_INVERSES = {"--enable-": "--disable-", "--disable-": "--enable-"}


@dataclass
class _Class:
    bases: list[str]
    fields: dict[str, tuple[ast.expr, ast.expr | None]] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)


class VllmSource:
    """The classes, functions and names of literal types in vLLM's source files."""

    def __init__(self, wheel: Path) -> None:
        self.classes: dict[str, _Class] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.aliases: dict[str, ast.expr] = {}
        with zipfile.ZipFile(wheel) as archive:
            for name in filter(_SOURCES.fullmatch, archive.namelist()):
                self._read(ast.parse(archive.read(name)))

    def _read(self, module: ast.Module) -> None:
        for node in module.body:
            match node:
                case ast.ClassDef():
                    self.classes[node.name] = _class_of(node)
                case ast.FunctionDef():
                    self.functions[node.name] = node
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.aliases[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    self.aliases[name] = value

    def fields_of(self, name: str) -> dict[str, tuple[ast.expr, ast.expr | None]]:
        """The fields of a dataclass, those of its bases first."""
        found: dict[str, tuple[ast.expr, ast.expr | None]] = {}
        for base in self.classes[name].bases:
            found |= self.fields_of(base) if base in self.classes else {}
        return found | self.classes[name].fields

    def methods_of(self, name: str, method: str) -> Iterator[ast.FunctionDef]:
        """A class's method and those of its bases, the bases' first."""
        for base in self.classes[name].bases:
            if base in self.classes:
                yield from self.methods_of(base, method)
        if method in self.classes[name].methods:
            yield self.classes[name].methods[method]

    def alternatives(self, annotation: ast.expr) -> list[ast.expr]:
        """The types of a union, with the names of other types resolved."""
        match annotation:
            case ast.BinOp(op=ast.BitOr()):
                return [*self.alternatives(annotation.left), *self.alternatives(annotation.right)]
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return [*self.alternatives(inner), ast.Constant(None)]
            case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
                return [kind for part in parts for kind in self.alternatives(part)]
            case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
                return self.alternatives(inner)
            case ast.Name(id=name) if name in self.aliases and name not in self.classes:
                return self.alternatives(self.aliases[name])
            case ast.Constant(value=str() as text):
                return self.alternatives(ast.parse(text, mode="eval").body)
        return [annotation]

    def form_of(self, annotation: ast.expr) -> dict[str, Any]:
        """How a field's value is given: "kind" and, where there are some, "choices"."""
        kinds = self.alternatives(annotation)
        names = {_head(kind) for kind in kinds}
        dataclasses = [name for name in names if name in self.classes and self.classes[name].fields]
        literal = next((kind for kind in kinds if _head(kind) == "Literal"), None)
        form: dict[str, Any] = {"kind": "text"}
        if any(name.endswith(("Config", "Args")) for name in dataclasses):
            form = {"kind": "json"}
        elif names == {"bool", "str", "None"}:
            form = {"kind": "optional"}
        elif "bool" in names:
            form = {"kind": "switch"}
        elif literal is not None:
            form = {"kind": "text", "choices": sorted(str(choice) for choice in self._choices(literal))}
        elif names & {"list", "tuple", "set"}:
            form = {"kind": "values"}
        elif "int" in names:
            form = {"kind": "int"}
        elif "float" in names:
            form = {"kind": "float"}
        elif "dict" in names:
            form = {"kind": "json"}
        if "str" in names:
            form.pop("choices", None)  # other words are allowed, too
        return form

    def _choices(self, literal: ast.expr) -> list[Any]:
        assert isinstance(literal, ast.Subscript)
        inner = literal.slice
        found: list[Any] = []
        for part in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
            if isinstance(part, ast.Constant):
                found.append(part.value)
            else:
                found += [choice for kind in self.alternatives(part) if _head(kind) == "Literal" for choice in self._choices(kind)]
        return found


def _class_of(node: ast.ClassDef) -> _Class:
    found = _Class([base.id for base in node.bases if isinstance(base, ast.Name)])
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.fields[name] = statement.annotation, statement.value
            case ast.FunctionDef():
                found.methods[statement.name] = statement
    return found


def _head(kind: ast.expr) -> str:
    match kind:
        case ast.Subscript():
            return _head(kind.value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.Constant(value=None):
            return "None"
    return ast.unparse(kind)


def _default_of(default: ast.expr | None, source: VllmSource) -> str | None:
    match default:
        case None:
            return None
        case ast.Call(func=ast.Name(id="Field" | "field"), args=args, keywords=keywords):
            given = {keyword.arg: keyword.value for keyword in keywords}
            factory = given.get("default_factory")
            if factory is not None:
                text = ast.unparse(factory)
                return {"list": "[]", "dict": "{}"}.get(text, "{}" if text in source.classes else text.removeprefix("lambda: "))
            return _default_of(given.get("default", args[0] if args else None), source)
        case ast.Name(id=name) if name in source.aliases:
            return _default_of(source.aliases[name], source)
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in source.classes and name in source.fields_of(owner):
            return _default_of(source.fields_of(owner)[name][1], source)
    text = ast.unparse(default)
    return None if text == "None" else text.strip("'\"")


class _Reader:
    """Follows a function that adds flags to a parser."""

    def __init__(self, source: VllmSource) -> None:
        self._source = source
        self.flags: list[dict[str, Any]] = []

    def read(self, function: ast.FunctionDef) -> None:
        fields: dict[str, ast.expr | str] = {}  # variable → the config class whose fields it has, or an expression
        groups: dict[str, str] = {}
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=owner)])):
                    fields[name] = owner
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="add_argument_group")) as call):
                    titles = [keyword.value for keyword in call.keywords if keyword.arg == "title"] or call.args
                    groups[name] = str(ast.literal_eval(titles[0]))
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() as value):
                    fields[name] = value
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument", value=ast.Name(id=owner))):
                    self._add(node, fields, groups.get(owner, "Other"))

    def read_fields(self, owner: str) -> None:
        """Every field of a dataclass is a flag; `_customize_cli_kwargs` changes some."""
        changes: dict[str, dict[str, str]] = {}
        for method in self._source.methods_of(owner, "_customize_cli_kwargs"):
            for node in ast.walk(method):
                match node:
                    case ast.Assign(
                        targets=[ast.Subscript(value=ast.Subscript(slice=ast.Constant(value=str() as name)), slice=ast.Constant(value=key))]
                    ):
                        changes.setdefault(name, {})[str(key)] = ast.unparse(node.value)
        for name, (annotation, default) in self._source.fields_of(owner).items():
            flag = {"flags": ["--" + name.replace("_", "-")], "group": "Frontend", "default": _default_of(default, self._source)}
            flag |= self._source.form_of(annotation)
            change = changes.get(name, {})
            if change.get("type") == "json.loads":
                flag["kind"] = "json"
            if change.get("action") == "'append'":
                flag["kind"] = "text"
            self.flags.append(flag)

    def _add(self, call: ast.Call, variables: dict[str, Any], group: str) -> None:
        spellings = [str(ast.literal_eval(argument)) for argument in call.args]
        if not spellings[0].startswith("-"):
            return
        flag: dict[str, Any] = {"flags": spellings, "group": group, "default": None, "kind": "text"}
        for keyword in call.keywords:
            if keyword.arg is None:
                self._take_field(flag, keyword.value, variables)
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        action = ast.unparse(given["action"]) if "action" in given else ""
        if "BooleanOptionalAction" in action:
            flag["kind"] = "switch"
        elif action == "'store_true'":
            flag["kind"], flag["one_way"] = "switch", True
        elif "type" in given and ast.unparse(given["type"]) in ("int", "float"):
            flag["kind"] = ast.unparse(given["type"])
        if isinstance(given.get("choices"), ast.List):
            flag["choices"] = sorted(ast.literal_eval(given["choices"]))
        if "default" in given and flag["default"] is None:
            flag["default"] = _default_of(given["default"], self._source)
        self.flags.append(flag)

    def _take_field(self, flag: dict[str, Any], value: ast.expr, variables: dict[str, Any]) -> None:
        match value:
            case ast.Dict(keys=keys, values=values):
                for key, inner in zip(keys, values, strict=True):
                    if key is None:
                        self._take_field(flag, inner, variables)
            case ast.Name(id=name) if isinstance(variables.get(name), ast.expr):
                self._take_field(flag, variables[name], variables)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as of_field)):
                annotation, default = self._source.fields_of(variables[name])[of_field]
                flag |= self._source.form_of(annotation) | {"default": _default_of(default, self._source)}
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=owner)]), slice=ast.Constant(value=of_field)
            ):
                self._take_field(flag, ast.parse(f"fields[{of_field!r}]", mode="eval").body, {"fields": owner})
            case _:
                raise ValueError(f"{flag['flags'][0]}: {ast.unparse(value)} is not understood.")


def read_flags(wheel: Path) -> list[dict[str, Any]]:
    """vLLM's flags in the order of their groups.

    Of each: "flags" (spellings), "group", "default" (as source text, or None), "kind" (switch, optional, text, int, float, values,
    json), and where there are any "choices", "off" (spellings that switch it off).
    """
    source = VllmSource(wheel)
    reader = _Reader(source)
    for owner, name in _PARSER_FUNCTIONS:
        reader.read(source.functions[name] if owner is None else source.classes[owner].methods[name])
    reader.read_fields(_FRONTEND)
    for flag in reader.flags:
        if flag["kind"] == "switch" and not flag.pop("one_way", False):
            long = [spelling for spelling in flag["flags"] if spelling.startswith("--")]
            flag["off"] = ["--no-" + spelling[2:] for spelling in long]
            flag["off"] += [there + s.removeprefix(here) for s in long for here, there in _INVERSES.items() if s.startswith(here)]
    return reader.flags


def main() -> None:
    """Write `flags.json` from the wheel that the command line names."""
    wheel = Path(sys.argv[1])
    version = wheel.name.split("-")[1]
    flags = read_flags(wheel)
    lines = ",\n".join("    " + json.dumps(flag, ensure_ascii=False) for flag in flags)
    head = f'"version": "{version}",\n  "date": "{datetime.date.today().isoformat()}",\n'
    FLAGS_FILE.write_text("{\n  " + head + '  "flags": [\n' + lines + "\n  ]\n}\n", encoding="utf-8")
    print(f"{len(flags)} flags of vLLM {version} in {FLAGS_FILE}")


if __name__ == "__main__":
    main()
