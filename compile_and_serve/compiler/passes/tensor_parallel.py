"""Shards the model's weights over tensor-parallel ranks, and inserts collectives where a whole value is needed.

    colwise   F.linear(x, W)       →  F.linear(x, rows of W)                                   the output is a shard
    rowwise   F.linear(shard, W)   →  all_reduce(F.linear(shard, columns of W))
    vocab     F.embedding(ids, W)  →  all_reduce(the rows that this rank has, zero for the others)
              F.linear(x, W)       →  all_gather(F.linear(x, rows of W))
    experts   experts(x, …)        →  all_reduce(experts(x, … with this rank's features of each expert))

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

import compile_and_serve.custom_ops.moe.experts  # noqa: F401 (defines the op)
from compile_and_serve.compiler.compat import node_source_line
from compile_and_serve.compiler.passes.shard_placement import ATTENTION, HEAD_VIEWS, MLA_ATTENTION, sharded_dimension
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassError,
    PassResult,
    SkipReason,
    arguments,
    is_call,
    set_example_value,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.transforms import depends_on_rank, weight_function
from compile_and_serve.custom_ops.collectives.collectives import TENSOR

ALL_REDUCE = torch.ops.cas.all_reduce.default
ALL_GATHER = torch.ops.cas.all_gather.default
EXPERTS = torch.ops.cas.experts.default
GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS = 3, 4, 5, 6  # arguments of `cas::experts`
LARGEST_SIZE = 64  # in proposals of error messages


@weight_function("shard_rows", by_rank=True, selects=0)
def shard_rows(weight: torch.Tensor, parts: int, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part of `parts` equal parts along dimension 0. size / parts consecutive ranks have the same part.

    If `parts` does not divide the rows, the last parts are padded with zeros. [O, …] → [ceil(O / parts), …]
    """
    rows, part = -(-weight.shape[0] // parts), rank * parts // size
    shard = weight[part * rows : (part + 1) * rows]
    missing = rows - shard.shape[0]
    return F.pad(shard, (0, 0) * (weight.dim() - 1) + (0, missing)) if missing else shard


@weight_function("shard_columns", by_rank=True, selects=1)
def shard_columns(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part along dimension 1. [O, I] → [O, I / size]"""
    columns = weight.shape[1] // size
    return weight[:, rank * columns : (rank + 1) * columns]


@weight_function("shard_expert_rows", by_rank=True)
def shard_expert_rows(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's gate and up: [X, 2F, …] → [X, 2F / size, …]"""
    halves = weight.unflatten(1, (2, -1))
    rows = halves.shape[2] // size
    return halves[:, :, rank * rows : (rank + 1) * rows].flatten(1, 2)


@weight_function("shard_expert_columns", by_rank=True)
def shard_expert_columns(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's down: [X, D, F] → [X, D, F / size]"""
    columns = weight.shape[2] // size
    return weight[:, :, rank * columns : (rank + 1) * columns]


@weight_function("first_row", by_rank=True)
def first_row(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """The first row of a rank's part of `shard_rows(weight, size, size)`. → int64 [1]"""
    return torch.full((1,), rank * -(-weight.shape[0] // size), dtype=torch.int64, device=weight.device)


@weight_function("on_first_rank", by_rank=True)
def on_first_rank(bias: torch.Tensor, *, rank: int) -> torch.Tensor:
    """The bias on rank 0, zeros on other ranks, so that the sum over ranks is the bias."""
    return bias if rank == 0 else torch.zeros_like(bias)


@dataclass(slots=True)
class _Site:
    """A linear, an embedding or experts whose weight is sharded. Of experts, `weight` is the down projection.

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
        return SkipReason(sentence="the model runs on one rank") if ctx.tensor_parallel_size == 1 else None

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        sites, near_misses = _find_sites(gm, ctx)
        _check_sizes(list(sites.values()), ctx.tensor_parallel_size)
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
        if not is_call(node, F.linear, F.embedding, EXPERTS):
            continue
        weight = node.args[DOWN] if is_call(node, EXPERTS) else node.args[1]
        name = weight_of(weight)
        if name is None or not isinstance(weight, Node):
            near_misses.append(NearMiss.at(node, "its weight is computed, not a parameter: every rank computes all of it"))
            continue
        if depends_on_rank(ctx.weights[name].expression):
            continue  # sharded already
        module = name.rpartition(".")[0]
        style = next((style for pattern, style in ctx.tp_plan.items() if fnmatchcase(module, pattern)), None)
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
    possible: tuple[str, ...] = ("colwise", "rowwise", "vocab")
    if is_call(node, F.embedding, EXPERTS):
        possible = ("vocab",) if is_call(node, F.embedding) else ("experts",)
    if style not in possible:
        raise PassError(f"{weight_of(weight)} is {style!r} in the model's tp_plan: expected {' or '.join(map(repr, possible))}.")
    if style == "experts":
        features = tensor_of(weight).shape[2]
        return _Site(node=node, weight=weight, style=style, units=features, unit_name="features in each expert")
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
    """The linears that compute attention's keys and values."""
    found = set()
    for node in gm.graph.find_nodes(op="call_function", target=ATTENTION):
        pending = [node.args[1], node.args[2]]
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
    size = ctx.tensor_parallel_size
    for site in {site.weight: site for site in sites.values()}.values():
        if site.style == "rowwise":
            ctx.replace_weight(site.weight, "shard_columns", size)
            continue
        if site.style == "experts":
            _shard_experts(site, ctx)
            continue
        if site.style == "vocab":  # before the weight is sharded
            ctx.derived_weight(gm, _first_row_name(site), "first_row", site.weight, size)
        ctx.replace_weight(site.weight, "shard_rows", site.parts(size) or size, size)
    for node, site in sites.items():
        bias = _bias_of(node) if is_call(node, F.linear) else None
        if bias is None:
            continue
        if weight_of(bias) is None:
            raise PassError(f"{weight_of(site.weight)} cannot be sharded: its bias is computed, not a parameter.")
        if site.style == "rowwise":
            ctx.replace_weight(bias, "on_first_rank")
        else:
            ctx.replace_weight(bias, "shard_rows", site.parts(size) or size, size)


def _shard_experts(site: _Site, ctx: PassContext) -> None:
    size, arguments = ctx.tensor_parallel_size, [*site.node.args, None, None]
    gate_up, gate_up_bias, down_bias = arguments[GATE_UP], arguments[GATE_UP_BIAS], arguments[DOWN_BIAS]
    if any(weight is not None and weight_of(weight) is None for weight in (gate_up, gate_up_bias, down_bias)):
        raise PassError(f"{weight_of(site.weight)} cannot be sharded: a weight beside it is computed, not a parameter.")
    ctx.replace_weight(site.weight, "shard_expert_columns", size)
    for weight in (gate_up, gate_up_bias):
        if isinstance(weight, Node):
            ctx.replace_weight(weight, "shard_expert_rows", size)
    if isinstance(down_bias, Node):
        ctx.replace_weight(down_bias, "on_first_rank")


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
        if node in sites:
            _rewrite_site(gm, sites[node], dimensions, ctx)
            continue
        dimension = sharded_dimension(node, dimensions)
        if is_call(node, ATTENTION):
            if dimension is None:
                raise PassError(_whole_attention(node_source_line(node)))
            _shard_cache(node, ctx)
            _shard_head_vectors(node, ctx)
        if is_call(node, MLA_ATTENTION):
            if dimension is None:
                raise PassError(_whole_attention(node_source_line(node)))
            _shard_latent_heads(node, ctx)
        if any(value in dimensions for value in node.all_input_nodes):
            before = node.meta["example_value"]
        _recompute(node, ctx)
        if dimension is not None:
            _check_others_kept(node, before, dimension)
            dimensions[node] = dimension


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
    node, size = site.node, ctx.tensor_parallel_size
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
    elif site.style in ("rowwise", "experts"):
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
    begin = ctx.derived_weight(gm, _first_row_name(site), "first_row", site.weight, ctx.tensor_parallel_size)
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


def _shard_cache(attention: Node, ctx: PassContext) -> None:
    """Give the layer's cache as many heads as this rank's keys have."""
    keys, cache = attention.args[1], attention.args[3]
    assert isinstance(cache, Node)
    shape = list(tensor_of(cache).shape)
    shape[2] = tensor_of(keys).shape[1]
    with ctx.fake_mode:
        cache.meta["example_value"] = torch.empty(shape, dtype=tensor_of(cache).dtype, device="meta")


def _shard_latent_heads(attention: Node, ctx: PassContext) -> None:
    """Give each rank the rows of its heads of the weight that makes keys and values from latents."""
    weight = arguments(attention)[5]
    name = weight_of(weight)
    assert name is not None, "the weight of keys and values is a parameter"
    if not depends_on_rank(ctx.weights[name].expression):
        ctx.replace_weight(weight, "shard_rows", ctx.tensor_parallel_size, ctx.tensor_parallel_size)


def _shard_head_vectors(attention: Node, ctx: PassContext) -> None:
    """Give each rank the sinks and ALiBi slopes of its query heads."""
    size = ctx.tensor_parallel_size
    for vector in arguments(attention)[7:9]:
        if vector is None:
            continue
        name = weight_of(vector)
        if name is None:
            raise PassError(
                f"Tensor parallelism cannot shard the sinks or ALiBi slopes of {node_source_line(attention)}: "
                "they are computed, not a parameter."
            )
        if not depends_on_rank(ctx.weights[name].expression):
            ctx.replace_weight(vector, "shard_rows", size, size)
