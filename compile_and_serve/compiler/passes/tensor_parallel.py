"""Shards the model's weights over tensor-parallel ranks, and inserts collectives where a whole value is needed.

    colwise   F.linear(x, W)       →  F.linear(x, rows of W)                                   the output is a shard
    rowwise   F.linear(shard, W)   →  all_reduce(F.linear(shard, columns of W))
              with `ColwiseParts`, for example queries, keys and values of one linear, a share of each part
    vocab     F.embedding(ids, W)  →  all_reduce(the rows that this rank has, zero for the others)
              F.linear(x, W)       →  all_gather(F.linear(x, rows of W))
    an op of ours                  →  as its `Sharding` says, for example the ranks' heads of attention
    shard + W (any such op)        →  shard + rows of W
    mean over a sharded dimension  →  all_reduce(mean of the shard) / ranks

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

from compile_and_serve.compiler.capture.capture import example_state
from compile_and_serve.compiler.compat import node_source_line
from compile_and_serve.compiler.passes import shard_functions as shard_functions  # registers them
from compile_and_serve.compiler.passes.shard_parameters import MadePlacements, part_constants, recompute, replace_by_rows, shard_parameter
from compile_and_serve.compiler.passes.shard_placement import (
    HEAD_VIEWS,
    Part,
    Placement,
    is_mean_over_shards,
    is_norm_over_shards,
    placement_of,
    sharding_of,
    whole_operands,
)
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassError,
    PassResult,
    SkipReason,
    arguments,
    is_call,
    is_split_point,
    op_arguments,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.transforms import depends_on_rank
from compile_and_serve.custom_ops.collectives.collectives import ALL_GATHER, ALL_REDUCE
from compile_and_serve.custom_ops.library import COLUMNS, ON_FIRST_RANK, ROWS, SHARE_OF_PARTS, Sharding
from compile_and_serve.custom_ops.mesh import TENSOR, AlongAxis, ColwiseParts
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import COLUMNS as STATE_COLUMNS

LARGEST_SIZE = 64  # in proposals of error messages


@dataclass(frozen=True, slots=True)
class _Share:
    """A part of a site's sharded dimension. units: its number of indivisible units: heads, or single rows or columns.

    shared_by_ranks: several ranks may have the same unit (a key/value head).
    """

    length: int
    units: int
    unit_name: str
    shared_by_ranks: bool = False

    def over(self, size: int) -> Part | None:
        """Shared by `size` ranks; None if it cannot be."""
        if self.units % size == 0:
            return Part(self.length, size)
        return Part(self.length, self.units) if self.shared_by_ranks and size % self.units == 0 else None


@dataclass(slots=True)
class _Site:
    """A linear, an embedding or an op of ours that the plan shards, and its weight, of an op of ours the first."""

    node: Node
    weight: Node
    style: str
    shares: tuple[_Share, ...]

    def misfit(self, size: int) -> _Share | None:
        """A part that `size` ranks cannot share."""
        return None if self.style == "vocab" else next((share for share in self.shares if share.over(size) is None), None)

    def parts(self, size: int) -> tuple[Part, ...]:
        """The parts of the sharded dimension, over `size` ranks."""
        return tuple(part for share in self.shares if (part := share.over(size)) is not None)


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
            _check_state(gm, ctx)
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


def _site(node: Node, weight: Node, style: str | ColwiseParts, shared_by_ranks: bool) -> _Site:
    possible: tuple[str | None, ...] = ("colwise", "rowwise", "vocab")
    sharding = sharding_of(node)
    if is_call(node, F.embedding) or sharding is not None:
        possible = ("vocab",) if sharding is None else (sharding.style,)
    if isinstance(style, ColwiseParts):
        return _parts_site(node, weight, style)
    if style not in possible:
        raise PassError(f"{weight_of(weight)} is {style!r} in the model's tp_plan: expected {' or '.join(map(repr, possible))}.")
    if sharding is not None:
        dimension, unit_name = sharding.units
        length = tensor_of(weight).shape[dimension]
        return _Site(node=node, weight=weight, style=style, shares=(_Share(length, length, unit_name),))
    rows, columns = tensor_of(weight).shape
    if style == "rowwise":
        return _Site(node=node, weight=weight, style=style, shares=(_Share(columns, columns, "columns"),))
    head_dim = _head_dim(node) if style == "colwise" else None
    if head_dim is None:
        return _Site(node=node, weight=weight, style=style, shares=(_Share(rows, rows, "rows"),))
    return _Site(node=node, weight=weight, style=style, shares=(_Share(rows, rows // head_dim, "heads", shared_by_ranks),))


def _parts_site(node: Node, weight: Node, style: ColwiseParts) -> _Site:
    rows = sum(part.rows for part in style.parts)
    if not is_call(node, F.linear) or rows != tensor_of(weight).shape[0]:
        raise PassError(f"{weight_of(weight)} has {tensor_of(weight).shape[0]} rows, but {rows} in parts in the model's tp_plan.")
    shares = tuple(_Share(part.rows, part.units, "heads", part.shared_by_ranks) for part in style.parts)
    return _Site(node=node, weight=weight, style="colwise", shares=shares)


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
    misfit = next((site for site in sites if site.misfit(size) is not None), None)
    if misfit is None:
        return
    share = misfit.misfit(size)
    assert share is not None
    fitting = [n for n in range(1, LARGEST_SIZE + 1) if all(site.misfit(n) is None for site in sites)]
    raise PassError(
        f"{weight_of(misfit.weight)} cannot be shared by {size} tensor-parallel ranks: it has {share.units} "
        f"{share.unit_name}, which {size} does not divide; sizes that fit this model: {', '.join(map(str, fitting))}."
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
        _shard_rows(site.weight, site, ctx)
    for node, site in sites.items():
        bias = _bias_of(node) if is_call(node, F.linear) else None
        if bias is None:
            continue
        if weight_of(bias) is None:
            raise PassError(f"{weight_of(site.weight)} cannot be sharded: its bias is computed, not a parameter.")
        if site.style == "rowwise":
            ctx.replace_weight(bias, ON_FIRST_RANK)
        else:
            _shard_rows(bias, site, ctx)


def _shard_rows(weight: Node, site: _Site, ctx: PassContext) -> None:
    size = ctx.mesh.tensor
    replace_by_rows(weight, (Part(0, size),) if site.style == "vocab" else site.parts(size), ctx)


def _first_row_name(site: _Site) -> str:
    return f"{weight_of(site.weight)}.first_row"


def _check_state(gm: GraphModule, ctx: PassContext) -> None:
    """Check that ops keep of each layer what its `LayerState.of_rank` gives a rank."""
    of_rank: dict[str, Mapping[str, torch.Tensor]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        group = node.meta.get("declaration")
        if isinstance(group, StateGroup):
            name = node.meta["input"]
            if group.name not in of_rank:
                of_rank[group.name] = example_state(group.of_rank(ctx.mesh), ctx.dtype)
            declared = of_rank[group.name][name].shape
            is_columns = name.endswith(STATE_COLUMNS)
            if tensor_of(node).shape[1 - is_columns :] != declared[1 - is_columns :]:
                raise PassError(
                    f"A rank keeps {list(declared)} of {name}, but the model's tp_plan gives its op {list(tensor_of(node).shape)}: "
                    "this model runs with a tensor parallel size of 1."
                )


def _rewrite(gm: GraphModule, sites: Mapping[Node, _Site], ctx: PassContext) -> None:
    """Go through the graph in order: propagate the shards' shapes, and insert collectives after sites with partial values."""
    placements: MadePlacements = {}
    done: set[Node] = set()
    for node in list(gm.graph.nodes):
        if node.op == "placeholder":
            continue
        if node.op == "output":
            if any(value in placements for value in node.all_input_nodes):
                raise PassError("The model's result would be a shard: its last linear needs 'vocab' or 'rowwise' in the tp_plan.")
            return
        sharding = sharding_of(node)
        if node in sites and sharding is None:
            _rewrite_site(gm, sites[node], placements, ctx)
        elif is_mean_over_shards(node, placements):
            recompute(node, ctx)
            _average_over_ranks(gm, node, ctx)
        elif is_norm_over_shards(node, placements):
            _normalize_shards(gm, node, placements, done, ctx)
        else:
            _rewrite_op(gm, node, sharding, placements, done, ctx, is_site=node in sites)
        done.add(node)


