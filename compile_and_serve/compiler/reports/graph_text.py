"""Prints an FX graph as a readable Python file that can be run: one line per node, with the dtype and shape of its value."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import OpOverload, OpOverloadPacket, node_source_line
from compile_and_serve.custom_ops.library import op_info
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import COLUMNS
from compile_and_serve.custom_ops.step import StepInput

_ROOT = Path(__file__).parents[2]
_SYMBOL = re.compile(r"\b[us]\d+\b")
_PIECE_INPUT, _LAYER = re.compile(r"arg\d+"), re.compile(r"^.*?\.\d+\.")
_COMMENT_COLUMN = 88

HEADER = '''"""{title}

{description}
Run it with `python {file}`: it computes on random inputs and prints the outputs.
"""

import operator

import torch
import torch.nn.functional as F

# define the ops of the graph
{modules}
from compile_and_serve.compiler.reports.run_dump import main

# name, dtype, shape, name in the model and kind of each input of `forward`
INPUTS = [
{inputs}
]


'''

FOOTER = """

if __name__ == "__main__":
    main(forward, INPUTS)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The line of the model that a node comes from. place: `models/families/llama.py:57 in forward`. code: the line's text."""

    place: str
    code: str


def source_of(node: Node) -> Source:
    """The line of the model that a node comes from; its place and text are empty if the node comes from a pass."""
    place = node_source_line(node)
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    file, _, rest = place.partition(":")
    line = re.match(r"\d+", rest)
    found = re.search(rf'File "{re.escape(file)}", line {line[0]}, [^\n]*\n([^\n]*)', trace) if line else None
    if place == "unknown source":
        return Source(place="", code="")
    return Source(place=place.replace(f"{_ROOT}/", ""), code=found[1].strip() if found else "")


