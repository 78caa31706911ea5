"""Cut the whole graph at its split points into pieces, each a function of its inputs alone.

A piece is what lies between two split-point ops in the graph's order. What crosses a cut becomes an input of the later piece
and an output of the earlier; weights are inputs too, so that two layers' pieces differ in nothing but what is passed to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from compile_and_serve.compiler.compat import OpOverload, OpOverloadPacket, node_source_line
from compile_and_serve.custom_ops.library import OPS, OpKind


class SplitError(ValueError):
    """The graph holds an op of which the compiler does not know whether it may be captured."""


@dataclass(kw_only=True, slots=True)
class Piece:
    """A stretch of the graph between two split points.

    gm: placeholders are `inputs` in order (tensors used, in order of first use), the output is a flat tuple, `outputs` in order.
    inputs, outputs: nodes of the whole graph.
    """

    gm: GraphModule
    inputs: list[Node]
    outputs: list[Node]


@dataclass(kw_only=True, slots=True)
class SplitOp:
    """A split-point op between two pieces, run as it is. It returns one tensor."""

    node: Node


Stage = Piece | SplitOp

CAPTURABLE_NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "higher_order"})


def split(gm: GraphModule) -> list[Stage]:
    """Stages of the graph in the order in which they run. Raises `SplitError` for an undeclared op, naming it and its line."""
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


def _kind(node: Node) -> OpKind:
    if node.op == "call_method":  # of a tensor: what is not canonical is still plain torch
        return OpKind.CAPTURABLE
    if node.op != "call_function":
        raise SplitError(f"{node.op} {node.target} at {node_source_line(node)} cannot be compiled: only functions can.")
    if not isinstance(node.target, OpOverload | OpOverloadPacket):
        return OpKind.CAPTURABLE
    name = str(node.target).replace(".", "::", 1).split(".")[0]
    if name.split("::")[0] in CAPTURABLE_NAMESPACES:
        return OpKind.CAPTURABLE
    if name in OPS:
        return OPS[name].kind
    raise SplitError(
        f"Op {name} at {node_source_line(node)} is neither declared capturable nor a split point: "
        f"define it with compile_and_serve.custom_ops.library.define(..., kind=...)."
    )


def _close(gm: GraphModule, nodes: list[Node], stages: list[Stage]) -> None:
    """Append the piece made of `nodes`, if there are any."""
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