def _rewrite_op(
    gm: GraphModule, node: Node, sharding: Sharding | None, placements: MadePlacements, done: set[Node], ctx: PassContext, *, is_site: bool
) -> None:
    is_sharded = is_site or any(value in placements for value in node.all_input_nodes)
    for operand, wanted in whole_operands(node, placements):
        shard_parameter(operand, wanted, placements, done, ctx)
    placement, before = placement_of(node, placements), node.meta["example_value"]
    if sharding is not None and is_sharded:
        _shard_operands(node, sharding, placements, done, ctx)
    elif sharding is not None and sharding.must_shard:
        raise PassError(_whole_attention(node_source_line(node)))
    recompute(node, ctx)
    if placement is not None:
        _check_others_kept(node, before, placement)
        placements[node] = placement
        if is_split_point(node) and isinstance(placement, Placement) and len(placement.parts) > 1:
            node.meta["shares"] = SHARE_OF_PARTS, part_constants(placement.parts, ctx)
    elif sharding is not None and is_sharded:
        _insert_after(gm, node, ALL_REDUCE, (TENSOR,), ctx)


def _average_over_ranks(gm: GraphModule, node: Node, ctx: PassContext) -> Node:
    """The mean of equal shares is the mean of their means."""
    whole = _insert_after(gm, node, ALL_REDUCE, (TENSOR,), ctx)
    return _insert_after(gm, whole, torch.mul, (1 / ctx.mesh.tensor,), ctx)


