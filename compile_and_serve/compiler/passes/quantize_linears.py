"""Linears over quantized weights: fewer bytes to read, and twice the products per second if activations are quantized to 8 bits, too.

    F.linear(x, W, bias)  →  quantized_linear(x, pack(Q), scale, …)        W ≈ scale · Q, 8 bits
                          →  group_linear(x, pack(Q), scale, zero, …)      W = scale · (Q − zero) per group of inputs, 4 or 8 bits
                                                                           W = scale · table[Q], 4 bits

With `--quantization`, every linear that is not excluded is quantized while its weight is loaded. Without it, the linears whose weights
are quantized in the checkpoint keep the checkpoint's values and scales. `compiler/weights/quantized_expressions.py` derives Q and the
scales of merged and sharded weights. With `--quantization`, an embedding that shares its weight with the output head uses the unquantized
weight.

    F.embedding(ids, W)  →  group_embedding(ids, pack(Q), scale, zero, …)   of a weight that the checkpoint quantizes to groups, on the CPU
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.config import Quantization
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassError,
    PassResult,
    arguments,
    op_arguments,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.quantized_expressions import (
    CannotQuantizeError,
    Scales,
    grouped_parts,
    quantized_parts,
    stored_parts,
)
from compile_and_serve.custom_ops.moe.experts import EXPERTS
from compile_and_serve.custom_ops.quantization import Activations, block_scales, dequantize_weight, dtype_name, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.group_layout import dequantize_groups
from compile_and_serve.custom_ops.quantized.group_linear import (
    GROUP_EMBEDDING,
    GROUP_LINEAR,
    group_embedding_unsupported_reason,
    group_linear_unsupported_reason,
)
from compile_and_serve.custom_ops.quantized.quantize_groups import group_minima, group_scales, quantize_groups
from compile_and_serve.custom_ops.quantized.quantized_linear import QUANTIZED_LINEAR, quantized_linear_unsupported_reason
from compile_and_serve.custom_ops.quantized.round_activations import ROUND_ACTIVATIONS
from compile_and_serve.custom_ops.stored_weight import GroupedParts, Parts, ScaledParts, StoredWeight
from compile_and_serve.custom_ops.weight_functions import Expression, Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A value of `--quantization`. exclude: modules that are not quantized by default, as globs.

    group_size: inputs per scale and minimum, of codes with `bits` bits; the output head's have 8. None: `scales` says.
    """

    dtype: torch.dtype
    scales: Scales = "row"
    activations: Activations
    exclude: tuple[str, ...]
    group_size: int | None = None
    bits: int = 8

    def bits_of(self, modules: Iterable[str]) -> int:
        """Bits of the codes of these modules, which share a weight."""
        return 8 if _HEAD in modules else self.bits

    def round_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight of a linear or of experts after quantizing and dequantizing it."""
        if self.group_size is not None:
            scale = group_scales(weight, self.bits, self.group_size)
            offset = group_minima(weight, self.bits, self.group_size)
            codes = quantize_groups(weight, scale, offset, self.bits, self.group_size)
            return dequantize_groups(codes, scale, offset, self.bits, self.group_size, weight.dtype)
        scale = (row_scales if self.scales == "row" else block_scales)(weight, self.dtype)
        return dequantize_weight(quantize_weight(weight, scale, self.dtype), scale, weight.dtype)


_ROUTERS = ("*.mlp.gate", "*.router", "*.router.layer")  # of mixtures of experts: they decide between close scores
# The output head decides between close logits, so other engines do not quantize it either. With int8 weights alone it is accurate enough,
# and in a small model it is a fifth of the bytes.
_HEAD = "lm_head"
_EXCLUDED = (_HEAD, *_ROUTERS)
SCHEMES: Mapping[Quantization, Scheme] = {
    "fp8": Scheme(dtype=torch.float8_e4m3fn, scales="row", activations="dynamic", exclude=_EXCLUDED),
    "fp8-block": Scheme(dtype=torch.float8_e4m3fn, scales="block", activations="dynamic", exclude=_EXCLUDED),
    "fp8-weight-only": Scheme(dtype=torch.float8_e4m3fn, scales="row", activations="none", exclude=_EXCLUDED),
    "int8": Scheme(dtype=torch.int8, scales="row", activations="dynamic", exclude=_EXCLUDED),
    "int8-weight-only": Scheme(dtype=torch.int8, scales="row", activations="none", exclude=_ROUTERS),
    "int4": Scheme(dtype=torch.uint8, activations="none", exclude=_ROUTERS, group_size=32, bits=4),
}


def slow_reason(
    quantization: Quantization | None, stored: Mapping[str, StoredWeight], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why quantized linears run as plain torch here, in one sentence. None where kernels run them, or nothing is quantized.

    stored: the checkpoint's quantized weights. dtype: of the activations.
    """
    parts = {one.parts.layout: one.parts for one in stored.values() if one.parts is not None}
    reasons = [one.slow_reason(device, dtype) for one in parts.values()]
    if quantization is not None:
        scheme = SCHEMES[quantization]
        per_block = scheme.scales == "block"
        if scheme.group_size is not None:
            reasons.append(group_linear_unsupported_reason(device=device, dtype=dtype, group_size=scheme.group_size))
        else:
            reasons.append(quantized_linear_unsupported_reason(device=device, dtype=dtype, weight_dtype=scheme.dtype, per_block=per_block))
    return next((reason for reason in reasons if reason is not None), None)


