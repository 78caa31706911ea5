"""The fused all-reduce also quantizes its norm to float8, for linears that would quantize it.

    s, y = allreduce_add_rms_norm(x, r, g);  quantized_linear(y, …)
        →   s, y, y_q, scale = allreduce_add_rms_norm_quantize(x, r, g);  quantized_linear(y, …, y_q, scale)

The kernel has the whole row in registers at its end, so QKV and gate/up need no separate kernel for quantizing it. y is still returned: the
linear's kernel for one token reads it and quantizes it itself.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.passes.fuse_allreduce_add_rms_norm import why_no_kernel
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    SkipReason,
    is_call,
    op_arguments,
    tensor_of,
)
from compile_and_serve.custom_ops.collectives.allreduce_norm import ALLREDUCE_ADD_RMS_NORM, ALLREDUCE_ADD_RMS_NORM_QUANTIZE
from compile_and_serve.custom_ops.quantized.quantized_linear import QUANTIZED_LINEAR
from compile_and_serve.custom_ops.stored_weight import ScaledParts, StoredWeight

NAME = "fuse_allreduce_quantize"


class FuseAllreduceQuantize(BasePass):
    name = NAME

    def guard(self, ctx: PassContext) -> SkipReason | None:
        return why_no_kernel("allreduce_add_rms_norm_quantize", ctx)

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for fused in gm.graph.find_nodes(op="call_function", target=ALLREDUCE_ADD_RMS_NORM):
            readers = [reader for part in fused.users if part.args[1] == 1 for reader in part.users]
            if not any(_quantizes(reader) for reader in readers):
                continue
            if reason := next((why for reader in readers if (why := _why_not(reader))), None):
                near_misses.append(NearMiss.at(fused, reason))
            else:
                _replace(gm, fused, readers, ctx)
                matched += 1
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def may_quantize(config: CompileConfig, stored: Mapping[str, StoredWeight]) -> bool:
    """Whether a model may have sites of this pass. stored: the checkpoint's quantized weights."""
    is_float8 = config.quantization == "fp8" or any(
        isinstance(one.parts, ScaledParts) and one.parts.layout == (torch.float8_e4m3fn, "dynamic", False) for one in stored.values()
    )
    return is_float8 and NAME not in config.disabled_passes


def _quantizes(reader: Node) -> bool:
    return is_call(reader, QUANTIZED_LINEAR) and op_arguments(reader)["activations"] != "none"


def _why_not(reader: Node) -> str | None:
    if not _quantizes(reader):
        return "not only linears that quantize the norm read it"
    args = op_arguments(reader)
    if args["activations"] == "static":
        return "a linear quantizes the norm with a scale from its checkpoint"
    if (dtype := tensor_of(args["packed"]).dtype) != torch.float8_e4m3fn:
        return f"a linear quantizes the norm to {str(dtype).removeprefix('torch.')}, not to float8_e4m3fn"
    if tensor_of(args["scale"]).dim() == 2:
        return "a linear quantizes the norm with a scale per 128 features, not per token"
    return None


def _replace(gm: GraphModule, fused: Node, readers: list[Node], ctx: PassContext) -> None:
    with gm.graph.inserting_before(fused):
        all_four = ctx.call(gm, ALLREDUCE_ADD_RMS_NORM_QUANTIZE, *fused.args, origin=fused)
        values, scale = (ctx.call(gm, operator.getitem, all_four, i, origin=fused) for i in (2, 3))
    fused.replace_all_uses_with(all_four)  # the first two results of both ops are the sum and the norm
    gm.graph.erase_node(fused)
    for reader in readers:
        reader.args = tuple((op_arguments(reader) | {"quantized": values, "quantized_scale": scale}).values())
