"""`cas::rope_attention_quantize`: `cas::rope_attention`, whose output also comes rounded to 8 bits for the linear behind it.

Shape legend: T tokens of the step, H query heads, K key/value heads, E head size, I = H · E features, G = ceil(I / 128) groups of them,
N cache blocks, P tokens a block.

A backend with a `rope_quantize_forward` may do it in one kernel; where it has none for a step, the op rounds what `cas::rope_attention`
gives.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata, current_metadata
from compile_and_serve.custom_ops.attention.rope_attention import _rope_attention, _rope_attention_fake
from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.quantized.quantization import Rounded, RoundTo, quantize_activations
from compile_and_serve.custom_ops.quantized.quantized_linear import cuda_unsupported_reason, reads_rounded

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RopeQuantizeBackend(Protocol):
    """What an attention backend adds to hand its output over rounded."""

    def rope_quantize_forward(
        self,
        qkv: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        kv_cache: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        q_norm_weight_E: torch.Tensor | None,
        k_norm_weight_E: torch.Tensor | None,
        eps: float,
        metadata: AttentionMetadata,
        round_to: RoundTo,
    ) -> Three | None:
        """As `rope_attention_quantize`, with the metadata handed over; None, and nothing done, where this step is none for it."""
        ...


def _rope_attention_quantize(qkv: torch.Tensor, *rest: Any) -> Three:
    *rope, dtype, per_group, input_scale, round_one_token = rest  # of the op's schema
    args: tuple[Any, ...] = (qkv, *rope)
    round_to = _round_to(dtype, per_group, input_scale)
    if not (round_one_token or reads_rounded(qkv.shape[0], qkv.device, per_block=per_group)):
        out_TI = _rope_attention(*args)
        return out_TI, *round_to.empty(out_TI)
    metadata = current_metadata()
    if hasattr(metadata.backend, "rope_quantize_forward"):
        backend = cast(RopeQuantizeBackend, metadata.backend)
        if (fused := backend.rope_quantize_forward(*(*args, metadata, round_to))) is not None:
            return fused
    out_TI = _rope_attention(*args)
    return out_TI, *_quantize(out_TI, round_to)


def _quantize(x_TI: torch.Tensor, round_to: RoundTo) -> Rounded:
    if x_TI.is_cuda and cuda_unsupported_reason(x_TI.device, round_to.dtype) is None:
        from compile_and_serve.custom_ops.quantized.triton_quantize import (
            quantize_rows,  # Triton is imported where it is used
        )

        return quantize_rows(x_TI, round_to.dtype, per_group=round_to.per_group, input_scale=round_to.input_scale)
    values_TI, scale = quantize_activations(
        x_TI, round_to.dtype, per_group=round_to.per_group, input_scale=round_to.input_scale
    )
    return values_TI.contiguous(), scale.to(torch.float32).contiguous()


def _round_to(dtype: str, per_group: bool, input_scale: torch.Tensor | None) -> RoundTo:
    return RoundTo(dtype=getattr(torch, dtype), per_group=per_group, input_scale=input_scale)


def _rope_attention_quantize_fake(*args: Any) -> Three:
    *rope, dtype, per_group, input_scale, _ = args
    out_TI = _rope_attention_fake(*rope)
    return out_TI, *_round_to(dtype, per_group, input_scale).empty(out_TI)


def exact_rope_attention_quantize(*args: Any) -> Three:
    """`rope_attention_quantize`, but nothing is rounded and all scales are 1: what verification compares."""
    *rope, _, _, _, _ = args
    out_TI = _rope_attention(*rope)
    return out_TI, out_TI.clone(), out_TI.new_ones(out_TI.shape[0], 1)


_rope_attention_quantize_op = define(
    "rope_attention_quantize(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) kv_cache, int num_heads, int num_kv_heads, float scale, "
    "Tensor? q_norm_weight, Tensor? k_norm_weight, float eps, str dtype, bool per_group, Tensor? input_scale, bool round_one_token) "
    "-> (Tensor, Tensor, Tensor)",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=_rope_attention_quantize_fake,
    CompositeExplicitAutograd=_rope_attention_quantize,
)


def rope_attention_quantize(
    qkv: torch.Tensor,
    cos_TE: torch.Tensor,
    sin_TE: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    q_norm_weight_E: torch.Tensor | None = None,
    k_norm_weight_E: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per_group: bool = False,
    input_scale: torch.Tensor | None = None,
    round_one_token: bool = True,
) -> Three:
    """out = `rope_attention` of the arguments before the star, and out as `quantize_activations` rounds it to `dtype`.

    dtype: float8_e4m3fn or int8; per_group: a scale for each 128 features of a token, not one for all; input_scale: float32, one value:
    the scale; not with per_group. round_one_token: False where the rounded output goes to `quantized_linear` as it is: what that does
    not read (`reads_rounded`) is left unwritten.
    → [T, I] in qkv's dtype, `dtype` [T, I], float32 [T, 1] or, per_group, [T, G]; all contiguous. On CUDA as `quantize_rows` rounds.
    """
    return _rope_attention_quantize_op(
        qkv, cos_TE, sin_TE, kv_cache, num_heads, num_kv_heads, scale, q_norm_weight_E, k_norm_weight_E, eps,
        str(dtype).removeprefix("torch."), per_group, input_scale, round_one_token,
    )  # fmt: skip
