"""Removes the leading axis of length 1 of a model written for batches, so that it computes on [tokens, …] like other models.

    embedding(ids[None]) → linear → view(1, T, -1, E) → transpose(1, 2) → …[0]   →   the same without the first axis

The axis begins at an input or an attention output, and ends where its only row is selected. Between, each op is called again on inputs
without it: dimensions counted from the front are one less, and the result's shape is checked. An op without a rule gets its inputs with
the axis, so the rules need not cover every op.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import BasePass, NearMiss, PassContext, PassResult, is_call, is_split_point
from compile_and_serve.custom_ops.step import TOKENS, StepInput

SIZE = torch.ops.aten.sym_size.int

# Ops that take no dimension, or count it from the end. The second group broadcasts.
ROW_OPS = (F.linear, F.embedding, F.layer_norm, torch.rms_norm, F.rms_norm, F.dropout, torch.Tensor.to,
           torch.Tensor.contiguous, torch.clone, F.silu, F.gelu, F.relu, torch.neg, torch.pow, torch.square, torch.sqrt,
           torch.rsqrt, torch.exp, torch.tanh, torch.sigmoid, torch.relu, torch.cos, torch.sin, torch.clamp)  # fmt: skip
BROADCASTING = (torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.cat)
# Position of the first dimension among the arguments, and their number. They may also be given as `dim`.
DIMENSIONS = {
    torch.cat: (1, 1),
    torch.stack: (1, 1),
    torch.repeat_interleave: (2, 1),
    torch.mean: (1, 1),
    torch.sum: (1, 1),
    torch.unsqueeze: (1, 1),
    torch.squeeze: (1, 1),
    torch.softmax: (1, 1),
    F.softmax: (1, 1),
    torch.unflatten: (1, 1),
    torch.chunk: (2, 1),
    torch.split: (2, 1),
    torch.transpose: (1, 2),
    torch.flatten: (1, 2),
    torch.gather: (1, 1),
}
SIZES = (torch.reshape, torch.Tensor.view, torch.Tensor.expand)


class DropBatchAxis(BasePass):
    name = "drop_batch_axis"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        rewriter = _Rewriter(gm, ctx)
        if not any(_adds_axis(node) and _is_token_input(node.args[0], "sampled") for node in gm.graph.nodes):
            return PassResult(matched=0)
        for node in list(gm.graph.nodes):
            rewriter.visit(node)
        gm.graph.eliminate_dead_code()
        return PassResult(matched=rewriter.matched, near_misses=tuple(rewriter.near_misses))


class _NoRuleError(Exception):
    """There is no rule for this op: it keeps the axis."""


class _Rewriter:
    def __init__(self, gm: GraphModule, ctx: PassContext) -> None:
        self.gm, self.ctx = gm, ctx
        self.flat: dict[object, Node] = {}  # value with the axis → the same without
        self.batched: set[Node] = set()  # those of these values that the graph still computes with the axis
        self.matched = 0
        self.near_misses: list[NearMiss] = []

    def visit(self, node: Node) -> None:
        if _adds_axis(node):
            self.flat[node] = node.args[0]  # type: ignore[assignment]
            self.batched.add(node)
        elif any(source in self.flat for source in node.all_input_nodes):
            try:
                self._rewrite(node)
                self.matched += 1
            except _NoRuleError:
                if node.op != "output" and not is_call(node, SIZE):
                    reason = f"there is no rule for {getattr(node.target, '__name__', node.target)} on {node.args[1:]}"
                    self.near_misses.append(NearMiss.at(node, f"it keeps the batch axis: {reason}"))
                self._give_axis_back(node)
                self._drop_after(node)

    def _rewrite(self, node: Node) -> None:
        if node.op != "call_function" or not node.args:
            raise _NoRuleError
        source = node.args[0]
        if source in self.flat and _takes_axis_off(node, source):
            node.replace_all_uses_with(self.flat[source])
            return
        args, kwargs = self._arguments(node)
        with self.gm.graph.inserting_before(node):
            made = self._call(node, args, kwargs)
        if _sizes(node) == _sizes(made):  # the result has no batch axis
            node.replace_all_uses_with(made)
        elif _sizes(made) == _sizes(node, without_axis=True):
            self.flat[node] = made
        else:
            self.gm.graph.erase_node(made)
            raise _NoRuleError

    def _call(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        try:
            return self.ctx.call(self.gm, node.target, *args, origin=node, kwargs=kwargs)  # type: ignore[arg-type]
        except (RuntimeError, TypeError, IndexError, ValueError) as error:  # the op does not take these arguments
            raise _NoRuleError from error

    def _arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `node` for inputs without a batch axis."""
        target, args, kwargs = node.target, list[Any](node.args), dict(node.kwargs)
        if target is operator.getitem:
            return (self._input(args[0]), _index(args[0], args[1])), {}
        if target in SIZES:
            sizes = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            keeps_axis = sizes[0] == 1 and _sizes(node)[0] == "1"
            return (self._input(args[0]), tuple(sizes[1:] if keeps_axis else sizes)), {}
        if target is torch.Tensor.repeat:
            counts = args[1] if isinstance(args[1], list | tuple) else args[1:]
            assert isinstance(args[0], Node)
            if counts[0] != 1 or len(counts) != len(_sizes(args[0])):
                raise _NoRuleError
            return (self._input(args[0]), *counts[1:]), {}
        if target is SIZE:
            if args[1] == 0:
                raise _NoRuleError
            return (self._input(args[0]), _moved(args[1])), {}
        if target in DIMENSIONS:
            first, count = DIMENSIONS[target]
            args[first : first + count] = [_moved(dim) for dim in args[first : first + count]]
            kwargs |= {name: _moved(kwargs[name]) for name in ("dim", "dim0", "dim1") if name in kwargs}
            if target in (torch.chunk, torch.split, torch.repeat_interleave) and len(args) < 3 and "dim" not in kwargs:
                raise _NoRuleError  # it works along the batch axis
        elif target not in ROW_OPS and target not in BROADCASTING:
            raise _NoRuleError
        rank = len(_sizes(node)) if target in BROADCASTING or target is torch.gather else None
        args = [self._input(arg, rank) for arg in args]
        return tuple(args), kwargs

    def _input(self, value: Any, rank: int | None = None) -> Any:
        """`value` without the axis. rank: of a broadcast's result; other operands of that rank have the axis, too."""
        if isinstance(value, list | tuple):
            return type(value)(self._input(item, rank) for item in value)
        if not isinstance(value, Node) or value in self.flat:
            return self.flat.get(value, value) if isinstance(value, Node) else value
        sizes = _sizes(value)
        if rank is not None and len(sizes) == rank and sizes[0] == "1":
            with self.gm.graph.inserting_after(value):
                return self.ctx.call(self.gm, torch.squeeze, value, 0, origin=value)
        return value

    def _give_axis_back(self, node: Node) -> None:
        for source in node.all_input_nodes:
            if source in self.flat and source not in self.batched:
                with self.gm.graph.inserting_before(node):
                    batched = self.ctx.call(self.gm, torch.unsqueeze, self.flat[source], 0, origin=node)
                node.replace_input_with(source, batched)

    def _drop_after(self, node: Node) -> None:
        """Remove the axis after an op that keeps it."""
        if node.op == "call_function" and _sizes(node)[:1] == ["1"]:
            with self.gm.graph.inserting_after(node):
                self.flat[node] = self.ctx.call(self.gm, torch.squeeze, node, 0, origin=node)
            self.batched.add(node)


