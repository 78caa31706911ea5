"""FlashMLA's dense decode kernels for Hopper, built already: package `sgl-flash-mla`. They run decodes of latent attention.

Its Python module is not imported: the library registers `torch.ops.flash_mla_legacy` (stable ABI of torch, CUDA 13).

The first kernel of a call may start before the kernel ahead of it in the stream has ended, and does not wait for it. This is safe only
behind a kernel that never lets the next one start early (`write_latents`: lets_next_start).

Shape legend: S sequences, Q query tokens of each, H heads, N pages, P tokens per page, C latent size, R rotary size.
"""

from __future__ import annotations

import functools
import logging
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

FLASH_MLA_PAGE = 64  # tokens
VERSION = "1.0.0"  # its ops take positional arguments, which may change from one version to the next
_LATENT, _ROPE = 512, 64


def flash_mla_unsupported_reason(
    device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype, latent_size: int, rope_size: int, page_size: int
) -> str | None:
    """None where the kernels run on the device with queries and a latent cache of this kind, else the reason in one sentence."""
    platform = platform_of(device)
    if not platform.runs_cuda_kernels or platform.compute_capability[0] != 9:
        return f"FlashMLA runs on Hopper only, not on {platform.name}"
    for what, one in (("queries", dtype), ("a cache", cache_dtype)):
        if one != torch.bfloat16:
            return f"FlashMLA is used for {what} in bfloat16, not {one}"
    if (latent_size, rope_size) != (_LATENT, _ROPE):
        return f"FlashMLA's kernels are for latents of {_LATENT} and keys of {_ROPE}, not {latent_size} and {rope_size}"
    if reason := _load():
        return reason
    return None if page_size == FLASH_MLA_PAGE else f"FlashMLA needs pages of {FLASH_MLA_PAGE} tokens, not {page_size}"


@functools.cache
def _load() -> str | None:
    """Load the library. → why it cannot be used, which is logged once, unless it is not installed"""
    try:
        package = distribution("sgl-flash-mla")
    except PackageNotFoundError:
        return "FlashMLA is not installed (package sgl-flash-mla)"
    if (reason := _load_from(package)) is not None:
        logger.warning("%s; Triton runs its steps.", reason)
    return reason


def _load_from(package: Distribution) -> str | None:
    if package.version != VERSION:
        return f"how the ops of sgl-flash-mla {package.version} are called is not known: install sgl-flash-mla=={VERSION}"
    try:
        torch.ops.load_library(str(next(Path(str(package.locate_file("flash_mla"))).glob("_C_legacy*.so"))))
        torch.ops.flash_mla_legacy.dense_decode_fwd.default  # noqa: B018
        torch.ops.flash_mla_legacy.get_mla_decoding_metadata.default  # noqa: B018
    except (OSError, AttributeError, StopIteration) as error:
        return f"sgl-flash-mla could not be loaded: {str(error) or 'its library is missing'}"
    return None


class FlashMlaDecodes:
    """A step's leading sequences, which have equally many query tokens. All layers run them alike.

    The device divides their tokens over the multiprocessors, by their lengths. In a CUDA graph, every replay does.
    """

    def __init__(self, metadata: AttentionMetadata, num_seqs: int, query_len: int, num_heads: int) -> None:
        """num_seqs, query_len: S and Q."""
        self.num_tokens = num_seqs * query_len
        self._query_len = query_len
        self._where = metadata.seq_lens[:num_seqs], metadata.block_table[:num_seqs]
        self._schedule = torch.ops.flash_mla_legacy.get_mla_decoding_metadata.default(
            self._where[0], query_len * num_heads, 1, num_heads, False, None
        )

    def run(self, q_THE: torch.Tensor, cache: torch.Tensor, scale: float) -> torch.Tensor:
        """out = softmax(scale · q kᵀ + mask) c over each sequence's entries k = (c, k_r). → [S · Q, H, C], zeros where a length is 0

        q_THE: [S · Q, H, C + R], contiguous. cache: [N, P, C + R], with contiguous pages; it holds the step's own entries.
        """
        out_SQHC: torch.Tensor = torch.ops.flash_mla_legacy.dense_decode_fwd.default(
            q_THE.unflatten(0, (-1, self._query_len)), cache[:, :, None], _LATENT, *self._where, scale, self._query_len > 1, *self._schedule
        )[0]
        return out_SQHC.flatten(0, 1)
