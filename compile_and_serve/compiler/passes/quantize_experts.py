"""Experts over quantized weights, with the scales that the kernel applies.

    experts(x, ids, weights, Wgu, Wd, …)  →  experts(x, ids, weights, pack(Qgu), pack(Qd), …, scale_gu, scale_d, activations)

MXFP4 and 8-bit experts of a checkpoint keep its values and scales, and so do codes with a scale per group of inputs. With
`--quantization`, experts that are not excluded are quantized while they are loaded. Without a kernel, the weights stay as the module has
them. On the CPU, each expert is packed as a linear's weight is.

Activations are rounded to float8 if the scheme or the checkpoint asks for it and the weights are float8. A log line says where they are
not rounded as the checkpoint asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.config import Quantization
from compile_and_serve.compiler.passes.fuse_experts import LINEARS
from compile_and_serve.compiler.passes.quantize_linears import SCHEMES
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    SkipReason,
    op_arguments,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.quantized_expressions import CannotQuantizeError, grouped_parts, quantized_parts, stored_parts
from compile_and_serve.custom_ops.moe.code_format import CodeFormat, triton_codes_unsupported_reason
from compile_and_serve.custom_ops.moe.experts import EXPERTS
from compile_and_serve.custom_ops.moe.packed_experts import (
    packed_8bit_unsupported_reason,
    packed_codes_unsupported_reason,
    packed_mxfp4_unsupported_reason,
)
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import Activations, dtype_name
from compile_and_serve.custom_ops.quantized.quantized_linear import cuda_unsupported_reason
from compile_and_serve.custom_ops.stored_weight import Expression, GroupedParts, Mxfp4Parts, Parts, ScaledParts, StoredWeight

KERNEL, PACKED_KERNEL = "quantized_experts", "packed_experts"


class QuantizeExperts(BasePass):
    """quantization: a name of `SCHEMES`; None: as in the checkpoint. exclude: globs over module names; None: the scheme's."""

    name = "quantize_experts"

    def __init__(self, quantization: Quantization | None = None, exclude: tuple[str, ...] | None = None) -> None:
        self.scheme = None if quantization is None else SCHEMES[quantization]
        self.exclude = (self.scheme.exclude if self.scheme else ()) if exclude is None else exclude
        self._quantization = quantization

    def cache_key(self) -> str:
        return f"{super().cache_key()}({self._quantization}, exclude={','.join(self.exclude)})"

    def round_weight(self, weight_XOI: torch.Tensor) -> torch.Tensor:
        """The weight after quantizing and dequantizing it."""
        return weight_XOI if self.scheme is None or weight_XOI.dim() != 3 else self.scheme.round_weight(weight_XOI)

    def guard(self, ctx: PassContext) -> SkipReason | None:
        stored = [name for name, one in ctx.weights.stored.items() if one.is_quantized]
        has_work = self.scheme is not None or any(len(ctx.weights[name].spec.shape) == 3 for name in stored)
        if has_work and not ctx.kernels & {KERNEL, PACKED_KERNEL}:
            return SkipReason(sentence=f"no kernel of quantized experts runs here: they are computed in {ctx.dtype}")
        return None

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses, remarks = 0, [], set[str]()
        for node in gm.graph.find_nodes(op="call_function", target=EXPERTS):
            args = op_arguments(node)
            if args["gate_up_scale"] is not None or not self._wants(args, ctx):
                continue
            activations, remark = self._activations([args[linear] for linear in LINEARS], ctx)
            try:
                forms = [self._pack(gm, args, linear, ctx) for linear in LINEARS]
            except CannotQuantizeError as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
                if activations != "none":
                    remarks.add(f"Activations of experts stay in {ctx.dtype}, because the weights are not quantized: {reason}.")
                continue
            args["activations"] = activations
            args["codes"] = "|".join(forms) if any(forms) else ""
            remarks |= {remark} if remark else set()
            with gm.graph.inserting_before(node):
                quantized = ctx.call(gm, EXPERTS, *args.values(), origin=node)
            node.replace_all_uses_with(quantized)
            gm.graph.erase_node(node)
            matched += 1
        return PassResult(matched=matched, near_misses=tuple(near_misses), remarks=tuple(sorted(remarks)))

    def _wants(self, args: Mapping[str, Any], ctx: PassContext) -> bool:
        names = [weight_of(args[linear]) for linear in LINEARS]
        if self.scheme is not None:
            modules = [name.rpartition(".")[0] for name in names if name is not None]
            return not any(fnmatchcase(module, pattern) for module in modules for pattern in self.exclude)
        return any(one.is_quantized for name in names for one in _stored(name, ctx))

    def _activations(self, weights: list[Node], ctx: PassContext) -> tuple[Activations, str | None]:
        """The activations of experts with these weights, and a sentence where they are not what is asked for."""
        asked: set[tuple[torch.dtype | None, Activations]]
        if self.scheme is not None:
            asked = {(None if self.scheme.activations == "none" else self.scheme.dtype, self.scheme.activations)}
        else:
            asked = {_stored_activations(weight_of(weight), ctx) for weight in weights}
        kinds = {kind for _, kind in asked}
        if kinds == {"none"}:
            rounds = any(dtype is not None for dtype, _ in asked)
            return "none", f"Activations of experts over codes stay in {ctx.dtype}." if rounds else None
        kept = f"Activations of experts stay in {ctx.dtype}"
        if "none" in kinds:
            return "none", f"{kept}: the checkpoint asks for 8-bit activations of only one of gate/up and down."
        dtypes = {dtype for dtype, _ in asked}
        if dtypes != {torch.float8_e4m3fn}:
            return "none", f"{kept}: there is no kernel of experts with int8 activations."
        if platform_of(ctx.device).runs_cuda_kernels:
            reason = cuda_unsupported_reason(ctx.device, torch.float8_e4m3fn)
            if reason is not None:
                return "none", f"{kept}: {reason}."
        if "static" in kinds:
            return ("dynamic", "Activations of experts get one scale per token: the checkpoint's static scales are not used.")
        return "dynamic", None

    def _pack(self, gm: GraphModule, args: dict[str, Any], linear: str, ctx: PassContext) -> str:
        """Replace a weight among the arguments by its values in the kernel's layout, with scales and offsets. → `CodeFormat.name`"""
        node, codes = args[linear], ""
        offset: Expression | None = None
        factor: Expression | None = None
        weight = weight_of(node)
        if weight is None:
            raise CannotQuantizeError("a weight is computed, not a parameter")
        expression = ctx.weights[weight].expression
        if self.scheme is None:
            parts: Parts = stored_parts(expression, ctx.weights, is_compact=True)
        elif self.scheme.group_size is not None:
            parts = grouped_parts(expression, ctx.weights, self.scheme.bits, self.scheme.group_size)
        else:
            parts = quantized_parts(expression, ctx.weights, self.scheme.dtype, self.scheme.scales)
        in_features = tensor_of(node).shape[2]
        if PACKED_KERNEL in ctx.kernels and (reason := _cpu_unsupported_reason(parts, in_features, ctx)) is not None:
            raise CannotQuantizeError(reason)
        if isinstance(parts, ScaledParts):
            values, scale, form = parts.values, parts.scale, dtype_name(parts.dtype)
            if PACKED_KERNEL in ctx.kernels:
                values = ("pack_8bit_experts", values)
        elif isinstance(parts, Mxfp4Parts):
            values, scale, form = parts.codes, parts.scale, "mxfp4"
            if PACKED_KERNEL in ctx.kernels:
                values, scale = ("pack_mxfp4_codes_cpu", values), ("pack_mxfp4_scales_cpu", scale)
            elif platform_of(ctx.device).runs_triton_kernels:
                values, scale = ("pack_mxfp4_codes", values), ("pack_mxfp4_scales", scale)
        elif PACKED_KERNEL in ctx.kernels:
            code_format = _code_format(parts)
            form, codes = f"codes{parts.bits}", code_format.name
            values = ("pack_expert_codes_cpu", parts.codes, parts.bits)
            scale = ("pack_expert_scales_cpu", parts.scale, in_features, parts.group_size)
            offset = None if parts.offset is None else ("pack_expert_scales_cpu", parts.offset, in_features, parts.group_size)
            factor = _factors("pack_expert_factors_cpu", parts)
        else:
            code_format = _code_format(parts)
            form, codes = f"codes{parts.bits}", code_format.name
            values, scale, offset, factor = parts.codes, parts.scale, parts.offset, _factors("plain_expert_factors", parts)
            if platform_of(ctx.device).runs_triton_kernels:
                if (reason := triton_codes_unsupported_reason(code_format)) is not None:
                    raise CannotQuantizeError(reason)
                values, scale = ("pack_expert_codes", values, parts.bits), ("pack_expert_scales", scale)
                offset = None if offset is None else ("pack_expert_scales", offset)
                factor = _factors("pack_expert_factors", parts)
        name = f"{weight}.{form}"
        args[linear] = ctx.defined_weight(gm, f"{name}.values", values, near=node)
        args[f"{linear}_scale"] = ctx.defined_weight(gm, f"{name}.scale", scale, near=node)
        if offset is not None:
            args[f"{linear}_offset"] = ctx.defined_weight(gm, f"{name}.offset", offset, near=node)
        if factor is not None:
            args[f"{linear}_factor"] = ctx.defined_weight(gm, f"{name}.factor", factor, near=node)
        return codes


