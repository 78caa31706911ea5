"""Splits the whole graph at its split-point ops into pieces.

A piece is the part of the graph between two split points, as a function. A value that crosses a split point is an output of the
earlier piece and an input of the later one. Weights are inputs too, so the pieces of two layers differ only in their arguments.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compile_and_serve.compiler.compat import OpOverload, OpOverloadPacket, node_source_line
from compile_and_serve.custom_ops.library import OpKind, op_info


class SplitError(ValueError):
    """The graph contains an op that is neither declared capturable nor a split point."""


@dataclass(kw_only=True, slots=True)
class Piece:
    """The part of the graph between two split points.

    inputs, outputs: nodes of the whole graph, the inputs in order of first use.
    gm: its placeholders correspond to `inputs`; its output is a flat tuple that corresponds to `outputs`.
    """

    gm: GraphModule
    inputs: list[Node]
    outputs: list[Node]


@dataclass(kw_only=True, slots=True)
class SplitOp:
    """A split-point op between two pieces. It is called directly and returns one tensor."""

    node: Node


Stage = Piece | SplitOp

_AT_LEAST_ONE = re.compile(r"Max\(1, (\w+)\)")  # how fake tensors write a symbolic length in strides
_NEAR = 2  # pieces behind the one that makes a product: of the same layer
CAPTURABLE_NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "higher_order"})


def split(gm: GraphModule) -> list[Stage]:
    """The stages of the graph in execution order. Raises `SplitError`, with the source line, for an undeclared op.

    Strided values that one piece makes and another reads become contiguous in `gm`, or are taken again from the contiguous value that they
    are a part of: a piece is compiled for contiguous inputs.
    """
    _make_contiguous(gm)
    stages: list[Stage] = []
    current: list[Node] = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _kind(node) is OpKind.SPLIT_POINT:
            _close(gm, current, stages)
            stages.append(SplitOp(node=node))
            current = []
        else:
            current.append(node)
    _close(gm, current, stages)
    return stages


def _make_contiguous(gm: GraphModule) -> None:
    """Copy each strided value that crosses a split point, such as a layer's part of a tensor that the first piece makes for all.

    A value of [heads, tokens, E] crosses as [tokens, heads, E]. Where tokens do not come first, the fake tensors' strides are only a
    guess, because the number of tokens is not known, and Inductor's may be others. A part of a product of the same layer, such as a gate
    beside what attention reads, is not copied: the product crosses.
    """
    number = 0
    piece_of: dict[Node, int] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _kind(node) is OpKind.SPLIT_POINT:
            number += 1
        else:
            piece_of[node] = number
    for node, own in piece_of.items():
        value = node.meta["example_value"]
        readers: dict[int, list[Node]] = {}
        for user in node.users:
            if (piece := piece_of.get(user, own)) != own:
                readers.setdefault(piece, []).append(user)
        if not readers or not isinstance(value, torch.Tensor):
            continue
        sizes = [i for i, size in enumerate(value.shape) if not (isinstance(size, int) and size == 1)]
        symbolic = [i for i in sizes if not isinstance(value.shape[i], int)]
        if is_contiguous(value) and (not symbolic or symbolic == sizes[:1]):
            continue
        if max(readers) <= own + _NEAR and _is_part_of_product(node):
            for users in readers.values():
                _take_again(gm, node, users)
            continue
        first = symbolic[0] if symbolic else 0
        with gm.graph.inserting_after(node):
            moved = _call_like(gm, node, torch.movedim, node, first, 0)
        with gm.graph.inserting_after(moved):
            copied = _call_like(gm, node, torch.clone, moved, memory_format=torch.contiguous_format)
        for users in readers.values():
            with gm.graph.inserting_before(min(users)):
                back = _call_like(gm, node, torch.movedim, copied, 0, first)
            for user in users:
                user.replace_input_with(node, back)


def _is_part_of_product(node: Node) -> bool:
    """Whether a value is a part, along the features, of what a linear makes: contiguous, [tokens, features]."""
    parts = node.args[0] if node.target is operator.getitem else None
    if not isinstance(parts, Node) or parts.target not in (torch.split, torch.chunk):
        return False
    product = parts.args[0]
    if not isinstance(product, Node):
        return False
    is_product = product.target is torch.nn.functional.linear or op_info(product.target) is not None
    value = product.meta["example_value"]
    return is_product and value.ndim == 2 and not isinstance(value.shape[0], int) and is_contiguous(value)


def _take_again(gm: GraphModule, node: Node, users: Iterable[Node]) -> None:
    """Let users of a part, which are in one piece, take it from the whole, in that piece."""
    parts = node.args[0]
    assert isinstance(parts, Node)
    with gm.graph.inserting_before(min(users)):
        copied = gm.graph.node_copy(parts, lambda arg: arg)
        part = gm.graph.node_copy(node, lambda arg: copied if arg is parts else arg)
    for user in users:
        user.replace_input_with(node, part)


def _call_like(gm: GraphModule, origin: Node, function: Any, source: Node, *args: Any, **kwargs: Any) -> Node:
    """Insert `function(source, …)` with its computed value and the source line of `origin`."""
    made = gm.graph.call_function(function, (source, *args), kwargs)
    made.stack_trace = origin.stack_trace
    value = function(source.meta["example_value"], *args, **kwargs)
    made.meta |= {"stack_trace": origin.meta.get("stack_trace"), "example_value": value}
    return made


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor of symbolic sizes is contiguous for every value of them."""
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if isinstance(size, int) and size == 1:
            continue
        if _AT_LEAST_ONE.sub(r"\1", str(stride)) != _AT_LEAST_ONE.sub(r"\1", str(expected)):
            return False
        expected = expected * size
    return True


def _kind(node: Node) -> OpKind:
    if node.op == "call_method":  # a tensor's method that `canonicalize` does not replace
        return OpKind.CAPTURABLE
    if node.op != "call_function":
        raise SplitError(f"{node.op} {node.target} at {node_source_line(node)} cannot be compiled: only function calls can.")
    if not isinstance(node.target, OpOverload | OpOverloadPacket):
        return OpKind.CAPTURABLE
    info, name = op_info(node.target), str(node.target).replace(".", "::", 1).split(".")[0]
    if info is not None:
        return info.kind
    if name.split("::")[0] in CAPTURABLE_NAMESPACES:
        return OpKind.CAPTURABLE
    raise SplitError(
        f"Op {name} at {node_source_line(node)} is neither declared capturable nor a split point: "
        f"define it with compile_and_serve.custom_ops.library.define(...)."
    )


def _close(gm: GraphModule, nodes: list[Node], stages: list[Stage]) -> None:
    """Append a piece with these nodes, if there are any."""
    if nodes:
        stages.append(_piece(gm, nodes))


def _piece(gm: GraphModule, nodes: list[Node]) -> Piece:
    inside = set(nodes)
    inputs = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    assert all(isinstance(node.meta["example_value"], torch.Tensor | torch.SymInt) for node in outputs), (
        f"a tuple crosses a split point: {[n.name for n in outputs]}"
    )
    graph, copies = Graph(), {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"arg{i}")
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    output = graph.output(tuple(copies[node] for node in outputs))
    output.meta["example_value"] = tuple(node.meta["example_value"] for node in outputs)
    return Piece(gm=GraphModule(gm, graph, class_name="Piece"), inputs=inputs, outputs=outputs)
