"""One spelling for each op, so that later passes match what a model computes, however it is written.

`x.chunk(2)` and `torch.chunk(x, 2)`, `a * b` and `torch.mul(a, b)`, `cos[:, None]` and `cos.unsqueeze(1)` become the same
node. A matrix product of a column and a row becomes `torch.mul`, which Inductor fuses with what follows. Asserts about symbolic
lengths hold for every batch that the runner builds; they are removed, with the lengths that only they read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from compile_and_serve.compiler.compat import CAPTURED_CHECKS
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult, is_call, tensor_of

FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.add: torch.add,
    operator.mul: torch.mul,
    operator.sub: torch.sub,
    operator.truediv: torch.div,
    operator.neg: torch.neg,
    operator.matmul: torch.matmul,
    operator.imatmul: torch.matmul,  # for tensors, `x @= y` is `x = x @ y`
    torch.multiply: torch.mul,
    torch.concat: torch.cat,
    torch.concatenate: torch.cat,
}
METHODS = {"float": (torch.float32,), "half": (torch.float16,), "bfloat16": (torch.bfloat16,)}
SIZE_METHODS = ("reshape", "permute")  # the functions take the sizes as a tuple
SIZE = torch.ops.aten.sym_size.int
ASSERTS: tuple[Callable[..., Any], ...] = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    *CAPTURED_CHECKS,
)


class Canonicalize(BasePass):
    name = "canonicalize"
    required = True  # later passes and the pieces rely on one spelling, and on lengths that only the step has

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched = 0
        for node in gm.graph.find_nodes(op="call_function", target=torch.Size):
            _use_sizes(node)
        for node in list(gm.graph.nodes):
            matched += _rewrite(gm, node, ctx)
        for node in list(gm.graph.nodes):
            _read_lengths_here(gm, node, ctx)
        for node in reversed(list(gm.graph.nodes)):
            if node.op == "call_function" and not node.users and not node.is_impure():
                gm.graph.erase_node(node)
        for node in gm.graph.find_nodes(op="placeholder"):
            if not node.users and isinstance(node.meta.get("example_value"), torch.SymInt):
                gm.graph.erase_node(node)
        return PassResult(matched=matched)


def _rewrite(gm: GraphModule, node: Node, ctx: PassContext) -> bool:
    if is_call(node, *ASSERTS):
        gm.graph.erase_node(node)
        return True
    changed = False
    if node.op == "call_method":
        assert isinstance(node.target, str)
        if node.target in METHODS:
            node.args, node.target = (*node.args, *METHODS[node.target]), "to"
        elif node.target == "type_as":
            node.args, node.target = (node.args[0], tensor_of(node).dtype), "to"
        if node.target in SIZE_METHODS and not isinstance(node.args[1], list | tuple):
            node.args = (node.args[0], node.args[1:])
        node.op, node.target = "call_function", function_of_method(node.target)
        changed = True
    elif node.op == "call_function" and node.target in FUNCTIONS and _is_tensor_op(node):
        node.target = FUNCTIONS[node.target]
        changed = True
    if is_call(node, operator.getitem) and (axis := _inserted_axis(node)) is not None:
        node.target, node.args = torch.unsqueeze, (node.args[0], axis)
        changed = True
    if is_call(node, torch.matmul) and _is_outer_product(node):
        node.target = torch.mul
        changed = True
    if is_call(node, torch.permute) and (swapped := _swapped_axes(node)) is not None:
        node.target, node.args = torch.transpose, (node.args[0], *swapped)
        changed = True
    # The graph is captured on the meta device and runs on a real one.
    if node.kwargs.get("device") == torch.device("meta"):
        node.kwargs = {**node.kwargs, "device": ctx.device}
        changed = True
    if torch.device("meta") in node.args:
        node.args = tuple(ctx.device if argument == torch.device("meta") else argument for argument in node.args)
        changed = True
    return changed


def _use_sizes(node: Node) -> None:
    """Let the users of `torch.Size([…])` take the sizes themselves."""
    sizes = tuple(node.args[0])  # type: ignore[arg-type]
    for user in list(node.users):
        user.args, user.kwargs = map_aggregate((user.args, user.kwargs), lambda value: sizes if value is node else value)


def _read_lengths_here(gm: GraphModule, node: Node, ctx: PassContext) -> None:
    """Let an op take a length from its own input (`x.view(tokens, -1, 64)`), or from one of the graph's (`torch.arange(tokens)`).

    Pieces exchange tensors, not lengths.
    """
    if is_call(node, SIZE) or node.op == "output":
        return
    inputs = node.all_input_nodes
    for length in inputs:
        if not isinstance(length.meta["example_value"], torch.SymInt):
            continue
        if is_call(length, SIZE) and length.args[0] in inputs:
            continue
        for source in (*inputs, *gm.graph.find_nodes(op="placeholder")):
            value = source.meta["example_value"]
            sizes = [str(size) for size in value.shape] if isinstance(value, torch.Tensor) else []
            if str(length.meta["example_value"]) in sizes:
                with gm.graph.inserting_before(node):
                    here = ctx.call(gm, SIZE, source, sizes.index(str(length.meta["example_value"])), origin=node)
                node.replace_input_with(length, here)
                break


def function_of_method(name: str) -> Callable[..., Any]:
    """`add` → torch.add, `view` → torch.Tensor.view, `__eq__` → operator.eq."""
    function = getattr(operator if name.startswith("__") else torch, name, None)
    return function if callable(function) else getattr(torch.Tensor, name)


def _is_tensor_op(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _is_outer_product(node: Node) -> bool:
    """[…, M, 1] @ […, 1, N], such as positions and frequencies of RoPE."""
    if len(node.args) != 2:
        return False
    column, row = (tensor_of(operand) for operand in node.args)
    return column.dim() > 1 and row.dim() > 1 and isinstance(width := column.shape[-1], int) and width == 1


def _swapped_axes(node: Node) -> tuple[int, int] | None:
    """The two axes that a permutation exchanges, if it does nothing else."""
    order = node.args[1] if len(node.args) == 2 else None
    if not isinstance(order, list | tuple) or not all(isinstance(axis, int) for axis in order):
        return None
    moved = [i for i, axis in enumerate(order) if axis % len(order) != i]
    return (moved[0], moved[1]) if len(moved) == 2 else None


def _inserted_axis(node: Node) -> int | None:
    """Axis of `x[:, …, None]` where the index only inserts one axis, else None."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if index.count(None) != 1 or any(item not in (None, slice(None)) for item in index):
        return None
    return index.index(None)
