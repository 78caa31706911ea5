"""FlashAttention-3's forward kernels for Hopper, built already: package `fa3-fwd`. Prompts run in them from the first one on.

The package has no kernels for pages, windows or float16. Its Python module is not imported: the library registers `torch.ops.fa3_fwd`
(stable ABI of torch, CUDA 13), with the signature of FlashAttention-3's hopper/flash_api_stable.cpp.

Shape legend: T query rows, L key rows, S segments, H query heads, K key/value heads (H % K == 0), E head size, V size of a value.
"""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of

logger = logging.getLogger(__name__)

# FA3 runs steps with a prompt of at least FA3_MIN_QUERY_LEN tokens, or with FA3_MIN_TOKENS tokens of prompts. For smaller steps Triton's
# kernel takes up to a quarter longer, but needs no plan and less host time. Microseconds on an H200 with Llama-3.1-8B's heads, FA3 and
# Triton: 4 prompts of 544 tokens 59 and 70, 30 of 544 365 and 498, 80 of 200 287 and 415, 32 of 64 47 and 44.
FA3_MIN_QUERY_LEN, FA3_MIN_TOKENS = 1024, 4096
EXPANDED_BYTES = 512 << 20  # of a step's packed keys and values, where they are made for it: e.g. 131072 tokens of 8 heads of 128 values
_MAX_HEAD_DIM = 256


def flash_attention3_unavailable_reason(device: torch.device) -> str | None:
    """None where the kernels run on the device, else the reason in one sentence."""
    platform = platform_of(device)
    if not platform.runs_cuda_kernels or platform.compute_capability[0] != 9:
        return f"FlashAttention-3 runs on Hopper only, not on {platform.name}"
    return _load()


def flash_attention3_unsupported_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int | None = None
) -> str | None:
    """None where the kernels run on the device with queries, keys and values of this kind, else the reason in one sentence.

    value_dim: the size of a value; None: head_dim.
    """
    if dtype != torch.bfloat16:
        return f"FlashAttention-3 computes in bfloat16, not {dtype}"
    if value_dim is None or value_dim == head_dim:
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            return f"FlashAttention-3 needs a head size that is a multiple of 8 and at most {_MAX_HEAD_DIM}, not {head_dim}"
    elif not (128 < head_dim <= 192 and 96 < value_dim <= 128 and head_dim % 8 == value_dim % 8 == 0):
        return f"FlashAttention-3 has no kernel for keys of {head_dim} and values of {value_dim}"
    return flash_attention3_unavailable_reason(device)


def flash_attention3_runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels run on the device with queries, keys and values of this kind."""
    return flash_attention3_unsupported_reason(device, dtype, head_dim) is None


@functools.cache
def _load() -> str | None:
    """Load the library. → why it cannot be used, which is logged once, unless it is not installed"""
    found = find_spec("fa3_fwd")
    if found is None:
        return "FlashAttention-3 is not installed (package fa3-fwd, extra [cuda])"
    try:
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        torch.ops.load_library(str(next(file for folder in folders for file in folder.glob("_C*.so"))))
        torch.ops.fa3_fwd.fwd.default  # noqa: B018
    except (OSError, AttributeError, StopIteration) as error:
        reason = f"fa3-fwd could not be loaded: {str(error) or 'its library is missing'}"
        logger.warning("%s; FlashInfer or Triton run its steps.", reason)
        return reason
    return None


def flash_attention3(
    q_THE: torch.Tensor,
    k_LKE: torch.Tensor,
    v_LKV: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: tuple[int, int],
    scale: float,
    out_THV: torch.Tensor,
    *,
    is_causal: bool,
    soft_cap: float = 0.0,
) -> None:
    """out = softmax(scale · q kᵀ) v within each segment. Rows outside of segments of out_THV stay as they are.

    All bfloat16, elements of a head contiguous. query_starts, key_starts: int32 [S + 1], where segments begin, and the last one's end.
    longest: the most queries and the most keys of a segment. is_causal: a segment's last query reads all of its keys, the one before it
    one less. soft_cap: 0: none.
    """
    torch.ops.fa3_fwd.fwd.default(
        q_THE,
        k_LKE,
        v_LKV,
        out=out_THV,
        cu_seqlens_q=query_starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=scale,
        is_causal=is_causal,
        softcap=soft_cap,
        num_splits=1,
    )


class FlashAttention3Prompts:
    """The prompts of a step, which all layers run alike. Its keys lie packed, without pages."""

    variant = "fa3"
    kernels = "fa3-fwd"
    is_ragged = True

    def __init__(self, device: torch.device, scale: float, soft_cap: float) -> None:
        self._platform = platform_of(device)
        self._scale, self._soft_cap = scale, soft_cap

    def plan(self, query_start_loc: np.ndarray, seq_lens: np.ndarray, key_start_loc: np.ndarray) -> None:
        """Starts: int32 [S + 1], where each prompt's queries and keys begin, from 0. seq_lens: int32 [S], of keys."""
        starts = self._platform.upload(query_start_loc)
        self._starts = starts, starts if key_start_loc is query_start_loc else self._platform.upload(key_start_loc)
        self._longest = int(np.diff(query_start_loc).max()), int(seq_lens.max())

    def run(self, q_THE: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_THV: torch.Tensor) -> None:
        """Attend as planned. keys: [L, K, E], values: [L, K, V]."""
        flash_attention3(q_THE, keys, values, *self._starts, self._longest, self._scale, out_THV, is_causal=True, soft_cap=self._soft_cap)
