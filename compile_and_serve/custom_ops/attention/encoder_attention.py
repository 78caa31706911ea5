"""`cas::encoder_attention`: softmax attention both ways within each sequence of a step, without a cache; a graph is split at it.

Shape legend: T tokens of the step, H query heads, K key/value heads (H % K == 0), E head size, B tokens of a sequence, S sequences of one
length, R distances.

Sequences lie packed one after another on T, without padding between them. Where they begin is not an argument: the op reads the running
step's `StepLengths`, so that a graph has one dynamic dimension.
"""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import ROWS, OpKind, Sharding, define
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, current_metadata

_PACKED_DTYPES = (torch.float16, torch.bfloat16)  # of torch's kernel for packed sequences


def _encoder_attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    scale: float,
    window: int = 0,
    distance_bias_HR: torch.Tensor | None = None,
) -> torch.Tensor:
    lengths: StepLengths = current_metadata(SEQUENCES)
    is_plain = not window and distance_bias_HR is None
    if distance_bias_HR is None and q_THE.dtype in _PACKED_DTYPES and platform_of(q_THE.device).runs_cuda_kernels:
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = lengths.query_start_loc[: lengths.num_seqs + 1], lengths.max_query_len
        options: dict[str, Any] = {"window_size": (window, window)} if window else {}
        if q_THE.shape[1] != k_TKE.shape[1]:
            options["enable_gqa"] = True
        packed_THE = varlen_attn(q_THE, k_TKE, v_TKE, starts, starts, longest, longest, scale=scale, **options)
        assert isinstance(packed_THE, torch.Tensor)
        return packed_THE
    on_host = lengths.query_start_loc if lengths.query_start_loc_cpu is None else lengths.query_start_loc_cpu
    starts_of = on_host[: lengths.num_seqs + 1].tolist()
    out_THE = q_THE.new_zeros(q_THE.shape)
    begin = 0
    for size, alike in groupby(end - begin for begin, end in pairwise(starts_of)):  # neighbours of one length are one batch
        count = len(list(alike))
        part = slice(begin, begin + count * size)
        q_SHBE, k_SKBE, v_SKBE = (x[part].unflatten(0, (count, size)).transpose(1, 2) for x in (q_THE, k_TKE, v_TKE))
        out_SHBE = F.scaled_dot_product_attention(
            q_SHBE,
            k_SKBE,
            v_SKBE,
            attn_mask=None if is_plain else _mask(size, window, distance_bias_HR, q_THE),
            scale=scale,
            enable_gqa=q_SHBE.shape[1] != k_SKBE.shape[1],
        )
        out_THE[part] = out_SHBE.transpose(1, 2).flatten(0, 1)
        begin += count * size
    return out_THE


def _mask(size: int, window: int, distance_bias_HR: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """What is added to the scores of a sequence of `size` tokens: [1 or H, B, B] in the dtype of `like`."""
    places = torch.arange(size, device=like.device)
    distance_BB = places - places[:, None]
    if distance_bias_HR is None:
        mask = torch.zeros(1, size, size, dtype=like.dtype, device=like.device)
    else:
        middle = distance_bias_HR.shape[1] // 2
        mask = distance_bias_HR[:, (distance_BB + middle).clamp(0, 2 * middle)].to(like.dtype)
    return mask.masked_fill(distance_BB.abs() > window, float("-inf")) if window else mask


ENCODER_ATTENTION = define(
    "encoder_attention(Tensor q, Tensor k, Tensor v, float scale, int window=0, Tensor? distance_bias=None) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q_THE, *_: q_THE.new_empty(q_THE.shape),
    sharding=Sharding(inputs={"q": 1, "k": 1, "v": 1}, output=1, weights={"distance_bias": ROWS}, shared_inputs=("k", "v")),
    CompositeExplicitAutograd=_encoder_attention,
)


def encoder_attention(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    distance_bias_HR: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + bias) v among the tokens of each sequence. → [T, H, E] in q's dtype

    q_THE: [T, H, E]; k_TKE, v_TKE: [T, K, E]. window: a token reads those up to `window` before and behind it; 0: all.
    distance_bias_HR: a number for each head and distance j - i from -(R // 2) to R // 2, R odd; farther ones have that of the last.
    Rows of padding get any finite value.
    """
    return ENCODER_ATTENTION(q_THE, k_TKE, v_TKE, scale, window, distance_bias_HR)
