"""Linears over the same input become one linear over the concatenated weight: QKV, gate/up.

    F.linear(x, a), F.linear(x, b)  →  F.linear(x, cat(a, b)).split(…)

One kernel reads x once, instead of two or three kernels; for small batches, one large product is faster than several small ones. The
weights are concatenated once, while they are loaded. Where some of the linears have a bias and some have none (Whisper's keys), the others
get zeros. Weights in different group-quantized formats are not merged, nor are linears of different modules: where attention and MLP read
the same input, the MLP's part would cross the split at attention as a strided view.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

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
    tensor_of,
    weight_of,
)
from compile_and_serve.custom_ops.stored_weight import GroupedParts
from compile_and_serve.custom_ops.weight_functions import weight_function


@weight_function("cat_biases")
def _cat_biases(*parts: torch.Tensor | int) -> torch.Tensor:
    """parts: biases, and of linears without one the number of their outputs, which get zeros."""
    like = next(part for part in parts if isinstance(part, torch.Tensor))
    return torch.cat([like.new_zeros(part) if isinstance(part, int) else part for part in parts])


class MergeLinears(BasePass):
    name = "merge_linears"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        by_input: dict[Any, list[Node]] = defaultdict(list)
        for node in gm.graph.nodes:
            if is_call(node, F.linear):
                by_input[arguments(node)[0], _block(node), _storage(node, ctx)].append(node)
        matched, near_misses = 0, []
        for group in by_input.values():
            if len(group) < 2:
                continue
            if reason := _why_not(group):
                near_misses += [NearMiss.at(node, reason) for node in group]
                continue
            _merge(gm, group, ctx)
            matched += len(group)
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _storage(node: Node, ctx: PassContext) -> Any:
    """Equal for linears whose weights are not quantized to groups in different formats, which no kernel could multiply as one."""
    weight = weight_of(arguments(node)[1])
    if weight is None:
        return None
    stored = [ctx.weights.stored.get(name) for name in ctx.weights.parameters(ctx.weights[weight].expression)]
    return tuple(dict.fromkeys(one.parts.layout for one in stored if one is not None and isinstance(one.parts, GroupedParts)))


def _block(node: Node) -> str:
    """The module that contains a linear: where attention and MLP read the same input, they stay apart."""
    return ".".join((weight_of(node.args[1]) or "").split(".")[:-2])


def _bias(node: Node) -> Any:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _why_not(group: list[Node]) -> str | None:
    if any(weight_of(node.args[1]) is None for node in group):
        return "a weight of the group is computed, not a parameter"
    if len({tensor_of(node.args[1]).dtype for node in group}) > 1:
        return "the weights have different dtypes"
    if any(bias is not None and weight_of(bias) is None for bias in map(_bias, group)):
        return "a bias of the group is computed, not a parameter"
    return None


def _merge(gm: GraphModule, group: list[Node], ctx: PassContext) -> None:
    weights = [arguments(node)[1] for node in group]
    weight = ctx.derived_weight(gm, _merged_name(weights), "cat", *weights)
    sizes = [tensor_of(node.args[1]).shape[0] for node in group]
    bias = _merged_bias(gm, [_bias(node) for node in group], sizes, _merged_name(weights), ctx)
    with gm.graph.inserting_before(group[0]):
        linear = ctx.call(gm, F.linear, group[0].args[0], weight, bias, origin=group[0])
        parts = ctx.call(gm, torch.split, linear, sizes, -1, origin=group[0])
        for i, node in enumerate(group):
            part = ctx.call(gm, operator.getitem, parts, i, origin=node)
            node.replace_all_uses_with(part)
    for node in group:
        gm.graph.erase_node(node)


def _merged_bias(gm: GraphModule, biases: list[Any], sizes: list[int], weight: str, ctx: PassContext) -> Node | None:
    """weight: the merged weight's name."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    if len(given) == len(biases):
        return ctx.derived_weight(gm, _merged_name(biases), "cat", *biases)
    parts = [size if bias is None else ctx.weights[bias.meta["weight"]].expression for bias, size in zip(biases, sizes, strict=True)]
    name = f"{weight.rpartition('.')[0]}.bias"
    return ctx.defined_weight(gm, name, ("cat_biases", *parts), near=given[0])


def _merged_name(weights: list[Any]) -> str:
    """The merged weight's name: `a.q_proj.weight`, `a.k_proj.weight` → `a.q_proj+k_proj.weight`."""
    names = [weight_of(weight) or "" for weight in weights]
    owners = [name.rsplit(".", 1)[0].split(".") for name in names]
    shared = 0
    while all(len(owner) > shared + 1 and owner[: shared + 1] == owners[0][: shared + 1] for owner in owners):
        shared += 1
    merged = "+".join(".".join(owner[shared:]) for owner in owners)
    return ".".join([*owners[0][:shared], merged, names[0].rsplit(".", 1)[1]])