def _factors(function: str, parts: GroupedParts) -> Expression:
    """The factors of scales and offsets in a layout; None where there are none."""
    factors = [one for one in (parts.scale_factor, parts.offset_factor) if one is not None]
    return (function, *factors) if factors else None


def _code_format(parts: GroupedParts) -> CodeFormat:
    return CodeFormat(parts.bits, parts.group_size, parts.table)


def _cpu_unsupported_reason(parts: Parts, in_features: int, ctx: PassContext) -> str | None:
    if isinstance(parts, GroupedParts):
        return packed_codes_unsupported_reason(device=ctx.device, dtype=ctx.dtype, form=_code_format(parts), in_features=in_features)
    if not isinstance(parts, ScaledParts):
        return packed_mxfp4_unsupported_reason(device=ctx.device, dtype=ctx.dtype)
    return packed_8bit_unsupported_reason(
        device=ctx.device, dtype=ctx.dtype, weight_dtype=parts.dtype, per_block=parts.per_block, in_features=in_features
    )


def _stored(weight: str | None, ctx: PassContext) -> list[StoredWeight]:
    """How the checkpoint holds the parameters of a weight, of those that it holds in another form."""
    names = [] if weight is None else ctx.weights.parameters(ctx.weights[weight].expression)
    return [ctx.weights.stored[name] for name in names if name in ctx.weights.stored]


def _stored_activations(weight: str | None, ctx: PassContext) -> tuple[torch.dtype | None, Activations]:
    """The dtype that a checkpoint's weight is made for activations in (None: the model's), and how kernels here round them to it."""
    parts = [one.parts for one in _stored(weight, ctx)]
    if coded := [one for one in parts if isinstance(one, GroupedParts)]:
        return coded[0].activations, "none"
    rounded = (one for one in parts if isinstance(one, ScaledParts) and one.activations != "none")
    return next(((one.dtype, one.activations) for one in rounded), (None, "none"))
