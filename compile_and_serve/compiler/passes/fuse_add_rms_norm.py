"""Residual add + RMSNorm as one op, where neither is fused into a linear.

    s = x + residual;  rms_norm(s, weight, eps)   →   s, y = add_rms_norm(x, residual, weight, eps)

`fuse_linears` fuses the add into the linear before it and the norm into the linear after it. The remaining ones (around linears without a
kernel of ours) are fused here, if the op is measured to be faster than Inductor's fusion (`compiler/artifacts/autotune.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.passes.measured_fusion import MeasuredFusion, Site
from compile_and_serve.compiler.rewrite.graph_pass import NearMiss, PassContext, arguments, is_call, norm_weight_fits, tensor_of, weight_of
from compile_and_serve.custom_ops.linear.elementwise import ADD_RMS_NORM


def _plain(x_TI: torch.Tensor, residual_TI: torch.Tensor, weight_I: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    sum_TI = x_TI + residual_TI
    return sum_TI, torch.rms_norm(sum_TI, (sum_TI.shape[1],), weight_I, eps)


class FuseAddRmsNorm(MeasuredFusion):
    name = "fuse_add_rms_norm"
    kernel = "add_rms_norm"
    operation = "add + RMSNorm"
    ours = staticmethod(ADD_RMS_NORM)
    plain = staticmethod(_plain)

    def sites(self, gm: GraphModule, ctx: PassContext) -> Iterator[Site | NearMiss]:
        for norm in gm.graph.find_nodes(op="call_function", target=torch.rms_norm):
            add = norm.args[0]
            if not is_call(add, torch.add):
                continue
            if reason := _why_not(norm, add, ctx):
                yield NearMiss.at(norm, reason)
                continue
            _, _, weight, eps = arguments(norm)
            yield Site(inputs=(*arguments(add), weight), out=norm, constants=(eps,))

    def replace(self, gm: GraphModule, site: Site, ctx: PassContext) -> None:
        norm, add = site.out, site.out.args[0]
        assert isinstance(add, Node)
        with gm.graph.inserting_before(add):
            both = ctx.call(gm, ADD_RMS_NORM, *site.inputs, *site.constants, origin=norm)
            for i, node in enumerate((add, norm)):
                node.replace_all_uses_with(ctx.call(gm, operator.getitem, both, i, origin=node))
        gm.graph.erase_node(norm)
        gm.graph.erase_node(add)


def _why_not(norm: Node, add: Node, ctx: PassContext) -> str | None:
    if add.kwargs or len(add.args) != 2 or not all(isinstance(arg, Node) for arg in add.args):
        return "the add is not of two tensors"
    x, residual = (tensor_of(arg) for arg in add.args)
    if str(x.shape) != str(residual.shape) or x.dtype != residual.dtype or x.dim() != 2:
        return "the operands are not two [tokens, features] tensors of one dtype"
    _, shape, weight, eps = arguments(norm)
    if weight_of(weight) is None or len(shape) != 1 or eps is None:
        return "the norm is not over the last dimension with a parameter as weight and an explicit eps"
    if not norm_weight_fits(weight, add, ctx):
        return f"the norm's weight is {tensor_of(weight).dtype}, and its input {x.dtype}"
    return None
