"""Fuses the RMSNorm before a linear, and the SiLU-mul or the residual addition after it, into the linear.

    F.linear(rms_norm(x, g), W) [silu(gate) · up | + residual]  →  fused_linear(x, pack(W), …)
    quantized_linear(rms_norm(x, g), …) [the same]              →  quantized_linear(x, …)
    group_linear(rms_norm(x, g), …) [the same]                  →  group_linear(x, …)
    lora_add(F.linear(rms_norm(x, g), W), …) [the same]         →  lora_linear(x, pack(W), …)

The normalized activations, the gate/up product and the sum are not written to memory, and a layer has four op calls instead of a dozen. The
weight is packed once, while it is loaded, into the layout of the device's kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import (
    GELU_LINEAR,
    NORM_ADDS,
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    SkipReason,
    arguments,
    is_call,
    norm_weight_fits,
    only_user,
    op_arguments,
    tensor_of,
    weight_of,
)
from compile_and_serve.custom_ops.linear.fused_linear import FUSED_LINEAR, pack_linear_weight
from compile_and_serve.custom_ops.lora.lora_add import LORA_ADD
from compile_and_serve.custom_ops.lora.lora_linear import LORA_LINEAR
from compile_and_serve.custom_ops.quantized.group_linear import GROUP_LINEAR
from compile_and_serve.custom_ops.quantized.quantized_linear import QUANTIZED_LINEAR
from compile_and_serve.custom_ops.weight_functions import weight_function

weight_function("pack_linear_weight")(pack_linear_weight)


@dataclass(slots=True)
class _Site:
    """A linear and the ops that are fused into it."""

    linear: Node
    x: Node
    norm_weight: Node | None = None
    eps: float = 1e-6
    silu_mul: bool = False
    gelu: bool = False
    adapters: tuple[Any, ...] = ()  # the last arguments of its `lora_add`
    residual: Node | None = None
    out: Node | None = None  # the last node that it replaces


class FuseLinears(BasePass):
    name = "fuse_linears"

    def guard(self, ctx: PassContext) -> SkipReason | None:
        if "fused_linear" in ctx.kernels:
            return None
        return SkipReason(sentence=f"there is no fused linear kernel for {ctx.dtype} on {ctx.device.type}")

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for node in list(gm.graph.nodes):
            if not (is_call(node, F.linear) or _is_bare_quantized(node)):
                continue
            if weight_of(node.args[1]) is None:
                near_misses.append(NearMiss.at(node, "its weight is computed, not a parameter"))
            elif tensor_of(node.args[0]).dim() != 2:
                near_misses.append(NearMiss.at(node, "its input is not [tokens, features]"))
            else:
                site = _Site(node, node.args[0], out=node)
                near_misses += _take_norm(site, ctx)
                _take_adapters(site)
                _take_silu_mul(site, ctx)
                _take_residual(site, ctx)
                if is_call(node, F.linear):
                    _replace(gm, site, ctx)
                    matched += 1
                elif site.norm_weight is not None or site.out is not node:
                    _extend(gm, site, ctx)
                    matched += 1
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _is_bare_quantized(node: Node) -> bool:
    """Whether this is a quantized linear from `quantize_linears`, with nothing fused into it yet."""
    if not is_call(node, QUANTIZED_LINEAR, GROUP_LINEAR):
        return False
    args = op_arguments(node)
    return args["norm_weight"] is None and not args["silu_mul"] and args["residual"] is None


def _take_norm(site: _Site, ctx: PassContext) -> list[NearMiss]:
    norm = site.x
    if not is_call(norm, torch.rms_norm):
        return []
    x, shape, weight, eps = arguments(norm)
    if weight_of(weight) is None:
        return [NearMiss.at(norm, "the norm's weight is not a parameter")]
    if not norm_weight_fits(weight, x, ctx):
        dtypes = f"{tensor_of(weight).dtype} and {tensor_of(x).dtype}"
        return [NearMiss.at(norm, f"the norm's weight and its input have different dtypes ({dtypes})")]
    if eps is None or len(shape) != 1:
        return [NearMiss.at(norm, "the norm is not over the last dimension with an explicit eps")]
    site.x, site.norm_weight, site.eps = x, weight, eps
    return []


def _take_adapters(site: _Site) -> None:
    add = only_user(site.linear)
    if is_call(site.linear, F.linear) and is_call(add, LORA_ADD) and add.args[:2] == (site.linear, site.linear.args[0]):
        site.adapters, site.out = add.args[2:], add


def _take_silu_mul(site: _Site, ctx: PassContext) -> None:
    """linear → split in halves → silu(first) · second, or GELU's tanh form in place of SiLU."""
    assert site.out is not None
    split = only_user(site.out)
    if split is None or not is_call(split, torch.split, torch.chunk):
        return
    parts = {user.args[1]: user for user in split.users if is_call(user, operator.getitem)}
    if set(parts) != {0, 1} or tensor_of(parts[0]).shape[-1] != tensor_of(parts[1]).shape[-1]:
        return
    gate, product = only_user(parts[0]), only_user(parts[1])
    takes_gelu = GELU_LINEAR in ctx.kernels and is_call(site.linear, F.linear)
    if gate is None or product is None:
        return
    is_gelu = takes_gelu and is_call(gate, F.gelu) and arguments(gate)[1:] == ("tanh",)
    if not ((is_gelu or is_call(gate, F.silu)) and is_call(product, torch.mul) and only_user(gate) is product):
        return
    if set(product.args) == {gate, parts[1]}:
        site.silu_mul, site.gelu, site.out = True, is_gelu, product


