"""Advances the inputs of a decode step on the device, so that the host can launch the next step without writing any.

Shape legend: R slots of running requests, S rows of the step (sequences or padding), M block-table columns, P tokens per block.

`begin_decodes` runs before the model, `end_decodes` after sampling. The inputs of a step stay unchanged until the next step begins, so that
they can be read after the step, for example to sample again. Between two steps of the same sequences, the host only writes block-table
columns where a sequence enters a new block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import cdiv, launch_options, supports_pdl, wait_for_previous

_ROWS = 128  # per program


@triton.jit(do_not_specialize=["num_rows"])
def _begin_kernel(
    last_tokens_ptr,
    slots_ptr,
    has_run_ptr,
    positions_ptr,
    seq_lens_ptr,
    sample_positions_ptr,
    block_table_ptr,
    input_ids_ptr,
    slot_mapping_ptr,
    num_rows,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows_S = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ok_S = rows_S < num_rows
    seq_len_S = tl.load(seq_lens_ptr + rows_S, mask=ok_S, other=0)
    is_real_S = seq_len_S > 0
    slot_S = tl.load(slots_ptr + rows_S, mask=is_real_S, other=0)
    position_S = tl.load(positions_ptr + rows_S, mask=is_real_S, other=0)
    sampled_S = tl.load(sample_positions_ptr + rows_S, mask=is_real_S, other=0)
    step_S = tl.load(has_run_ptr + rows_S, mask=is_real_S, other=0)  # 1: the arrays are the previous step's
    position_S += step_S
    tl.store(positions_ptr + rows_S, position_S, mask=is_real_S)
    tl.store(seq_lens_ptr + rows_S, seq_len_S + step_S, mask=is_real_S)
    tl.store(sample_positions_ptr + rows_S, sampled_S + step_S, mask=is_real_S)
    tl.store(input_ids_ptr + rows_S, tl.load(last_tokens_ptr + slot_S, mask=is_real_S, other=0), mask=ok_S)
    if block_table_ptr is not None:
        at_S = block_table_ptr + rows_S.to(tl.int64) * table_stride + position_S // BLOCK_SIZE
        block_S = tl.load(at_S, mask=is_real_S, other=0).to(tl.int64)
        tl.store(slot_mapping_ptr + rows_S, tl.where(is_real_S, block_S * BLOCK_SIZE + position_S % BLOCK_SIZE, -1), mask=ok_S)


@triton.jit(do_not_specialize=["num_rows"])
def _end_kernel(tokens_ptr, last_tokens_ptr, slots_ptr, has_run_ptr, seq_lens_ptr, num_rows, ROWS: tl.constexpr, PDL: tl.constexpr):
    rows_S = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait_for_previous(PDL)
    is_real_S = tl.load(seq_lens_ptr + rows_S, mask=rows_S < num_rows, other=0) > 0
    slot_S = tl.load(slots_ptr + rows_S, mask=is_real_S, other=0)
    tl.store(last_tokens_ptr + slot_S, tl.load(tokens_ptr + rows_S, mask=is_real_S, other=0), mask=is_real_S)
    tl.store(has_run_ptr + rows_S, tl.full((ROWS,), 1, tl.int32), mask=is_real_S)


def begin_decodes(
    last_tokens_R: torch.Tensor,
    slots_S: torch.Tensor,
    has_run_S: torch.Tensor,
    positions_S: torch.Tensor,
    seq_lens_S: torch.Tensor,
    sample_positions_S: torch.Tensor,
    block_table_SM: torch.Tensor | None,
    input_ids_S: torch.Tensor,
    slot_mapping_S: torch.Tensor | None,
    block_size: int,
) -> None:
    """positions, seq_lens and sample_positions += has_run; input_ids = last_tokens[slots];
    slot_mapping = block · P + position % P, where block is column position // P of the row's table.

    has_run_S: int32 [S], 1 where a step has run with the current arrays, else 0. seq_lens_S: int32 [S]; 0: the row is padding, which
    gets token 0 and slot -1 and does not advance. block_table_SM: int32 [S, M], rows may be strided; None: there are no blocks, and no slot
    mapping. All others are int64. Advanced positions are less than M · P.
    """
    num_rows = slots_S.shape[0]
    launch(
        _begin_kernel,
        (cdiv(num_rows, _ROWS),),
        last_tokens_R,
        slots_S,
        has_run_S,
        positions_S,
        seq_lens_S,
        sample_positions_S,
        block_table_SM,
        input_ids_S,
        slot_mapping_S,
        num_rows,
        0 if block_table_SM is None else block_table_SM.stride(0),
        BLOCK_SIZE=block_size,
        ROWS=_ROWS,
        num_warps=4,
    )


def end_decodes(
    tokens_S: torch.Tensor, last_tokens_R: torch.Tensor, slots_S: torch.Tensor, has_run_S: torch.Tensor, seq_lens_S: torch.Tensor
) -> None:
    """last_tokens[slots] = tokens; has_run = 1. Rows of length 0 do not change.

    has_run_S, seq_lens_S: int32 [S]; all others are int64. Rows that are not padding have different slots.
    """
    num_rows, pdl = slots_S.shape[0], supports_pdl(slots_S.device)
    launch(
        _end_kernel,
        (cdiv(num_rows, _ROWS),),
        tokens_S,
        last_tokens_R,
        slots_S,
        has_run_S,
        seq_lens_S,
        num_rows,
        ROWS=_ROWS,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
