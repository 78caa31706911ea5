"""Attention within segments of an encoder's step, both ways and without a cache.

A token of the step may stand for several rows (an image's patches, which the encoder merges into one token). The segments are the items of
the step, or windows of them.

Shape legend: T tokens of the step, M rows of a token, N = T · M rows, H heads, E head size, W windows.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
import torch.nn.functional as functional

from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, current_metadata

_VARIABLE_LENGTH_DTYPES = (torch.float16, torch.bfloat16)  # of torch's kernel for packed sequences


def _segment_attention(
    q_TMHE: torch.Tensor, k_TMHE: torch.Tensor, v_TMHE: torch.Tensor, ends_T: torch.Tensor | None, max_window: int, scale: float
) -> torch.Tensor:
    num_tokens, rows = q_TMHE.shape[:2]
    lengths: StepLengths = current_metadata(SEQUENCES)
    q_NHE, k_NHE, v_NHE = (x_TMHE.flatten(0, 1) for x_TMHE in (q_TMHE, k_TMHE, v_TMHE))
    if platform_of(q_TMHE.device).runs_cuda_kernels and q_TMHE.dtype in _VARIABLE_LENGTH_DTYPES:
        if ends_T is None:
            starts, longest = lengths.query_start_loc[: lengths.num_seqs + 1] * rows, lengths.max_query_len
        else:
            starts, longest = functional.pad(ends_T.clamp(max=num_tokens).cummax(0).values.to(torch.int32) * rows, (1, 0)), max_window
        from torch.nn.attention.varlen import varlen_attn

        packed_NHE = varlen_attn(q_NHE, k_NHE, v_NHE, starts, starts, longest * rows, longest * rows, scale=scale)
        assert isinstance(packed_NHE, torch.Tensor)
        return packed_NHE.view(q_TMHE.shape)
    if ends_T is None:
        on_host = lengths.query_start_loc if lengths.query_start_loc_cpu is None else lengths.query_start_loc_cpu
        starts_of = on_host[: lengths.num_seqs + 1].tolist()
    else:
        starts_of = [0, *ends_T.clamp(0, num_tokens).cummax(0).values.tolist()]
    out_NHE = q_NHE.new_zeros(q_NHE.shape)
    begin = 0
    for size, alike in groupby(end - begin for begin, end in pairwise(starts_of) if end > begin):  # windows of a size are one batch
        count = len(list(alike))
        part = slice(begin * rows, (begin + count * size) * rows)
        q_WHNE, k_WHNE, v_WHNE = (x_NHE[part].unflatten(0, (count, size * rows)).transpose(1, 2) for x_NHE in (q_NHE, k_NHE, v_NHE))
        out_WHNE = functional.scaled_dot_product_attention(q_WHNE, k_WHNE, v_WHNE, scale=scale)
        out_NHE[part] = out_WHNE.transpose(1, 2).flatten(0, 1)
        begin += count * size
    return out_NHE.view(q_TMHE.shape)


def segment_attention(
    q_TMHE: torch.Tensor,
    k_TMHE: torch.Tensor,
    v_TMHE: torch.Tensor,
    scale: float,
    *,
    ends_T: torch.Tensor | None = None,
    max_window: int = 0,
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v among the rows of each segment. [T, M, H, E] each

    ends_T: int32, the first entries are where windows end, in tokens, ascending; the others are 0 or repeat the last one. None: the
    segments are the items of the step. max_window: tokens of the longest window. Rows outside of any segment get any value.
    """
    return _OP(q_TMHE, k_TMHE, v_TMHE, ends_T, max_window, scale)


_OP = define(
    "segment_attention(Tensor q, Tensor k, Tensor v, Tensor? ends, int max_window, float scale) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q, k, v, ends, max_window, scale: q.new_empty(q.shape),
    sharding=Sharding(inputs={"q": 2, "k": 2, "v": 2}, output=2),
    CompositeExplicitAutograd=_segment_attention,
)
