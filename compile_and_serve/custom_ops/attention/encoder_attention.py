"""`cas::encoder_attention`: softmax attention both ways within segments of a step, without a cache; a graph is split at it.

Shape legend: T tokens of the step, M rows of a token, N = T · M rows, H query heads, K key/value heads (H % K == 0), E head size,
B rows of a segment, S segments of one length, F distances, R columns of a bias.

Segments lie packed one after another, without padding between them. They are the sequences of the step, which are not an argument: the op
reads the running step's `StepLengths`, so that a graph has one dynamic dimension. Or they are windows of those, whose ends the model gives.
A token may stand for several rows (an image's patches, which the encoder merges into one token).
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.attention.flash_attention3 import flash_attention3, flash_attention3_runs
from compile_and_serve.custom_ops.compat import packed_attention
from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.library import ROWS, OpKind, Sharding, define
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, current_metadata

_PACKED_DTYPES = (torch.float16, torch.bfloat16)  # of torch's kernel for packed sequences
_CPU_DTYPES = (torch.float32, torch.bfloat16)
_MAX_CPU_HEAD_DIM = 512
_MAX_CPU_GROUP = 96


def _encoder_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int = 0,
    columns_F: torch.Tensor | None = None,
    distance_bias_HR: torch.Tensor | None = None,
    key_places_RHE: torch.Tensor | None = None,
    query_places_RHE: torch.Tensor | None = None,
    ends_T: torch.Tensor | None = None,
    max_segment: int = 0,
) -> torch.Tensor:
    rows = q.shape[1] if q.dim() == 4 else 1
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v))
    platform = platform_of(q.device)
    if columns_F is None and q.dtype in _PACKED_DTYPES and platform.runs_cuda_kernels:
        starts, longest = _starts_on_device(ends_T, q.shape[0], max_segment, rows)
        if not window and flash_attention3_runs(q.device, q.dtype, q.shape[-1]):
            out_NHE = torch.empty(q_NHE.shape, dtype=q.dtype, device=q.device)
            flash_attention3(q_NHE, k_NKE, v_NKE, starts, starts, (longest, longest), scale, out_NHE, is_causal=False)
            return out_NHE.view(q.shape)
        return packed_attention(q_NHE, k_NKE, v_NKE, starts, longest, scale, window).view(q.shape)
    query_bias_NHR = None if key_places_RHE is None else _products(q_NHE, key_places_RHE, scale)
    key_bias_NHR = None if query_places_RHE is None else _products(k_NKE, query_places_RHE, scale)
    biases = (columns_F, distance_bias_HR, query_bias_NHR, key_bias_NHR)
    if platform.runs_cuda_kernels:
        from compile_and_serve.custom_ops.attention.triton_encoder import (
            triton_encoder_attention,  # imported here, because Triton may be missing
        )

        q_NHE, k_NKE, v_NKE = (x if x.stride(2) == 1 else x.contiguous() for x in (q_NHE, k_NKE, v_NKE))
        on_device = _starts_on_device(ends_T, q.shape[0], max_segment, rows)
        return triton_encoder_attention(q_NHE, k_NKE, v_NKE, *on_device, scale, window, *biases).view(q.shape)
    starts = _starts_on_host(ends_T, q.shape[0]) * rows
    if platform.runs_cpp_kernels and _has_cpu_kernel(q_NHE, k_NKE):
        return torch.ops.cas.cpu_encoder_attention.default(q_NHE, k_NKE, v_NKE, starts, scale, window, *biases).view(q.shape)
    out_NHE = q_NHE.new_zeros(q_NHE.shape)
    begin = int(starts[0])
    sizes = [end - start for start, end in pairwise(starts.tolist()) if end > start]
    for size, alike in groupby(sizes):  # neighbours of one length are one batch
        count = len(list(alike))
        part = slice(begin, begin + count * size)
        q_SHBE, k_SKBE, v_SKBE = (x[part].unflatten(0, (count, size)).transpose(1, 2) for x in (q_NHE, k_NKE, v_NKE))
        mask = None
        if window or columns_F is not None:
            by_query, by_key = (None if x is None else x[part].unflatten(0, (count, size)) for x in (query_bias_NHR, key_bias_NHR))
            mask = _mask(size, window, columns_F, distance_bias_HR, by_query, by_key, q)
        out_SHBE = F.scaled_dot_product_attention(
            q_SHBE, k_SKBE, v_SKBE, attn_mask=mask, scale=scale, enable_gqa=q_SHBE.shape[1] != k_SKBE.shape[1]
        )
        out_NHE[part] = out_SHBE.transpose(1, 2).flatten(0, 1)
        begin += count * size
    return out_NHE.view(q.shape)


def _products(x_NHE: torch.Tensor, places_RHE: torch.Tensor, scale: float) -> torch.Tensor:
    """→ [N, H, R]"""
    return torch.matmul((x_NHE * scale).transpose(0, 1), places_RHE.permute(1, 2, 0)).transpose(0, 1)


def _starts_on_device(ends_T: torch.Tensor | None, num_tokens: int, max_segment: int, rows: int) -> tuple[torch.Tensor, int]:
    """Where segments begin, and the last one's end, and the longest one's length, in rows."""
    lengths: StepLengths = current_metadata(SEQUENCES)
    if ends_T is None:
        starts, longest = lengths.query_start_loc[: lengths.num_seqs + 1], lengths.max_query_len
    else:
        # A kernel runs programs for each segment. An image of 1369 tokens has 100 windows, and 1269 entries that end none.
        ends_S = _ends(ends_T, num_tokens)[: lengths.num_segments]
        starts, longest = F.pad(ends_S.to(torch.int32), (1, 0)), max_segment
    return (starts if rows == 1 else starts * rows), longest * rows


def _ends(ends_T: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return ends_T.clamp(0, num_tokens).cummax(0).values


def _starts_on_host(ends_T: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """Where segments begin, and the last one's end, in tokens: int32 on the host."""
    if ends_T is not None:
        return F.pad(_ends(ends_T, num_tokens).to("cpu", torch.int32), (1, 0))
    lengths: StepLengths = current_metadata(SEQUENCES)
    on_host = lengths.query_start_loc_cpu
    starts = lengths.query_start_loc.cpu() if on_host is None else torch.from_numpy(on_host)
    return starts[: lengths.num_seqs + 1]


