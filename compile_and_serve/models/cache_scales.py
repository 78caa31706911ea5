"""Scales of a float8 KV cache that a checkpoint brings: folded into the weights around attention, so that no kernel knows them.

The cache holds k / k_scale and v / v_scale. Attention over them is the same if queries are multiplied by k_scale and its output by v_scale:
scores are q · k_scale · (k / k_scale). All four factors multiply weights while they are loaded. Scales are first rounded up to powers of
two: then the products are exact, and float8, which has an exponent, represents the quotients as closely as before. For
the same reason, the largest of a layer's scales per head is used for all heads. Norms and quantized weights can take one factor, not one
per head. An int8 cache computes its own scales, and a checkpoint's are not used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch import nn

from compile_and_serve.models.families.llama import LlamaAttention
from compile_and_serve.models.spec import ModelSpec

# Last parts of the names of a cache's scales and of their zero points, which are 0. Those of queries and probabilities are for attention
# that multiplies float8.
CACHE_SCALES = (
    *("k_scale", "v_scale", "kv_scale", "output_scale", "q_scale", "prob_scale"),
    *("k_zero_point", "v_zero_point", "q_zero_point"),
)
_FORMS = ("{x}_scale", "attn.{x}_scale", "{x}_proj.{x}_scale", "{x}_proj.output_scale", "qkv_proj.{x}_scale", "kv_scale")


class UnfoldableScalesError(Exception):
    """Why a checkpoint's cache scales are not used, as a clause."""


def cache_scale_names(spec: ModelSpec, names: Collection[str]) -> dict[str, tuple[str | None, str | None]]:
    """Attention module → names of the scales of its keys and of its values in a checkpoint of these `names`; None: it has none."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for module in _attention_modules(spec):
        keys, values = (next((name for form in _FORMS if (name := f"{module}.{form.format(x=x)}") in names), None) for x in "kv")
        if keys is not None or values is not None:
            found[module] = (keys, values)
    return found


def weight_factors(spec: ModelSpec, scales: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Checkpoint tensor → the power of two that multiplies it. scales: attention module → k_scale, v_scale.

    Raises `UnfoldableScalesError` if an attention is not linear in its projections, a weight's scale cannot take the factor, or a scale is
    not finite.
    """
    factors: dict[str, float] = {}
    modules = _attention_modules(spec)
    for name, (k_scale, v_scale) in scales.items():
        module, k_factor, v_factor = modules[name], _power_of_two(k_scale), _power_of_two(v_scale)
        factors |= _of_output(spec, f"{name}.v_proj", 1 / v_factor)
        factors |= _of_weight(spec, f"{name}.o_proj", v_factor)
        if (stored := spec.quantized_weights.get(f"{name}.o_proj.weight")) is not None:
            factors |= {tensor.name: v_factor**-tensor.input_power for tensor in stored.tensors if tensor.input_power}
        norms = [getattr(module, norm, None) for norm in ("q_norm", "k_norm")]
        if norms == [None, None]:
            factors |= _of_output(spec, f"{name}.q_proj", k_factor) | _of_output(spec, f"{name}.k_proj", 1 / k_factor)
        elif all(isinstance(norm, nn.RMSNorm) for norm in norms) and getattr(module, "clip_qkv", None) is None:
            factors |= {f"{name}.q_norm.weight": k_factor, f"{name}.k_norm.weight": 1 / k_factor}
        else:
            raise UnfoldableScalesError(f"{type(module).__name__} is not linear in its projections or norms")
    return {tensor: factor for tensor, factor in factors.items() if factor != 1.0}


def _attention_modules(spec: ModelSpec) -> dict[str, nn.Module]:
    return {name: module for name, module in spec.module.named_modules() if isinstance(module, LlamaAttention)}


def _power_of_two(scale: float) -> float:
    """The least power of two that is not below `scale`; 1 for a scale that was not calibrated (0 or less, as in vLLM)."""
    if not math.isfinite(scale):
        raise UnfoldableScalesError("one of them is not finite")
    return 2.0 ** math.ceil(math.log2(scale)) if scale > 0 else 1.0


def _of_output(spec: ModelSpec, linear: str, factor: float) -> dict[str, float]:
    has_bias = spec.module.get_submodule(linear).bias is not None
    return _of_weight(spec, linear, factor) | ({f"{linear}.bias": factor} if has_bias else {})


def _of_weight(spec: ModelSpec, linear: str, factor: float) -> dict[str, float]:
    stored = spec.quantized_weights.get(f"{linear}.weight")
    if stored is None:
        return {f"{linear}.weight": factor}
    if factors := {tensor.name: factor**tensor.weight_power for tensor in stored.tensors if tensor.weight_power}:
        return factors
    raise UnfoldableScalesError(f"the scales of {linear} have too few exponents to take a factor")