def _normalize_shards(gm: GraphModule, node: Node, placements: MadePlacements, done: set[Node], ctx: PassContext) -> None:
    """rms_norm(x, [D], weight, eps) → weight · x · rsqrt(mean of x² over all ranks + eps), in float32."""
    x, _, weight, eps = (*arguments(node), None, None)[:4]
    placement = placements[x]
    assert isinstance(placement, Placement)
    dtype = tensor_of(node).dtype
    with gm.graph.inserting_before(node):
        wide = x if dtype == torch.float32 else ctx.call(gm, torch.Tensor.to, x, torch.float32, origin=node)
        mean = ctx.call(gm, torch.mean, ctx.call(gm, torch.square, wide, origin=node), -1, True, origin=node)
        whole = ctx.call(gm, ALL_REDUCE, mean, TENSOR, origin=node)
        variance = ctx.call(gm, torch.mul, whole, 1 / ctx.mesh.tensor, origin=node)
        variance = ctx.call(gm, torch.add, variance, torch.finfo(dtype).eps if eps is None else eps, origin=node)
        normed = ctx.call(gm, torch.mul, wide, ctx.call(gm, torch.rsqrt, variance, origin=node), origin=node)
        if weight is not None:
            if weight not in placements and not shard_parameter(weight, Placement(0, placement.parts), placements, done, ctx):
                raise PassError(
                    f"Tensor parallelism cannot shard the weight of {node_source_line(node)}: it is not a parameter of its own."
                )
            normed = ctx.call(gm, torch.mul, normed, weight, origin=node)
        if dtype != torch.float32:
            normed = ctx.call(gm, torch.Tensor.to, normed, dtype, origin=node)
    node.replace_all_uses_with(normed)
    gm.graph.erase_node(node)
    placements[normed] = placement


def _whole_attention(place: str) -> str:
    return (
        f"The model's tp_plan does not shard the attention of {place}, but each rank has only its own heads: "
        "this model runs with a tensor parallel size of 1."
    )


def _check_others_kept(node: Node, before: Any, placement: Placement | tuple[Placement, ...]) -> None:
    """Check that only the sharded dimension is smaller: `view(T, heads, -1)` would shard the heads' size instead of their number."""
    if not isinstance(before, torch.Tensor):
        return
    assert isinstance(placement, Placement)
    expected = [placement.local if i == placement.dimension else size for i, size in enumerate(before.shape)]
    if [str(size) for size in expected] != [str(size) for size in tensor_of(node).shape]:
        raise PassError(f"{node_source_line(node)} does not run on a shard: should a constant size be -1, or is -1 at the wrong position?")


