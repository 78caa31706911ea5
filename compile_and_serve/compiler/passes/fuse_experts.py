"""Fuses the RMSNorm before experts and the residual addition after them into them, and packs their weights for the device's kernel.

    experts(rms_norm(x, g), ids, weights, W…) + residual  →  experts(x, ids, weights, pack(W)…, residual, g)

The kernel that adds the results of a token's experts adds the residual, too, and for few tokens the first kernel computes the norm.
Weights are packed on the CPU only, one expert at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    arguments,
    is_call,
    only_user,
    op_arguments,
    tensor_of,
    weight_of,
)
from compile_and_serve.custom_ops.linear.fused_linear import packed_linear_unsupported_reason
from compile_and_serve.custom_ops.moe.experts import EXPERTS, pack_expert_weights
from compile_and_serve.custom_ops.weight_functions import weight_function

weight_function("pack_expert_weights")(pack_expert_weights)

LINEARS = ("gate_up", "down")  # arguments of `cas::experts`


class FuseExperts(BasePass):
    name = "fuse_experts"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        packs = packed_linear_unsupported_reason(device=ctx.device, dtype=ctx.dtype) is None
        for node in gm.graph.find_nodes(op="call_function", target=EXPERTS):
            args = op_arguments(node)
            changed = False
            if packs and args["gate_up_scale"] is None and tensor_of(args["gate_up"]).dim() == 3:
                reason = _pack(gm, args, ctx)
                if reason is None:
                    changed = True
                else:
                    near_misses.append(NearMiss.at(node, reason))
            norm = args["x"]
            if args["norm_weight"] is None and _is_plain_norm(norm) and only_user(norm) is node:
                args["x"], _, args["norm_weight"], args["eps"] = arguments(norm)
                changed = True
            add = _residual_addition(node) if args["residual"] is None else None
            if add is not None:
                args["residual"] = add.args[0] if add.args[1] is node else add.args[1]
                changed = True
            if changed:
                out = add or node
                with gm.graph.inserting_before(out):
                    fused = ctx.call(gm, EXPERTS, *args.values(), origin=node)
                out.replace_all_uses_with(fused)
                gm.graph.erase_node(out)
                if add is not None:
                    gm.graph.erase_node(node)
                matched += 1
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _pack(gm: GraphModule, args: dict[str, Any], ctx: PassContext) -> str | None:
    """Replace both weights by packed ones, or return why not."""
    if any(weight_of(args[linear]) is None for linear in LINEARS):
        return "its weights are computed, not parameters"
    if any(tensor_of(args[linear]).shape[2] % 2 for linear in LINEARS):
        return "an odd number of columns would be padded"
    for linear in LINEARS:
        args[linear] = ctx.derived_weight(gm, f"{weight_of(args[linear])}.packed", "pack_expert_weights", args[linear])
    return None


def _is_plain_norm(norm: object) -> bool:
    """Whether this is an RMSNorm over the last dimension, with a parameter of its input's dtype and an explicit eps."""
    if not is_call(norm, torch.rms_norm):
        return False
    x, shape, weight, eps = arguments(norm)
    same_dtype = weight_of(weight) is not None and tensor_of(weight).dtype == tensor_of(x).dtype
    return same_dtype and eps is not None and len(shape) == 1


def _residual_addition(node: Node) -> Node | None:
    """The addition of a tensor of the same shape and dtype, if that is the only use of the experts' result."""
    add = only_user(node)
    if not is_call(add, torch.add) or add.kwargs or len(add.args) != 2:
        return None
    other = add.args[0] if add.args[1] is node else add.args[1]
    if not isinstance(other, Node) or other is node or weight_of(other) is not None:
        return None
    ours, theirs = tensor_of(node), tensor_of(other)
    return add if str(ours.shape) == str(theirs.shape) and ours.dtype == theirs.dtype else None