def _adds_axis(node: Node) -> bool:
    """Whether this is x[None] of a step's input or of attention's output. Elsewhere, a new first axis is that of the heads."""
    if not (is_call(node, torch.unsqueeze) and node.args[1:] == (0,)):
        return False
    return _is_token_input(node.args[0]) or is_split_point(node.args[0])


def _is_token_input(node: object, advance: str | None = None) -> bool:
    """Whether a node is an input with an element a token. advance: and of that kind."""
    declared = node.meta.get("declaration") if isinstance(node, Node) else None
    return isinstance(declared, StepInput) and declared.dims == (TOKENS,) and advance in (None, declared.advance)


def _takes_axis_off(node: Node, source: Any) -> bool:
    first = is_call(node, operator.getitem, torch.squeeze) and len(node.args) > 1 and node.args[1]
    return type(first) is int and first == 0 and isinstance(source.meta["example_value"], torch.Tensor)


def _sizes(node: Node, without_axis: bool = False) -> list[Any]:
    """Sizes of a node's value as text, for each part of a tuple of tensors; else empty."""
    value = node.meta["example_value"]
    if isinstance(value, tuple | list):
        if not all(isinstance(part, torch.Tensor) for part in value):
            return []
        return [[str(size) for size in part.shape[without_axis:]] for part in value]
    return [str(size) for size in value.shape[without_axis:]] if isinstance(value, torch.Tensor) else []


def _index(source: Any, index: Any) -> Any:
    """The index without the axis: `x[:, rows, :]` → `x[rows]`. `x[..., :8]` and the index of a tuple do not change."""
    if not isinstance(source.meta["example_value"], torch.Tensor):
        return index
    if not isinstance(index, tuple) or not (index[0] is Ellipsis or index[0] == slice(None)):
        raise _NoRuleError
    if index[0] is Ellipsis:
        return index
    rest = index[1:]
    while rest and rest[-1] == slice(None):
        rest = rest[:-1]
    return rest[0] if len(rest) == 1 else rest


def _moved(dim: Any) -> Any:
    """A dimension without the first axis. Raises for the axis itself."""
    if not isinstance(dim, int) or dim == 0:
        raise _NoRuleError
    return dim - 1 if dim > 0 else dim