class SymbolNames:
    """Readable names of symbolic lengths: `tokens`, `rows`, then n0, n1, … in order of appearance."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    @classmethod
    def of(cls, gm: GraphModule) -> SymbolNames:
        """The names that the declared inputs of a whole-model graph give to their lengths."""
        names = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            declared = node.meta.get("declaration")
            if isinstance(declared, StepInput) and declared.length is not None and isinstance(value, torch.Tensor):
                names[str(value.shape[declared.dims.index(declared.length)])] = declared.length
        return cls(names)

    def value(self, value: Any) -> str:
        """dtype and shape of a tensor (`bfloat16[tokens, 576]`), `(…, …)` for a tuple, `length` for a symbolic integer."""
        if isinstance(value, torch.Tensor):
            sizes = ", ".join(self.size(size) for size in value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
        if isinstance(value, list | tuple):
            return f"({', '.join(self.value(item) for item in value)})"
        if isinstance(value, torch.SymInt):
            return "length"
        return "nothing" if value is None else type(value).__name__.replace("Sym", "").lower()

    def size(self, size: Any) -> str:
        """A size, with readable names for its symbols."""
        named = lambda match: self._names.setdefault(match[0], f"n{len(self._names)}")  # noqa: E731
        return _SYMBOL.sub(named, str(size))


class GraphText:
    """Prints the nodes of a graph. Placeholders have the names of the model's inputs and weights."""

    def __init__(self, gm: GraphModule, symbols: SymbolNames) -> None:
        self.gm, self.symbols = gm, symbols
        self._names: dict[Node, str] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        wanted = {node: _placeholder_name(node) for node in placeholders}
        taken = Counter(wanted.values()) + Counter(node.name for node in gm.graph.nodes if node.op != "placeholder")
        self._names = {node: name for node, name in wanted.items() if taken[name] == 1 and not iskeyword(name)}

    def name(self, node: Node) -> str:
        """The variable that holds the node's value."""
        return self._names.get(node, node.name)

    def file(self, *, title: str, description: str, file: str) -> str:
        """A module with `forward` and `INPUTS` that can be run as a script."""
        inputs = []
        for node in self.gm.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            shape = [self.symbols.size(size) if isinstance(size, torch.SymInt) else int(size) for size in sizes]
            dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "length"
            name = node.meta.get("input") or node.meta.get("weight") or ""
            inputs.append(f"    ({self.name(node)!r}, {dtype!r}, {shape!r}, {name!r}, {_kind(node)!r}),")
        ops = (op_info(node.target) for node in self.gm.graph.nodes if node.op == "call_function")
        modules = "\n".join(sorted({f"import {op.module}" for op in ops if op is not None}))
        head = HEADER.format(title=title, description=description, file=file, modules=modules, inputs="\n".join(inputs))
        return head + self.function() + FOOTER

    def function(self) -> str:
        """`def forward(…)`, with a comment for each new line of the model."""
        parameters = [f"    {self.name(node)}," for node in self.gm.graph.find_nodes(op="placeholder")]
        lines = ["def forward(", *parameters, "):"]
        previous = ""
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                lines.append(f"    return {self.argument(node.args[0])}")
                continue
            source = source_of(node)
            if source.place and source.place != previous:
                lines.append(f"    # {source.place}: {source.code}" if source.code else f"    # {source.place}")
                previous = source.place
            statement = f"    {self.name(node)} = {self.call(node)}"
            value = self.symbols.value(node.meta.get("example_value"))
            lines.append(f"{statement.ljust(_COMMENT_COLUMN)}  # {value}")
        return "\n".join(lines) + "\n"

    def call(self, node: Node) -> str:
        """The node's call as a Python expression."""
        args = [self.argument(argument) for argument in node.args]
        keywords = [f"{name}={self.argument(value)}" for name, value in node.kwargs.items()]
        assert node.op in ("call_function", "call_method"), f"{node.op} in a captured graph"
        target = target_name(node)
        if target == "operator.getitem":
            return f"{args[0]}[{self._index(node.args[1])}]"
        if target.startswith("torch.Tensor."):
            return f"{args[0]}.{target.removeprefix('torch.Tensor.')}({', '.join(args[1:] + keywords)})"
        return f"{target}({', '.join(args + keywords)})"

    def argument(self, value: Any) -> str:
        """A node's argument as Python."""
        if isinstance(value, Node):
            return self.name(value)
        if isinstance(value, torch.device):
            return f'torch.device("{value}")'
        if isinstance(value, tuple):
            return f"({self._joined(value)},)" if len(value) == 1 else f"({self._joined(value)})"
        if isinstance(value, list):
            return f"[{self._joined(value)}]"
        if isinstance(value, slice):
            return f"slice({self._joined((value.start, value.stop, value.step))})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    def _joined(self, values: Iterable[Any]) -> str:
        return ", ".join(self.argument(value) for value in values)

    def _index(self, index: Any) -> str:
        if isinstance(index, tuple) and index:
            return ", ".join(self._index(item) for item in index) + ("," if len(index) == 1 else "")
        if isinstance(index, slice):
            parts = ["" if part is None else self.argument(part) for part in (index.start, index.stop)]
            return ":".join(parts) + ("" if index.step is None else f":{self.argument(index.step)}")
        return self.argument(index)


def target_name(node: Node) -> str:
    """The name of the node's target in a file that imports torch, F and operator."""
    target: Any = node.target
    if isinstance(target, str):
        return f"torch.Tensor.{target}"
    if isinstance(target, OpOverload | OpOverloadPacket):
        return f"torch.ops.{target}"
    name = getattr(target, "__name__", str(target))
    for module, prefix in ((F, "F"), (torch, "torch"), (torch.Tensor, "torch.Tensor")):
        if getattr(module, name, None) is target:
            return f"{prefix}.{name}"
    module_name = getattr(target, "__module__", "").replace("_operator", "operator")
    return f"{module_name}.{getattr(target, '__qualname__', name)}"


def _kind(node: Node) -> str:
    """What `compiler/reports/run_dump.py` fills an input with: the unit of its state, how an input advances, or nothing."""
    declared = node.meta.get("declaration")
    if isinstance(declared, StateGroup):
        return "next" if node.meta["input"].endswith(COLUMNS) else declared.kind.unit
    return (declared.advance or "") if isinstance(declared, StepInput) else ""


def _placeholder_name(node: Node) -> str:
    """`input_ids`, `kv_caches_3`, `mlp_down_proj_weight`. In a piece, without the layer, because many layers share the piece."""
    is_piece = _PIECE_INPUT.fullmatch(node.name) is not None
    name = node.meta.get("input") or node.meta.get("weight")
    if name is None or (is_piece and isinstance(node.meta.get("declaration"), StateGroup)):
        return node.name
    name = name.removeprefix("model.")
    if is_piece:
        name = _LAYER.sub("", name)
    return re.sub(r"\W", "_", name)
