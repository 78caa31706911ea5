"""The ranks' sum, the residual addition and the norm of the result become one op.

    s = residual + all_reduce(x);  y = rms_norm(s, g)   →   s, y = allreduce_add_rms_norm(x, residual, g)

A decode step's activations are small, so an all-reduce costs mostly launches and barriers; at its end, the sum is in registers. Without a
kernel for the fused op, Inductor runs the addition, and `fuse_linears` takes the norm.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    SkipReason,
    arguments,
    is_call,
    only_user,
    tensor_of,
    weight_of,
)
from compile_and_serve.custom_ops.collectives.allreduce_norm import ALLREDUCE_ADD_RMS_NORM
from compile_and_serve.custom_ops.collectives.collectives import ALL_REDUCE


class _Mismatch(Exception):
    """Why an all-reduce is not a site of this pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    reduce: Node
    add: Node
    residual: Node
    norm: Node
    norm_weight: Node
    eps: float


def why_no_kernel(kernel: str, ctx: PassContext) -> SkipReason | None:
    """Why a pass that inserts this fused all-reduce does not run; None: it runs."""
    if ctx.mesh.tensor == 1:
        return SkipReason(sentence="the model runs on one rank")
    if kernel not in ctx.kernels:
        return SkipReason(sentence=f"there is no kernel for it for {ctx.dtype} on {ctx.device.type}")
    return None


class FuseAllreduceAddRmsNorm(BasePass):
    name = "fuse_allreduce_add_rms_norm"

    def guard(self, ctx: PassContext) -> SkipReason | None:
        return why_no_kernel("allreduce_add_rms_norm", ctx)

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for node in gm.graph.find_nodes(op="call_function", target=ALL_REDUCE):
            if is_call(node.args[0], torch.where):
                continue  # of an embedding: no residual is added to it
            try:
                _fuse(gm, _match(node), ctx)
                matched += 1
            except _Mismatch as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _match(reduce: Node) -> _Site:
    add = only_user(reduce)
    if not is_call(add, torch.add) or add.kwargs or len(add.args) != 2:
        raise _Mismatch("the ranks' sum is not read by a residual addition alone")
    residual = add.args[0] if add.args[1] is reduce else add.args[1]
    if not isinstance(residual, Node) or residual is reduce or weight_of(residual) is not None:
        raise _Mismatch("the other operand of the addition is not a residual")
    ours, theirs = tensor_of(reduce), tensor_of(residual)
    if str(ours.shape) != str(theirs.shape) or ours.dtype != theirs.dtype or ours.dim() != 2:
        raise _Mismatch("the residual does not have the shape and dtype of the ranks' sum, or they are not [tokens, features]")
    norm = next((user for user in add.users if is_call(user, torch.rms_norm)), None)
    if norm is None:
        raise _Mismatch("no norm reads the sum with the residual")
    _, shape, weight, eps = arguments(norm)
    if weight_of(weight) is None or tensor_of(weight).dtype != ours.dtype:
        raise _Mismatch("the norm's weight is not a parameter of the activations' dtype")
    if eps is None or len(shape) != 1:
        raise _Mismatch("the norm is not over the last dimension with an explicit eps")
    return _Site(reduce=reduce, add=add, residual=residual, norm=norm, norm_weight=weight, eps=eps)


def _fuse(gm: GraphModule, site: _Site, ctx: PassContext) -> None:
    x, *group = arguments(site.reduce)
    args = (x, site.residual, site.norm_weight, site.eps, *group)
    with gm.graph.inserting_before(site.add):
        both = ctx.call(gm, ALLREDUCE_ADD_RMS_NORM, *args, origin=site.add)
        total = ctx.call(gm, operator.getitem, both, 0, origin=site.add)
        normed = ctx.call(gm, operator.getitem, both, 1, origin=site.norm)
    site.norm.replace_all_uses_with(normed)
    gm.graph.erase_node(site.norm)
    site.add.replace_all_uses_with(total)
    gm.graph.erase_node(site.add)
    gm.graph.erase_node(site.reduce)
