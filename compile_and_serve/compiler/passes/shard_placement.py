"""How a value is sharded over ranks, through the ops between a colwise and a rowwise linear.

A sharded dimension may be of several parts behind one another, such as queries, keys and values. A rank then has its share of each.

An op that would combine values of different ranks, or that is not known here, is an error with its source line. Otherwise, for example, a
sum over a sharded dimension would silently be wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    torch.exp,
    torch.rsqrt,
    torch.sigmoid,
    torch.tanh,
    torch.relu,
    torch.square,
    torch.clamp,
    torch.clone,
    F.silu,
    F.gelu,
    F.relu,
    F.softplus,
    torch.Tensor.to,
    torch.Tensor.contiguous,
)
_VIEWS = (*HEAD_VIEWS, torch.flatten)
_ALONG_ONE = (torch.chunk, torch.split, torch.cat, torch.softmax, F.softmax)
_SIZE = torch.ops.aten.sym_size.int


class Part(NamedTuple):
    """A part of a sharded dimension: its length on one rank alone, and the number of different shares; ranks beyond that share them."""

    length: int
    shares: int

    @property
    def local(self) -> int:
        """Its length on each rank."""
        return self.length // self.shares


@dataclass(frozen=True, slots=True)
class Placement:
    """The sharded dimension (≥ 0) of a value, and what lies along it."""

    dimension: int
    parts: tuple[Part, ...]

    @property
    def local(self) -> int:
        """The length of the dimension on each rank."""
        return sum(part.local for part in self.parts)


# Of a node whose value is a list, one for each entry.
Placements = Mapping[Node, Placement | tuple[Placement, ...]]


def sharding_of(node: Node) -> Sharding | None:
    """How an op of ours is sharded; None for anything else."""
    info = op_info(node.target)
    return None if info is None else info.sharding


def is_elementwise(node: Node) -> bool:
    return is_call(node, *_ELEMENTWISE)


def is_mean_over_shards(node: Node, placements: Placements) -> bool:
    """Whether this is the mean over a sharded dimension, of which each rank computes the mean of its share."""
    if not is_call(node, torch.mean) or node.args[0] not in placements:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    placement = placements[source]
    return isinstance(placement, Placement) and _reduced(node, source) == [placement.dimension]


def is_norm_over_shards(node: Node, placements: Placements) -> bool:
    """Whether this is an RMSNorm over a sharded last dimension."""
    source = node.args[0] if node.args else None
    if not is_call(node, torch.rms_norm) or not isinstance(source, Node):
        return False
    placement = placements.get(source)
    return isinstance(placement, Placement) and placement.dimension == _dims(source) - 1 and len(arguments(node)[1]) == 1


def placement_of(node: Node, placements: Placements) -> Placement | tuple[Placement, ...] | None:
    """The placement of `node`'s value; None: every rank has the whole value, or a part of a sum.

    placements: of earlier sharded nodes, whose `example_value` has the shard's shape. The node's own is that of the whole value. Sizes in
    the arguments of a split become those of a shard. Raises `PassError`.
    """
    cut = [value for value in node.all_input_nodes if value in placements]
    if not cut or is_call(node, _SIZE):
        return None
    first = placements[cut[0]]
    if isinstance(first, tuple):
        index = arguments(node)[1] if is_call(node, operator.getitem) else None
        if not isinstance(index, int):
            raise _cannot_follow(node, first[0])
        return first[index]
    sharding = sharding_of(node)
    if sharding is not None:
        inputs = _placed_inputs(node, sharding, placements)
        if inputs is None:
            raise _cannot_follow(node, first)
        return None if sharding.output is None else replace(inputs[0], dimension=sharding.output % _dims(node))
    placement = _of_op(node, cut, first, placements)
    if placement is None:
        raise _cannot_follow(node, first)
    return placement


def _cannot_follow(node: Node, placement: Placement) -> PassError:
    return PassError(
        f"Tensor parallelism cannot follow {_name(node)} at {node_source_line(node)}: dimension {placement.dimension} of its input is "
        "sharded over the ranks; make a linear before it 'rowwise' in the tp_plan, or remove the linear before it from the plan."
    )


def _placed_inputs(node: Node, sharding: Sharding, placements: Placements) -> list[Placement] | None:
    """The placements of the inputs that an op of ours says are sharded, in its order; None: not all of them are, or others."""
    operands = op_arguments(node)
    expected = {name: dimension % _dims(x) for name, dimension in sharding.inputs.items() if isinstance(x := operands[name], Node)}
    found = {
        name: placements[x] for name, x in operands.items() if name not in sharding.weights and isinstance(x, Node) and x in placements
    }
    if {name: one.dimension for name, one in found.items() if isinstance(one, Placement)} != expected:
        return None
    return [one for name in expected if isinstance(one := found[name], Placement)]


def _of_op(node: Node, cut: Sequence[Node], first: Placement, placements: Placements) -> Placement | tuple[Placement, ...] | None:
    dimension, source = first.dimension, cut[0]
    alike = all(placements[value] == first for value in cut)
    if is_elementwise(node) and _agree(node, placements):
        return replace(first, dimension=dimension + _dims(node) - _dims(source))
    if is_call(node, torch.transpose, torch.permute) and len(cut) == 1:
        return replace(first, dimension=_order(node, source).index(dimension))
    if is_call(node, *_VIEWS) and dimension == 1 and _keeps_rows(node, source):
        return _viewed(node, first)
    if is_call(node, torch.squeeze, torch.unsqueeze) and len(arguments(node)) > 1:
        return replace(first, dimension=_with_or_without_one(node, source, dimension))
    if is_call(node, torch.rms_norm) and dimension < _dims(source) - len(arguments(node)[1]) and len(cut) == 1:
        return first
    if is_call(node, torch.sum, torch.mean) and _dims(node) == _dims(source) and dimension not in (_reduced(node, source) or [dimension]):
        return first
    if is_call(node, *_ALONG_ONE):
        if _along(node, source) != dimension and alike:
            return first
        if is_call(node, torch.cat) and _along(node, source) == dimension:
            return _joined(node, placements)
        if is_call(node, torch.chunk, torch.split) and _along(node, source) == dimension:
            return _divided(node, first)
    if is_call(node, torch.stack) and all(placements.get(value) == first for value in node.all_input_nodes):
        return replace(first, dimension=dimension + (_along(node, source) <= dimension))
    if is_call(node, operator.getitem):
        kept = _indexed_dimension(node, source, dimension)
        return None if kept is None else replace(first, dimension=kept)
    return None


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def _dims(node: Node) -> int:
    value = node.meta["example_value"]
    return (value[0] if isinstance(value, list | tuple) else value).dim()


def _agree(node: Node, placements: Placements) -> bool:
    """Whether all operands are sharded alike along one dimension, counted from the right, or broadcast along it."""
    operands = [value for value in node.all_input_nodes if isinstance(value.meta["example_value"], torch.Tensor)]
    from_right = {(one.dimension - _dims(v), one.parts) for v in operands if isinstance(one := placements.get(v), Placement)}
    if len(from_right) != 1:
        return False
    at, _ = from_right.pop()
    whole = [tensor_of(value) for value in operands if value not in placements]
    return all(tensor.dim() < -at or tensor.shape[at] == 1 for tensor in whole)


def whole_operands(node: Node, placements: Placements) -> list[tuple[Node, Placement]]:
    """Of an elementwise op over shards, the operands that every rank has whole, with the placement that their shares would have."""
    cut = [value for value in node.all_input_nodes if value in placements]
    if not cut or not is_elementwise(node):
        return []
    first = placements[cut[0]]
    assert isinstance(first, Placement)
    at = first.dimension - _dims(cut[0])
    found = []
    for value in node.all_input_nodes:
        tensor = value.meta["example_value"]
        if isinstance(tensor, torch.Tensor) and value not in placements and tensor.dim() >= -at and tensor.shape[at] != 1:
            found.append((value, replace(first, dimension=tensor.dim() + at)))
    return found


def _viewed(node: Node, source: Placement) -> Placement | None:
    """Of [T, X·E] as [T, X, E], or back."""
    if len(source.parts) != 1:
        return None
    length, shares = tensor_of(node).shape[1], source.parts[0].shares
    return replace(source, parts=(Part(length, shares),)) if length % shares == 0 else None


def _joined(node: Node, placements: Placements) -> Placement | None:
    joined = [placements.get(value) for value in node.all_input_nodes]
    dimension = next(one.dimension for one in joined if isinstance(one, Placement))
    parts: list[Part] = []
    for one in joined:
        if not isinstance(one, Placement) or one.dimension != dimension:
            return None
        parts += one.parts
    return Placement(dimension, tuple(parts))


def _divided(node: Node, source: Placement) -> tuple[Placement, ...] | None:
    """Of a split between parts, whose sizes are made those of a shard."""
    lengths = [one.shape[source.dimension] for one in node.meta["example_value"]]
    remaining, found = list(source.parts), []
    for length in lengths:
        parts: list[Part] = []
        while remaining and sum(part.length for part in parts) < length:
            parts.append(remaining.pop(0))
        if sum(part.length for part in parts) != length:
            return None
        found.append(Placement(source.dimension, tuple(parts)))
    if is_call(node, torch.split):
        node.args = (node.args[0], [one.local for one in found], *node.args[2:])
    elif len({one.local for one in found}) > 1:
        return None
    return tuple(found)


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


def _with_or_without_one(node: Node, source: Node, dimension: int) -> int:
    """Where the sharded dimension lies once a dimension of length 1 was added or removed."""
    is_new = is_call(node, torch.unsqueeze)
    at = arguments(node)[1] % (_dims(source) + is_new)
    return dimension + is_new if at <= dimension and is_new else dimension - (at < dimension and not is_new)


def _reduced(node: Node, source: Node) -> list[int] | None:
    """The dimensions that a sum or mean is over; None: all."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if dims is None:
        return None
    listed: Any = dims if isinstance(dims, list | tuple) else [dims]
    return [dim % _dims(source) for dim in listed]


def _along(node: Node, source: Node) -> int:
    """The dimension argument of an op; of `torch.stack`, the new dimension."""
    positional = arguments(node)
    if is_call(node, torch.chunk, torch.split):
        dim: Any = positional[2] if len(positional) > 2 else 0
    else:
        dim = positional[1] if len(positional) > 1 else 0
    return dim % (_dims(source) + is_call(node, torch.stack))


def _indexed_dimension(node: Node, source: Node, dimension: int) -> int | None:
    """Where an index leaves the sharded dimension: one of several results, selected rows, new dimensions, or a slice of another last
    dimension. None: it does not.
    """
    item = arguments(node)[1]
    if isinstance(source.meta["example_value"], list | tuple):
        return dimension
    if isinstance(item, Node):
        return dimension if dimension > 0 else None
    if not isinstance(item, tuple):
        return None
    if len(item) == 2 and item[0] is Ellipsis:
        return dimension if dimension < _dims(source) - 1 else None
    if not all(one is None or one == slice(None) for one in item):
        return None
    kept = [place for place, one in enumerate((*item, *[slice(None)] * _dims(source))) if one is not None]
    return kept[dimension]
