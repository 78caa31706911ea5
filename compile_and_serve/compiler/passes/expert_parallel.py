"""Spreads whole experts over the ranks of a stage, and inserts the collectives that bring tokens to experts and their results back.

    experts(x, ids, weights, W…)  →  all_reduce(experts(x, ids, weights, W of the rank's slots…, placement))

The ranks of a tensor-parallel group have the same tokens: each computes the pairs whose experts it has, and the results are added. With
groups that have tokens of their own (data-parallel attention), all tokens come to all ranks first, and each group gets the sums of its own:

    experts(x, ids, weights, …)  →  scatter_tokens(experts(gather_tokens(x), gather_tokens(ids), gather_tokens(weights), …))

followed by the all_reduce if groups have several ranks. Shapes do not depend on the routing. `placement` says which rank has which experts
(`custom_ops/moe/placement.py`); it is a weight of the layer, so that another placement is another value. It comes before `tensor_parallel`,
which leaves what it sharded alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    PassContext,
    PassError,
    PassResult,
    SkipReason,
    op_arguments,
    set_example_value,
    tensor_of,
    weight_of,
)
from compile_and_serve.custom_ops.collectives.collectives import ALL_REDUCE
from compile_and_serve.custom_ops.collectives.tokens import GATHER_TOKENS, SCATTER_TOKENS
from compile_and_serve.custom_ops.library import EXPERT_PLACEMENT, EXPERT_SLOTS
from compile_and_serve.custom_ops.mesh import DATA, EXPERT, TENSOR
from compile_and_serve.custom_ops.moe.experts import EXPERTS
from compile_and_serve.custom_ops.moe.placement import num_slots

WEIGHTS = ("gate_up", "down", "gate_up_bias", "down_bias")  # arguments of `cas::experts` before others are quantized
PLACEMENT = ".placement"  # ends the name of a layer's table


class ExpertParallel(BasePass):
    """num_redundant: slots of all ranks together beyond one for each expert."""

    name = "expert_parallel"
    required = True  # a rank has its own experts only

    def __init__(self, num_redundant: int = 0) -> None:
        self.num_redundant = num_redundant

    def cache_key(self) -> str:
        return f"{super().cache_key()}({self.num_redundant})"

    def guard(self, ctx: PassContext) -> SkipReason | None:
        return SkipReason(sentence="experts are not spread over ranks") if ctx.mesh.of_axis(EXPERT) == 1 else None

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        nodes = gm.graph.find_nodes(op="call_function", target=EXPERTS)
        fresh = [node for node in nodes if op_arguments(node)["placement"] is None]
        for node in fresh:
            _spread(gm, node, self.num_redundant, ctx)
        return PassResult(matched=len(fresh))


def _spread(gm: GraphModule, node: Node, num_redundant: int, ctx: PassContext) -> None:
    args, size = op_arguments(node), ctx.mesh.of_axis(EXPERT)
    if any(args[name] is not None and weight_of(args[name]) is None for name in WEIGHTS):
        raise PassError("The weights of experts are computed, not parameters: this model runs without enable_expert_parallel.")
    num_experts, name = tensor_of(args["gate_up"]).shape[0], weight_of(args["gate_up"])
    assert name is not None
    slots = num_slots(num_experts, size, num_redundant)
    source = ctx.weights[name].sources[0]
    table = (EXPERT_PLACEMENT, source, num_experts, slots, size)
    args["placement"] = ctx.defined_weight(gm, name + PLACEMENT, table, near=args["gate_up"])
    for weight in (args[one] for one in WEIGHTS if args[one] is not None):
        ctx.replace_weight(weight, EXPERT_SLOTS, slots, size)
    if ctx.mesh.data > 1:
        _gather(gm, node, args, ctx)
    node.args, node.kwargs = tuple(args.values()), {}
    set_example_value(node, ctx.fake_mode)
    whole = node
    if ctx.mesh.data > 1:
        whole = _insert_after(gm, whole, SCATTER_TOKENS, ctx.mesh.data, DATA, ctx=ctx)
    if ctx.mesh.tensor > 1:
        _insert_after(gm, whole, ALL_REDUCE, TENSOR, ctx=ctx)


def _gather(gm: GraphModule, node: Node, args: dict[str, Any], ctx: PassContext) -> None:
    """The tokens of all groups behind one another, with their experts. Ids travel as float32, beside the weights."""
    size, top_k = ctx.mesh.data, tensor_of(args["expert_ids"]).shape[1]
    ids_dtype, weights_dtype = tensor_of(args["expert_ids"]).dtype, tensor_of(args["expert_weights"]).dtype
    with gm.graph.inserting_before(node):
        args["x"] = ctx.call(gm, GATHER_TOKENS, args["x"], size, DATA, origin=node)
        parts = [ctx.call(gm, torch.Tensor.to, args[one], torch.float32, origin=node) for one in ("expert_ids", "expert_weights")]
        pairs = ctx.call(gm, GATHER_TOKENS, ctx.call(gm, torch.cat, parts, -1, origin=node), size, DATA, origin=node)
        ids, weights = (ctx.call(gm, torch.narrow, pairs, 1, begin, top_k, origin=node) for begin in (0, top_k))
        args["expert_ids"] = ctx.call(gm, torch.Tensor.to, ids, ids_dtype, origin=node)
        args["expert_weights"] = ctx.call(gm, torch.Tensor.to, weights, weights_dtype, origin=node)


def _insert_after(gm: GraphModule, node: Node, op: Any, *constants: int | str, ctx: PassContext) -> Node:
    users = list(node.users)
    with gm.graph.inserting_after(node):
        inserted = ctx.call(gm, op, node, *constants, origin=node)
    for user in users:
        user.replace_input_with(node, inserted)
    return inserted
