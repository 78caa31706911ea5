"""Unused rows are not computed: the selection of logits rows moves up to the last attention.

    f(g(a), b)[rows]  →  f(g(a[rows]), b[rows])       where f and g work row by row

A prompt needs one row of logits. The last layer's output projection and MLP come after the last op that mixes rows, so they run only on
those rows, which saves 1/L of a prefill's linears for L layers. A decode step needs all rows and gains nothing (0.94 to 1.01 times the
speed on two CPU cores, `cpu-passes-smollm2-2026-11-20.jsonl`, where runs differ by some per cent).
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    arguments,
    is_call,
    set_example_value,
    tensor_of,
)
from compile_and_serve.custom_ops.library import op_info

# torch's ops of which row i of the result depends only on row i of the first argument, and of others with as many rows.
ROW_WISE = (
    F.linear,
    torch.rms_norm,
    F.layer_norm,
    F.silu,
    F.gelu,
    F.relu,
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.neg,
    torch.pow,
    torch.square,
    torch.rsqrt,
    torch.tanh,
    torch.sigmoid,
    torch.split,
    torch.chunk,
    torch.Tensor.to,
)


class SelectRowsEarly(BasePass):
    name = "select_rows_early"
    version = 4

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for node in gm.graph.find_nodes(op="call_function", target=operator.getitem):
            if not selects_rows(node):
                continue
            cone = _cone(node)
            if not cone:
                continue
            if any(tensor_of(n).dim() != 2 for n in cone if not _is_tuple(n)):
                near_misses.append(NearMiss.at(node, "a value before the selection is not [tokens, features]"))
                continue
            _move(gm, node, cone, ctx)
            matched += 1
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def selects_rows(node: Node) -> bool:
    """Whether this is `x[rows]` with a tensor of row numbers."""
    rows = arguments(node)[1]
    return isinstance(rows, Node) and tensor_of(rows).dim() == 1 and tensor_of(rows).dtype == torch.int64


def _cone(selection: Node) -> list[Node]:
    """Row-wise nodes above the selection whose readers are all the selection or in the cone, in the graph's order."""
    inside = {selection}
    found = []
    for node in _reversed_before(selection):
        if all(user in inside for user in node.users) and node.users and _is_row_wise(node):
            inside.add(node)
            found.append(node)
    # A getitem of a split outside of the cone is outside, too.
    return [node for node in reversed(found) if not is_call(node, operator.getitem) or node.args[0] in inside]


def _reversed_before(node: Node) -> list[Node]:
    nodes = []
    current = node.prev
    while current.op == "call_function":
        nodes.append(current)
        current = current.prev
    return nodes


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta["example_value"], tuple | list)


def _is_row_wise(node: Node) -> bool:
    if is_call(node, operator.getitem):
        return _is_tuple(arguments(node)[0])
    if is_call(node, torch.mean):
        return node.args[1:] in ((-1,), ([-1],)) and node.kwargs.get("keepdim") is True
    info = op_info(node.target)
    return is_call(node, *ROW_WISE) or (info is not None and info.row_wise)


def _move(gm: GraphModule, selection: Node, cone: list[Node], ctx: PassContext) -> None:
    source, rows = arguments(selection)
    inside, selected = set(cone), {}
    num_tokens = str(tensor_of(source).shape[0])
    for node in cone:
        for value in node.all_input_nodes:
            if value in inside or value in selected or str(next(iter(tensor_of(value).shape), "")) != num_tokens:
                continue  # a weight, a scalar, or a node of the cone
            with gm.graph.inserting_before(node):  # before its first reader, so that it is not in an earlier piece
                selected[value] = ctx.call(gm, operator.getitem, value, rows, origin=selection)
    for node in cone:
        for value, chosen in selected.items():
            node.replace_input_with(value, chosen)
        set_example_value(node, ctx.fake_mode)
    selection.replace_all_uses_with(source)
    gm.graph.erase_node(selection)
