"""A quantized MLP as one op: gate and up with SiLU-mul, then down.

    quantized_linear(quantized_linear(x, …, silu_mul), …)   →   quantized_mlp(x, …)

Only where activations are rounded, and a kernel can hand them over rounded. What each linear takes in (norm, bias, residual) it keeps.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import compile_and_serve.custom_ops.quantized.quantized_mlp  # noqa: F401 (defines the op)
from compile_and_serve.compiler.passes.quantize_linears import QUANTIZED_LINEAR
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    is_call,
    only_user,
)

QUANTIZED_MLP = torch.ops.cas.quantized_mlp.default


class FuseQuantizedMlp(BasePass):
    name = "fuse_quantized_mlp"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        if "quantized_mlp" not in ctx.kernels:
            return PassResult(matched=0)  # it would be the two linears again
        matched, near_misses = 0, []
        for down in gm.graph.find_nodes(op="call_function", target=QUANTIZED_LINEAR):
            gate_up = down.args[0]
            if not (is_call(gate_up, QUANTIZED_LINEAR) and gate_up.args[7]) or down.args[9] == "none":
                continue
            if reason := _why_not(gate_up, down):
                near_misses.append(NearMiss.at(down, reason))
            else:
                _replace(gm, gate_up, down, ctx)
                matched += 1
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _why_not(gate_up: Node, down: Node) -> str | None:
    _, _, _, _, norm_weight, _, _, silu_mul, _, activations, *_ = down.args
    if only_user(gate_up) is not down:
        return "the inner activations are used elsewhere, too"
    if norm_weight is not None or silu_mul or gate_up.args[8] is not None:
        return "between the two linears is more than SiLU-mul"
    if gate_up.args[9] != activations:
        return f"the two linears round their activations differently ({gate_up.args[9]} and {activations})"
    return None


def _replace(gm: GraphModule, gate_up: Node, down: Node, ctx: PassContext) -> None:
    x, packed, scale, double_features, norm_weight, eps, bias, _, _, activations, input_scale, *rounded = gate_up.args
    _, down_packed, down_scale, out_features, _, _, down_bias, _, residual, _, down_input_scale = down.args
    assert isinstance(double_features, int)
    args = (
        x, packed, scale, double_features // 2, norm_weight, eps, bias, input_scale,
        down_packed, down_scale, out_features, down_bias, residual, down_input_scale, activations, *rounded,
    )  # fmt: skip
    with gm.graph.inserting_before(down):
        fused = ctx.call(gm, QUANTIZED_MLP, *args, origin=gate_up)
    down.replace_all_uses_with(fused)
    gm.graph.erase_node(down)