class QuantizeLinears(BasePass):
    """quantization: a name of `SCHEMES`; None: as in the checkpoint. exclude: globs over module names; None: the scheme's."""

    name = "quantize_linears"

    def __init__(self, quantization: Quantization | None = None, exclude: tuple[str, ...] | None = None) -> None:
        self.quantization = quantization
        self.scheme = None if quantization is None else SCHEMES[quantization]
        self.exclude = (self.scheme.exclude if self.scheme else ()) if exclude is None else exclude
        self._must_match = exclude or ()

    def cache_key(self) -> str:
        return f"{super().cache_key()}({self.quantization}, exclude={','.join(self.exclude)})"

    def round_weight(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """The weight after quantizing and dequantizing it."""
        return weight_OI if self.scheme is None or weight_OI.dim() != 2 else self.scheme.round_weight(weight_OI)

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        if self.scheme is None and not ctx.weights.stored:
            return PassResult(matched=0)
        matched, near_misses, seen = 0, [], set[str]()
        for node in gm.graph.find_nodes(op="call_function", target=F.embedding):
            try:
                matched += self._embed(gm, node, ctx)
            except CannotQuantizeError as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
        for node in gm.graph.find_nodes(op="call_function", target=F.linear):
            weight = weight_of(arguments(node)[1])
            if weight is None:
                near_misses.append(NearMiss.at(node, "its weight is computed, not a parameter"))
                continue
            parameters = ctx.weights.parameters(ctx.weights[weight].expression)
            modules = [_modules(parameter, ctx) for parameter in parameters]
            seen |= {module for names in modules for module in names}
            wanted = [self._wants(names, parameter, ctx) for names, parameter in zip(modules, parameters, strict=True)]
            if not any(wanted):
                continue
            try:
                if not all(wanted):
                    raise CannotQuantizeError("only a part of the merged weight is to be quantized")
                self._quantize(gm, node, weight, ctx)
                matched += 1
            except CannotQuantizeError as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
        experts = gm.graph.find_nodes(op="call_function", target=EXPERTS)
        seen |= {weight.rpartition(".")[0] for node in experts if (weight := weight_of(op_arguments(node)["gate_up"])) is not None}
        self._check_exclusions(seen)
        return PassResult(matched=matched, near_misses=tuple(near_misses))

    def _wants(self, modules: tuple[str, ...], parameter: str, ctx: PassContext) -> bool:
        if self.scheme is None:
            return parameter in ctx.weights.stored and ctx.weights.stored[parameter].is_quantized
        return not any(fnmatchcase(module, pattern) for module in modules for pattern in self.exclude)

    def _check_exclusions(self, modules: set[str]) -> None:
        for pattern in self._must_match:
            if modules and not any(fnmatchcase(module, pattern) for module in modules):
                raise PassError(
                    f"The quantization exclusion {pattern!r} matches no linear of this model: expected a glob over module "
                    f"names such as {sorted(modules)[0]}."
                )

    def _quantize(self, gm: GraphModule, node: Node, weight: str, ctx: PassContext) -> None:
        x, weight_node = arguments(node)[:2]
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        if tensor_of(x).dim() != 2:
            raise CannotQuantizeError("its input is not [tokens, features]")
        parts = self._parts(weight, ctx)
        if isinstance(parts, ScaledParts):
            replacement = self._scaled(gm, node, x, weight_node, parts, bias, ctx)
        elif isinstance(parts, GroupedParts):
            replacement = self._grouped(gm, node, x, weight_node, parts, bias, ctx)
        else:
            raise CannotQuantizeError("there is no kernel of linears for the form in which the checkpoint holds it")
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)

    def _parts(self, weight: str, ctx: PassContext) -> Parts:
        expression = ctx.weights[weight].expression
        if self.scheme is None:
            return stored_parts(expression, ctx.weights)
        if self.scheme.group_size is not None:
            modules = {module for parameter in ctx.weights.parameters(expression) for module in _modules(parameter, ctx)}
            return grouped_parts(expression, ctx.weights, self.scheme.bits_of(modules), self.scheme.group_size)
        return quantized_parts(expression, ctx.weights, self.scheme.dtype, self.scheme.scales, self.scheme.activations)

    def _scaled(self, gm: GraphModule, node: Node, x: Node, weight_node: Node, parts: ScaledParts, bias: Any, ctx: PassContext) -> Node:
        name = f"{weight_of(weight_node)}.{dtype_name(parts.dtype)}"
        packed_value = ("pack_quantized_weight", parts.values, parts.scale)
        packed = ctx.defined_weight(gm, f"{name}.packed", packed_value, near=weight_node)
        scale = ctx.defined_weight(gm, f"{name}.scale", parts.scale, near=weight_node)
        input_scale = None
        if parts.input_scale is not None:
            input_scale = ctx.defined_weight(gm, f"{name}.input_scale", parts.input_scale, near=weight_node)
        out_features = tensor_of(weight_node).shape[0]
        args = (x, packed, scale, out_features, None, 1e-6, bias, False, None, parts.activations, input_scale)
        with gm.graph.inserting_before(node):
            return ctx.call(gm, QUANTIZED_LINEAR, *args, origin=node)

    def _grouped(self, gm: GraphModule, node: Node, x: Node, weight_node: Node, parts: GroupedParts, bias: Any, ctx: PassContext) -> Node:
        out_features, in_features = tensor_of(weight_node).shape
        if (reason := parts.slow_reason(ctx.device, ctx.dtype)) is not None:
            raise CannotQuantizeError(reason)  # a product with the dequantized weight is faster than the torch reference
        weight, order, mask = weight_of(weight_node), None, None
        packed, scale, offset = self._group_weights(gm, weight_node, parts, parts.width or in_features, ctx)
        if parts.width is not None:
            real = ("real_columns", parts.input_order, in_features)
            order = ctx.defined_weight(gm, f"{weight}.input_order", real, near=weight_node)
            is_column = ("is_column", parts.input_order, in_features)
            mask = ctx.defined_weight(gm, f"{weight}.input_mask", is_column, near=weight_node)
        elif parts.input_order is not None:
            order = ctx.defined_weight(gm, f"{weight}.input_order", parts.input_order, near=weight_node)
        with gm.graph.inserting_before(node):
            if order is not None:
                x = ctx.call(gm, torch.index_select, x, 1, order, origin=node)
            if mask is not None:
                x = ctx.call(gm, torch.mul, x, mask, origin=node)
            if parts.activations is not None:
                x = ctx.call(gm, ROUND_ACTIVATIONS, x, parts.activations, origin=node)
            others = (None, 1e-6, bias, False, None, parts.table)
            args = (x, packed, scale, offset, out_features, parts.bits, parts.group_size, *others)
            return ctx.call(gm, GROUP_LINEAR, *args, origin=node)

    def _embed(self, gm: GraphModule, node: Node, ctx: PassContext) -> int:
        """Replace an embedding over a group-quantized weight where there is a kernel. → sites"""
        ids, weight_node, *others = arguments(node)
        weight = weight_of(weight_node)
        if self.scheme is not None or weight is None or any(other not in (None, False, 2.0) for other in others):
            return 0
        stored = [ctx.weights.stored.get(name) for name in ctx.weights.parameters(ctx.weights[weight].expression)]
        if stored[0] is None or not isinstance(stored[0].parts, GroupedParts) or tensor_of(ids).dim() != 1:
            return 0
        parts = stored_parts(ctx.weights[weight].expression, ctx.weights)
        assert isinstance(parts, GroupedParts)
        reason = group_embedding_unsupported_reason(device=ctx.device, dtype=ctx.dtype, group_size=parts.group_size)
        if reason is not None:
            raise CannotQuantizeError(reason)
        rows, columns = tensor_of(weight_node).shape
        args = (ids, *self._group_weights(gm, weight_node, parts, columns, ctx), rows, columns, parts.bits, parts.group_size, ctx.dtype)
        with gm.graph.inserting_before(node):
            replacement = ctx.call(gm, GROUP_EMBEDDING, *args, origin=node)
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
        return 1

    def _group_weights(
        self, gm: GraphModule, weight_node: Node, parts: GroupedParts, in_features: int, ctx: PassContext
    ) -> tuple[Node, Node, Node | None]:
        """The packed codes, scales and offsets of a weight."""
        name = f"{weight_of(weight_node)}.{parts.bits}bits"

        def scales(of: str, values: Expression) -> Node:
            packing = ("pack_group_scales", values, in_features, parts.group_size, Text(parts.table))
            return ctx.defined_weight(gm, f"{name}.{of}", packing, near=weight_node)

        packing = ("pack_group_codes", parts.codes, parts.bits, parts.group_size, Text(parts.table))
        packed = ctx.defined_weight(gm, f"{name}.packed", packing, near=weight_node)
        offset = None if parts.offset is None else scales("offset", parts.offset)
        return packed, scales("scale", parts.scale), offset


def _modules(parameter: str, ctx: PassContext) -> tuple[str, ...]:
    """Names of the modules with this parameter; a tied one has several."""
    names = (parameter, *ctx.weights.aliases.get(parameter, ()))
    return tuple(name.rpartition(".")[0] for name in names)
