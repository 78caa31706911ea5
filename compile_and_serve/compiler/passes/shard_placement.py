"""Which dimension of a value is sharded over ranks, through the ops between a colwise and a rowwise linear.

An op that would combine values of different ranks, or that is not known here, is an error with its source line. Otherwise, for example, a
sum over a sharded dimension would silently be wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from compile_and_serve.compiler.compat import node_source_line
from compile_and_serve.compiler.rewrite.graph_pass import PassError, arguments, is_call, op_arguments, tensor_of
from compile_and_serve.custom_ops.library import Sharding, op_info

HEAD_VIEWS = (torch.Tensor.view, torch.reshape, torch.unflatten)

_ELEMENTWISE = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.neg,
    torch.sigmoid,
    torch.tanh,
    torch.relu,
    torch.square,
    torch.clone,
    F.silu,
    F.gelu,
    F.relu,
    torch.Tensor.to,
    torch.Tensor.contiguous,
)
_VIEWS = (*HEAD_VIEWS, torch.flatten)
_ALONG_ONE = (torch.chunk, torch.split, torch.cat, torch.softmax, F.softmax)
_SIZE = torch.ops.aten.sym_size.int


def sharding_of(node: Node) -> Sharding | None:
    """How an op of ours is sharded; None for anything else."""
    info = op_info(node.target)
    return None if info is None else info.sharding


def sharded_dimension(node: Node, dimensions: Mapping[Node, int]) -> int | None:
    """The sharded dimension (≥ 0) of `node`'s value; None: every rank has the whole value, or a part of a sum.

    dimensions: of earlier sharded nodes, whose `example_value` has the shard's shape. Raises `PassError`.
    """
    cut = [value for value in node.all_input_nodes if value in dimensions]
    if not cut:
        return None
    dimension = dimensions[cut[0]]
    if is_call(node, _SIZE):
        return None
    sharding = sharding_of(node)
    if sharding is not None and _sharded_arguments(node, dimensions) == sharding.inputs:
        return sharding.output
    if is_call(node, *_ELEMENTWISE) and _agree(node, dimensions):
        return dimension
    if is_call(node, torch.transpose, torch.permute) and len(cut) == 1:
        return _order(node, cut[0]).index(dimension)
    if is_call(node, *_VIEWS) and dimension == 1 and _keeps_rows(node, cut[0]):
        return 1
    if is_call(node, torch.rms_norm) and dimension < _dims(cut[0]) - len(arguments(node)[1]) and len(cut) == 1:
        return dimension
    if is_call(node, *_ALONG_ONE) and _along(node, cut[0]) != dimension and len(set(map(dimensions.get, cut))) == 1:
        return dimension
    if is_call(node, torch.stack) and all(dimensions.get(value) == dimension for value in node.all_input_nodes):
        return dimension + (_along(node, cut[0]) <= dimension)
    if is_call(node, operator.getitem) and _leaves_whole(node, cut[0], dimension):
        return dimension
    raise PassError(
        f"Tensor parallelism cannot follow {_name(node)} at {node_source_line(node)}: dimension {dimension} of its input is "
        "sharded over the ranks; make a linear before it 'rowwise' in the tp_plan, or remove the linear before it from the plan."
    )


def _sharded_arguments(node: Node, dimensions: Mapping[Node, int]) -> dict[str, int]:
    """Of an op of ours, the arguments that are sharded, with their dimensions."""
    return {name: dimensions[value] for name, value in op_arguments(node).items() if isinstance(value, Node) and value in dimensions}


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _dims(node: Node) -> int:
    value = node.meta["example_value"]
    return (value[0] if isinstance(value, list | tuple) else value).dim()


def _agree(node: Node, dimensions: Mapping[Node, int]) -> bool:
    """Whether all operands are sharded along one dimension, counted from the right, or broadcast along it."""
    operands = [value for value in node.all_input_nodes if isinstance(value.meta["example_value"], torch.Tensor)]
    from_right = {dimensions[value] - _dims(value) for value in operands if value in dimensions}
    if len(from_right) != 1:
        return False
    at = from_right.pop()
    whole = [tensor_of(value) for value in operands if value not in dimensions]
    return all(tensor.dim() < -at or tensor.shape[at] == 1 for tensor in whole)


def _keeps_rows(node: Node, source: Node) -> bool:
    """Whether this views [T, X·E] as [T, X, E] or back, where dimension 1 is sharded before and after."""
    before, after = tensor_of(source), tensor_of(node)
    return after.dim() > 1 and str(before.shape[0]) == str(after.shape[0])


def _order(node: Node, source: Node) -> list[int]:
    """The source's dimensions in the result's order."""
    order = list(range(_dims(source)))
    if is_call(node, torch.transpose):
        _, first, second = arguments(node)
        order[first], order[second] = order[second], order[first]
        return order
    dims = arguments(node)[1]
    return [order[dim] for dim in (dims if isinstance(dims, list | tuple) else arguments(node)[1:])]


def _along(node: Node, source: Node) -> int:
    """The dimension argument of an op; of `torch.stack`, the new dimension."""
    positional = arguments(node)
    if is_call(node, torch.chunk, torch.split):
        dim: Any = positional[2] if len(positional) > 2 else 0
    else:
        dim = positional[1] if len(positional) > 1 else 0
    return dim % (_dims(source) + is_call(node, torch.stack))


def _leaves_whole(node: Node, source: Node, dimension: int) -> bool:
    """Whether an index keeps the sharded dimension: one of several results, selected rows, or a slice of another last dimension."""
    item = arguments(node)[1]
    if isinstance(source.meta["example_value"], list | tuple):
        return True
    if isinstance(item, Node):
        return dimension > 0
    return isinstance(item, tuple) and item[0] is Ellipsis and len(item) == 2 and dimension < _dims(source) - 1