def _take_residual(site: _Site, ctx: PassContext) -> None:
    """out + residual, where both have one shape and dtype. Inductor fuses the addition with a LayerNorm after it, where that is faster."""
    assert site.out is not None
    add = only_user(site.out)
    if add is None or not is_call(add, torch.add) or add.kwargs or len(add.args) != 2:
        return
    if NORM_ADDS in ctx.kernels and any(is_call(user, F.layer_norm) for user in add.users):
        return
    other = add.args[0] if add.args[1] is site.out else add.args[1]
    if not isinstance(other, Node) or other is site.out or weight_of(other) is not None:
        return
    ours, theirs = tensor_of(site.out), tensor_of(other)
    if str(ours.shape) == str(theirs.shape) and ours.dtype == theirs.dtype:
        site.residual, site.out = other, add


def _replace(gm: GraphModule, site: _Site, ctx: PassContext) -> None:
    weight, out = arguments(site.linear)[1], site.out
    assert out is not None
    bias = site.linear.args[2] if len(site.linear.args) > 2 else site.linear.kwargs.get("bias")
    packed = ctx.derived_weight(gm, f"{weight_of(weight)}.packed", "pack_linear_weight", weight)
    out_features = tensor_of(weight).shape[0]
    args = (site.x, packed, out_features, site.norm_weight, site.eps, bias, site.silu_mul, site.residual, site.gelu)
    with gm.graph.inserting_before(out):
        target = LORA_LINEAR if site.adapters else FUSED_LINEAR
        fused = ctx.call(gm, target, *args, *site.adapters, origin=site.linear)
    out.replace_all_uses_with(fused)
    gm.graph.erase_node(out)


def _extend(gm: GraphModule, site: _Site, ctx: PassContext) -> None:
    """Replace a quantized linear by one with the site's ops fused into it."""
    out, target = site.out, site.linear.target
    assert out is not None
    assert callable(target)
    fused_in = {"x": site.x, "norm_weight": site.norm_weight, "eps": site.eps, "silu_mul": site.silu_mul, "residual": site.residual}
    with gm.graph.inserting_before(out):
        fused = ctx.call(gm, target, *(op_arguments(site.linear) | fused_in).values(), origin=site.linear)
    out.replace_all_uses_with(fused)
    gm.graph.erase_node(out)
