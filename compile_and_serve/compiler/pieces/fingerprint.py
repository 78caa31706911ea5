"""The fingerprint of a piece: equal for pieces that compute the same, in every process and torch build.

It covers each node's op, arguments and result (shape, dtype, strides). It does not cover names, source lines and weights.
Symbolic lengths are numbered by first use, because their names differ between processes.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import OpOverload

_SYMBOL = re.compile(r"\b[us]\d+\b")


def fingerprint(gm: GraphModule) -> str:
    """32 hex digits over the graph's `normalized_text`."""
    return hashlib.sha256(normalized_text(gm).encode()).hexdigest()[:32]


def normalized_text(gm: GraphModule) -> str:
    """One line per node: `%3 = torch.nn.functional.linear(%1, %2, None) : bfloat16[n0, 576] (576, 1)`."""
    numbers: dict[Node, int] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "output":
            lines.append(f"return {_text(node.args, numbers)}")
            continue
        call = "input" if node.op == "placeholder" else f"{_target(node)}({_call_arguments(node, numbers)})"
        lines.append(f"%{numbers[node]} = {call} : {_value(node.meta.get('example_value'))}")
    symbols: dict[str, str] = {}
    return _SYMBOL.sub(lambda m: symbols.setdefault(m.group(), f"n{len(symbols)}"), "\n".join(lines))


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _call_arguments(node: Node, numbers: dict[Node, int]) -> str:
    keyword = [f"{key}={_text(value, numbers)}" for key, value in sorted(node.kwargs.items())]
    return ", ".join([*(_text(arg, numbers) for arg in node.args), *keyword])


def _text(value: Any, numbers: dict[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{numbers[value]}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(item, numbers) for item in value)})"
    if isinstance(value, slice):
        return f"slice({_text([value.start, value.stop, value.step], numbers)})"
    return repr(value)


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {tuple(value.stride())}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_value(item) for item in value)})"
    return type(value).__name__ if isinstance(value, torch.SymInt) else repr(value)