def _has_cpu_kernel(q_NHE: torch.Tensor, k_NKE: torch.Tensor) -> bool:
    head_dim, group = q_NHE.shape[2], q_NHE.shape[1] // k_NKE.shape[1]
    fits = q_NHE.dtype in _CPU_DTYPES and head_dim % 16 == 0 and head_dim <= _MAX_CPU_HEAD_DIM and group <= _MAX_CPU_GROUP
    return fits and load_cpu_kernels()


def _mask(
    size: int,
    window: int,
    columns_F: torch.Tensor | None,
    distance_bias_HR: torch.Tensor | None,
    query_bias_SBHR: torch.Tensor | None,
    key_bias_SBHR: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """What is added to the scores of segments of `size` rows: [1 or S, 1 or H, B, B] in the dtype of `like`."""
    places = torch.arange(size, device=like.device)
    distance_BB = places - places[:, None]
    mask = torch.zeros(1, 1, size, size, device=like.device)
    if columns_F is not None:
        middle = columns_F.shape[0] // 2
        columns_BB = columns_F[(distance_BB + middle).clamp(0, 2 * middle)].long()
        if distance_bias_HR is not None:
            mask = mask + distance_bias_HR[:, columns_BB]
        if query_bias_SBHR is not None:
            by_query_SHBR = query_bias_SBHR.transpose(1, 2)
            mask = mask + by_query_SHBR.gather(3, columns_BB.expand(*by_query_SHBR.shape[:3], -1))
        if key_bias_SBHR is not None:
            by_key_SHBR = key_bias_SBHR.transpose(1, 2)
            mask = mask + by_key_SHBR.gather(3, columns_BB.t().expand(*by_key_SHBR.shape[:3], -1)).transpose(2, 3)
    mask = mask.to(like.dtype)
    return mask.masked_fill(distance_BB.abs() > window, float("-inf")) if window else mask


ENCODER_ATTENTION = define(
    "encoder_attention(Tensor q, Tensor k, Tensor v, float scale, int window=0, Tensor? columns=None, Tensor? distance_bias=None, "
    "Tensor? key_places=None, Tensor? query_places=None, Tensor? ends=None, int max_segment=0) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=2,
    fake=lambda q, *_: q.new_empty(q.shape),
    sharding=Sharding(
        inputs={"q": -2, "k": -2, "v": -2, "key_places": -2, "query_places": -2},
        output=-2,
        weights={"distance_bias": ROWS},
        shared_inputs=("k", "v"),
    ),
    CompositeExplicitAutograd=_encoder_attention,
)


def encoder_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    columns_F: torch.Tensor | None = None,
    distance_bias_HR: torch.Tensor | None = None,
    key_places_RHE: torch.Tensor | None = None,
    query_places_RHE: torch.Tensor | None = None,
    ends_T: torch.Tensor | None = None,
    max_segment: int = 0,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + bias) v among the rows of each segment. → q's shape and dtype

    q: [T, H, E] or [T, M, H, E]; k, v: the same with K heads. window: a row reads those up to `window` before and behind it; 0: all.
    columns_F: the column of the biases for each distance from -(F // 2) to F // 2 of a key from its query, F odd; farther ones have that of
    the last. A key j of a query i with the column c has the bias distance_bias[h, c], and scale · q_i key_places[c, h] and
    scale · k_j query_places[c, h] (DeBERTa, arXiv:2006.03654), of those that are given.
    ends_T: int32, the first entries are where segments end, in tokens, ascending; the others are 0 or repeat the last one. None: the
    segments are the sequences of the step. max_segment: tokens of the longest of them. Rows outside of any segment get any finite value.
    """
    return ENCODER_ATTENTION(q, k, v, scale, window, columns_F, distance_bias_HR, key_places_RHE, query_places_RHE, ends_T, max_segment)
