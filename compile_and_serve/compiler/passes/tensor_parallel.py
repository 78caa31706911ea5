"""Shards the model's weights over tensor-parallel ranks, and inserts collectives where a whole value is needed.

    colwise   F.linear(x, W)       →  F.linear(x, rows of W)                                   the output is a shard
    rowwise   F.linear(shard, W)   →  all_reduce(F.linear(shard, columns of W))
    vocab     F.embedding(ids, W)  →  all_reduce(the rows that this rank has, zero for the others)
              F.linear(x, W)       →  all_gather(F.linear(x, rows of W))
    an op of ours                  →  as its `Sharding` says, for example the ranks' heads of attention

The graph is the same for every rank. A rank's rows and columns are selected when its weights are loaded (Megatron-LM's scheme,
arXiv:1909.08053). The plan is the model's `tp_plan`; a linear or embedding that is "replicated" or not named stays whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import node_source_line
from compile_and_serve.compiler.passes.shard_placement import HEAD_VIEWS, sharded_dimension, sharding_of
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassError,
    PassResult,
    SkipReason,
    is_call,
    op_arguments,
    set_example_value,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.transforms import depends_on_rank
from compile_and_serve.custom_ops.collectives.collectives import ALL_GATHER, ALL_REDUCE
from compile_and_serve.custom_ops.library import COLUMNS, EXPERT_COLUMNS, EXPERT_ROWS, ON_FIRST_RANK, ROWS, Sharding
from compile_and_serve.custom_ops.mesh import TENSOR, AlongAxis
from compile_and_serve.custom_ops.weight_functions import weight_function

LARGEST_SIZE = 64  # in proposals of error messages


@weight_function(ROWS, axis=TENSOR, selects="rows")
def shard_rows(weight: torch.Tensor, parts: int, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part of `parts` equal parts along dimension 0. size / parts consecutive ranks have the same part.

    If `parts` does not divide the rows, the last parts are padded with zeros. [O, …] → [ceil(O / parts), …]
    """
    rows, part = -(-weight.shape[0] // parts), rank * parts // size
    shard = weight[part * rows : (part + 1) * rows]
    missing = rows - shard.shape[0]
    return F.pad(shard, (0, 0) * (weight.dim() - 1) + (0, missing)) if missing else shard


@weight_function(COLUMNS, axis=TENSOR, selects="columns")
def shard_columns(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part along dimension 1. [O, I] → [O, I / size]"""
    columns = weight.shape[1] // size
    return weight[:, rank * columns : (rank + 1) * columns]


@weight_function(EXPERT_ROWS, axis=TENSOR, selects="rows")
def shard_expert_rows(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's gate and up: [X, 2F, …] → [X, 2F / size, …]"""
    halves = weight.unflatten(1, (2, -1))
    rows = halves.shape[2] // size
    return halves[:, :, rank * rows : (rank + 1) * rows].flatten(1, 2)


@weight_function(EXPERT_COLUMNS, axis=TENSOR, selects="columns")
def shard_expert_columns(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's down: [X, D, F] → [X, D, F / size]"""
    columns = weight.shape[2] // size
    return weight[:, :, rank * columns : (rank + 1) * columns]


@weight_function("first_row", axis=TENSOR)
def first_row(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """The first row of a rank's part of `shard_rows(weight, size, size)`. → int64 [1]"""
    return torch.full((1,), rank * -(-weight.shape[0] // size), dtype=torch.int64, device=weight.device)


@weight_function(ON_FIRST_RANK, axis=TENSOR)
def on_first_rank(bias: torch.Tensor, *, rank: int) -> torch.Tensor:
    """The bias on rank 0, zeros on other ranks, so that the sum over ranks is the bias."""
    return bias if rank == 0 else torch.zeros_like(bias)


@dataclass(slots=True)
class _Site:
    """A linear, an embedding or an op of ours that the plan shards, and its weight, of an op of ours the first.

    units: number of indivisible units of the sharded dimension: heads, or single rows or columns.
    shared_by_ranks: several ranks may have the same unit (a key/value head).
    """

    node: Node
    weight: Node
    style: str
    units: int
    unit_name: str
    shared_by_ranks: bool = False

    def parts(self, size: int) -> int | None:
        """Number of different shards over `size` ranks; None if it cannot be sharded."""
        if self.style == "vocab" or self.units % size == 0:
            return size
        return self.units if self.shared_by_ranks and size % self.units == 0 else None


class TensorParallel(BasePass):
    name = "tensor_parallel"
    required = True  # ranks with shards cannot run the original graph

    def guard(self, ctx: PassContext) -> SkipReason | None:
        return SkipReason(sentence="the model runs on one rank") if ctx.mesh.tensor == 1 else None

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        sites, near_misses = _find_sites(gm, ctx)
        _check_sizes(list(sites.values()), ctx.mesh.tensor)
        if sites:
            _shard_weights(gm, sites, ctx)
            _rewrite(gm, sites, ctx)
        elif near_misses and not ctx.tp_plan:
            raise PassError(_whole_attention("any layer"))
        return PassResult(matched=len(sites), near_misses=tuple(near_misses))


def _find_sites(gm: GraphModule, ctx: PassContext) -> tuple[dict[Node, _Site], list[NearMiss]]:
    sites: dict[Node, _Site] = {}
    near_misses = []
    keys_and_values = _keys_and_values(gm)
    for node in gm.graph.nodes:
        sharding = sharding_of(node)
        if is_call(node, F.linear, F.embedding):
            weight = node.args[1]
        elif sharding is not None and sharding.style is not None:
            weight = op_arguments(node)[next(iter(sharding.weights))]
        else:
            continue
        name = weight_of(weight)
        if name is None or not isinstance(weight, Node):
            near_misses.append(NearMiss.at(node, "its weight is computed, not a parameter: every rank computes all of it"))
            continue
        if depends_on_rank(ctx.weights[name].expression):
            continue  # sharded already
        module = name.rpartition(".")[0]
        style = next((style for pattern, style in ctx.tp_plan.items() if fnmatchcase(module, pattern)), None)
        if isinstance(style, AlongAxis):
            continue  # the weight is another pass's
        if style is None:
            near_misses.append(NearMiss.at(node, f"the model's tp_plan has no {module}: its weight is whole on every rank"))
            continue
        if style != "replicated":
            sites[node] = _site(node, weight, style, node in keys_and_values)
    for site in sites.values():
        others = [user for user in site.weight.users if user not in sites]
        if others:
            where = node_source_line(others[0])
            raise PassError(f"{weight_of(site.weight)} cannot be sharded: it is also used at {where}.")
    return sites, near_misses


def _site(node: Node, weight: Node, style: str, shared_by_ranks: bool) -> _Site:
    possible: tuple[str | None, ...] = ("colwise", "rowwise", "vocab")
    sharding = sharding_of(node)
    if is_call(node, F.embedding) or sharding is not None:
        possible = ("vocab",) if sharding is None else (sharding.style,)
    if style not in possible:
        raise PassError(f"{weight_of(weight)} is {style!r} in the model's tp_plan: expected {' or '.join(map(repr, possible))}.")
    if sharding is not None:
        dimension, unit_name = sharding.units
        return _Site(node=node, weight=weight, style=style, units=tensor_of(weight).shape[dimension], unit_name=unit_name)
    rows, columns = tensor_of(weight).shape
    if style == "rowwise":
        return _Site(node=node, weight=weight, style=style, units=columns, unit_name="columns")
    head_dim = _head_dim(node) if style == "colwise" else None
    if head_dim is None:
        return _Site(node=node, weight=weight, style=style, units=rows, unit_name="rows")
    return _Site(node=node, weight=weight, style=style, units=rows // head_dim, unit_name="heads", shared_by_ranks=shared_by_ranks)


def _head_dim(linear: Node) -> int | None:
    """E if the output is viewed as [T, heads, E], else None."""
    views = [user for user in linear.users if is_call(user, *HEAD_VIEWS) and tensor_of(user).dim() == 3]
    return tensor_of(views[0]).shape[2] if views else None


def _keys_and_values(gm: GraphModule) -> set[Node]:
    """The linears that compute inputs whose heads several ranks may share."""
    found = set()
    for node in gm.graph.nodes:
        sharding, operands = sharding_of(node), op_arguments(node)
        pending = [] if sharding is None else [operands[name] for name in sharding.shared_inputs]
        while pending:
            current = pending.pop()
            if is_call(current, F.linear):
                found.add(current)
            else:
                pending += current.all_input_nodes
    return found


def _check_sizes(sites: Sequence[_Site], size: int) -> None:
    misfit = next((site for site in sites if site.parts(size) is None), None)
    if misfit is None:
        return
    fitting = [n for n in range(1, LARGEST_SIZE + 1) if all(site.parts(n) is not None for site in sites)]
    raise PassError(
        f"{weight_of(misfit.weight)} cannot be shared by {size} tensor-parallel ranks: it has {misfit.units} "
        f"{misfit.unit_name}, which {size} does not divide; sizes that fit this model: {', '.join(map(str, fitting))}."
    )


def _bias_of(node: Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _shard_weights(gm: GraphModule, sites: Mapping[Node, _Site], ctx: PassContext) -> None:
    """Replace the weights' placeholders by one rank's part."""
    size = ctx.mesh.tensor
    for site in {site.weight: site for site in sites.values()}.values():
        if sharding_of(site.node) is not None:
            continue
        if site.style == "rowwise":
            ctx.replace_weight(site.weight, COLUMNS, size)
            continue
        if site.style == "vocab":  # before the weight is sharded
            ctx.derived_weight(gm, _first_row_name(site), "first_row", site.weight, size)
        ctx.replace_weight(site.weight, ROWS, site.parts(size) or size, size)
    for node, site in sites.items():
        bias = _bias_of(node) if is_call(node, F.linear) else None
        if bias is None:
            continue
        if weight_of(bias) is None:
            raise PassError(f"{weight_of(site.weight)} cannot be sharded: its bias is computed, not a parameter.")
        if site.style == "rowwise":
            ctx.replace_weight(bias, ON_FIRST_RANK)
        else:
            ctx.replace_weight(bias, ROWS, site.parts(size) or size, size)


def _first_row_name(site: _Site) -> str:
    return f"{weight_of(site.weight)}.first_row"


def _rewrite(gm: GraphModule, sites: Mapping[Node, _Site], ctx: PassContext) -> None:
    """Go through the graph in order: propagate the shards' shapes, and insert collectives after sites with partial values."""
    dimensions: dict[Node, int] = {}  # sharded dimension of the values that differ between ranks
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            continue
        if node.op == "output":
            if any(value in dimensions for value in node.all_input_nodes):
                raise PassError("The model's result would be a shard: its last linear needs 'vocab' or 'rowwise' in the tp_plan.")
            return
        sharding = sharding_of(node)
        if node in sites and sharding is None:
            _rewrite_site(gm, sites[node], dimensions, ctx)
            continue
        dimension, before = sharded_dimension(node, dimensions), node.meta["example_value"]
        is_sharded = node in sites or any(value in dimensions for value in node.all_input_nodes)
        if sharding is not None and is_sharded:
            dimension = sharding.output
            _shard_operands(node, sharding, ctx)
        elif sharding is not None and sharding.must_shard:
            raise PassError(_whole_attention(node_source_line(node)))
        _recompute(node, ctx)
        if dimension is not None:
            _check_others_kept(node, before, dimension)
            dimensions[node] = dimension
        elif sharding is not None and is_sharded:
            _insert_after(gm, node, ALL_REDUCE, (TENSOR,), ctx)


def _whole_attention(place: str) -> str:
    return (
        f"The model's tp_plan does not shard the attention of {place}, but each rank has only its own heads: "
        "this model runs with a tensor parallel size of 1."
    )


def _check_others_kept(node: Node, before: Any, dimension: int) -> None:
    """Check that only the sharded dimension is smaller: `view(T, heads, -1)` would shard the heads' size instead of their number."""
    if not isinstance(before, torch.Tensor):
        return
    sizes = zip(map(str, before.shape), map(str, tensor_of(node).shape), strict=True)
    if any(old != new for i, (old, new) in enumerate(sizes) if i != dimension % before.dim()):
        raise PassError(f"{node_source_line(node)} does not run on a shard: should a constant size be -1, or is -1 at the wrong position?")


def _recompute(node: Node, ctx: PassContext) -> None:
    try:
        set_example_value(node, ctx.fake_mode)
    except (RuntimeError, TypeError, ValueError) as error:  # torch's errors for sizes that do not match
        reason = str(error).splitlines()[0]
        raise PassError(f"{node_source_line(node)} does not run on a shard ({reason}): should a constant size be -1?") from error


def _rewrite_site(gm: GraphModule, site: _Site, dimensions: dict[Node, int], ctx: PassContext) -> None:
    node, size = site.node, ctx.mesh.tensor
    if is_call(node, F.embedding):
        _look_up_own_rows(gm, site, ctx)
        return
    x = node.args[0]
    assert isinstance(x, Node)
    is_cut = dimensions.get(x) == tensor_of(x).dim() - 1
    if is_cut != (site.style == "rowwise"):
        what = "a shard, but only 'rowwise' takes a shard" if is_cut else "whole, but 'rowwise' takes a shard"
        raise PassError(f"{weight_of(site.weight)} is {site.style!r} in the model's tp_plan, and its input is {what}.")
    whole_columns = tensor_of(node).shape[-1]
    _recompute(node, ctx)
    if site.style == "colwise":
        dimensions[node] = tensor_of(node).dim() - 1
    elif site.style == "rowwise":
        _insert_after(gm, node, ALL_REDUCE, (TENSOR,), ctx)
    else:
        _insert_after(gm, node, ALL_GATHER, (size, whole_columns, TENSOR), ctx)


def _insert_after(gm: GraphModule, node: Node, op: Any, constants: tuple[int | str, ...], ctx: PassContext) -> Node:
    users = list(node.users)
    with gm.graph.inserting_after(node):
        whole = ctx.call(gm, op, node, *constants, origin=node)
    for user in users:
        user.replace_input_with(node, whole)
    return whole


def _look_up_own_rows(gm: GraphModule, site: _Site, ctx: PassContext) -> None:
    node, ids = site.node, site.node.args[0]
    begin = ctx.derived_weight(gm, _first_row_name(site), "first_row", site.weight, ctx.mesh.tensor)
    with gm.graph.inserting_before(node):
        row = ctx.call(gm, torch.sub, ids, begin, origin=node)
        is_low = ctx.call(gm, torch.ge, row, 0, origin=node)
        is_high = ctx.call(gm, torch.lt, row, tensor_of(site.weight).shape[0], origin=node)
        is_own = ctx.call(gm, torch.logical_and, is_low, is_high, origin=node)
        own_row = ctx.call(gm, torch.where, is_own, row, 0, origin=node)
        is_own_column = ctx.call(gm, torch.unsqueeze, is_own, -1, origin=node)
    node.args = (own_row, *node.args[1:])
    _recompute(node, ctx)
    users = list(node.users)
    with gm.graph.inserting_after(node):
        part = ctx.call(gm, torch.where, is_own_column, node, 0.0, origin=node)
    with gm.graph.inserting_after(part):
        whole = ctx.call(gm, ALL_REDUCE, part, TENSOR, origin=node)
    for user in users:
        user.replace_input_with(node, whole)


def _shard_operands(node: Node, sharding: Sharding, ctx: PassContext) -> None:
    """Give each rank its share of an op's weights and state."""
    size, operands = ctx.mesh.tensor, op_arguments(node)
    constants = {ROWS: (size, size), ON_FIRST_RANK: ()}
    for name, function in sharding.weights.items():
        weight = operands[name]
        if weight is None:
            continue
        parameter = weight_of(weight)
        if parameter is None:
            raise PassError(f"Tensor parallelism cannot shard the {name} of {node_source_line(node)}: it is computed, not a parameter.")
        if not depends_on_rank(ctx.weights[parameter].expression):
            ctx.replace_weight(weight, function, *constants.get(function, (size,)))
    for name, (dimension, source) in sharding.state.items():
        shape = list(tensor_of(operands[name]).shape)
        shape[dimension] = tensor_of(operands[source]).shape[sharding.inputs[source]]
        with ctx.fake_mode:
            operands[name].meta["example_value"] = torch.empty(shape, dtype=tensor_of(operands[name]).dtype, device="meta")
