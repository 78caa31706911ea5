"""`slots_of_pairs` of `placement.py` on CUDA, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv, launch_options, let_next_start, supports_pdl, wait_for_previous

_BLOCK = 512


@triton.jit(do_not_specialize=["num_pairs"])
def _slots_kernel(ids_ptr, placement_ptr, slots_ptr, num_pairs, top_k, turns, BLOCK_P: tl.constexpr, PDL: tl.constexpr):
    pairs_P = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    ok_P = pairs_P < num_pairs
    let_next_start(PDL)
    wait_for_previous(PDL)
    experts_P = tl.load(ids_ptr + pairs_P, mask=ok_P, other=0).to(tl.int32)
    slots_P = tl.load(placement_ptr + experts_P * turns + pairs_P // top_k % turns, mask=ok_P, other=0)
    tl.store(slots_ptr + pairs_P, slots_P, mask=ok_P)


def slots_of_pairs(ids_TK: torch.Tensor, placement_XC: torch.Tensor) -> torch.Tensor:
    """See `placement.slots_of_pairs`. The host does not wait."""
    ids_TK, (num_tokens, top_k) = ids_TK.contiguous(), ids_TK.shape
    slots_TK = torch.empty(num_tokens, top_k, dtype=torch.int32, device=ids_TK.device)
    if num_tokens == 0:
        return slots_TK
    pdl = supports_pdl(ids_TK.device)
    launch(
        _slots_kernel,
        (cdiv(ids_TK.numel(), _BLOCK),),
        ids_TK,
        placement_XC,
        slots_TK,
        ids_TK.numel(),
        top_k,
        placement_XC.shape[1],
        BLOCK_P=_BLOCK,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return slots_TK