def _rewrite_site(gm: GraphModule, site: _Site, placements: MadePlacements, ctx: PassContext) -> None:
    node, size = site.node, ctx.mesh.tensor
    if is_call(node, F.embedding):
        _look_up_own_rows(gm, site, ctx)
        return
    x = node.args[0]
    assert isinstance(x, Node)
    placement = placements.get(x)
    is_cut = isinstance(placement, Placement) and placement.dimension == tensor_of(x).dim() - 1
    if is_cut != (site.style == "rowwise"):
        what = "a shard, but only 'rowwise' takes a shard" if is_cut else "whole, but 'rowwise' takes a shard"
        raise PassError(f"{weight_of(site.weight)} is {site.style!r} in the model's tp_plan, and its input is {what}.")
    whole_columns = tensor_of(node).shape[-1]
    recompute(node, ctx)
    if site.style == "colwise":
        placements[node] = Placement(tensor_of(node).dim() - 1, site.parts(size))
    elif site.style == "rowwise":
        _insert_after(gm, node, ALL_REDUCE, (TENSOR,), ctx)
    else:
        _insert_after(gm, node, ALL_GATHER, (size, whole_columns, TENSOR), ctx)


def _insert_after(gm: GraphModule, node: Node, op: Any, constants: tuple[int | float | str, ...], ctx: PassContext) -> Node:
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
    recompute(node, ctx)
    users = list(node.users)
    with gm.graph.inserting_after(node):
        part = ctx.call(gm, torch.where, is_own_column, node, 0.0, origin=node)
    with gm.graph.inserting_after(part):
        whole = ctx.call(gm, ALL_REDUCE, part, TENSOR, origin=node)
    for user in users:
        user.replace_input_with(node, whole)


def _shard_operands(node: Node, sharding: Sharding, placements: MadePlacements, done: set[Node], ctx: PassContext) -> None:
    """Give each rank its share of an op's weights and state."""
    size, operands = ctx.mesh.tensor, op_arguments(node)
    constants = {ROWS: (size, size), ON_FIRST_RANK: ()}
    functions = sharding.weights if sharding.weights_of is None else sharding.weights_of(operands)
    for name, function in functions.items():
        weight = operands[name]
        if weight is None:
            continue
        if function == SHARE_OF_PARTS:
            like = placements[operands[next(iter(sharding.inputs))]]
            assert isinstance(like, Placement)
            if weight not in placements and not shard_parameter(weight, Placement(0, like.parts), placements, done, ctx):
                raise PassError(f"Tensor parallelism cannot shard the {name} of {node_source_line(node)} by its rows.")
            continue
        parameter = weight_of(weight)
        if parameter is None:
            raise PassError(f"Tensor parallelism cannot shard the {name} of {node_source_line(node)}: it is computed, not a parameter.")
        if not depends_on_rank(ctx.weights[parameter].expression):
            ctx.replace_weight(weight, function, *constants.get(function, (size,)))
    for name, (dimension, source) in sharding.state.items():
        placement = placements[operands[source]]
        assert isinstance(placement, Placement)
        _shard_state(operands[name], dimension, placement.parts, ctx)


def _shard_state(tensor: Node, dimension: int, parts: Sequence[Part], ctx: PassContext) -> None:
    shape = list(tensor_of(tensor).shape)
    together = sum(part.length for part in parts) // shape[dimension]  # of the input's entries, for one of the state
    if any(part.local % together for part in parts):
        raise PassError(f"Tensor parallelism cannot share {tensor.meta['input']}: it keeps {together} channels together.")
    shares = [Part(part.length // together, part.shares) for part in parts]
    shape[dimension] = sum(part.local for part in shares)
    if len(shares) > 1:
        tensor.meta["shares"] = SHARE_OF_PARTS, part_constants(shares, ctx)
    with ctx.fake_mode:
        tensor.meta["example_value"] = torch.empty(shape, dtype=tensor_of(tensor).dtype, device="meta")
