"""The step's own inputs, advanced on the device: what a decode step needs of the step before never visits the host.

Shape legend: S sequences, M block-table columns, P tokens a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs"])
def _advance_kernel(
    sampled_ptr, input_ids_ptr, positions_ptr, seq_lens_ptr, slot_ptr, block_table_ptr, num_seqs, table_stride, num_columns,
    BLOCK_SIZE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    rows_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    ok_S = rows_S < num_seqs
    seq_len_S = tl.load(seq_lens_ptr + rows_S, mask=ok_S, other=0)
    live_S = ok_S & (seq_len_S > 0)
    column_S = seq_len_S // BLOCK_SIZE
    room_S = live_S & (column_S < num_columns)
    block_S = tl.load(block_table_ptr + rows_S.to(tl.int64) * table_stride + column_S, mask=room_S, other=-1).to(
        tl.int64
    )
    grows_S = room_S & (block_S >= 0)
    slot_S = tl.where(grows_S, block_S * BLOCK_SIZE + seq_len_S % BLOCK_SIZE, -1)
    tl.store(input_ids_ptr + rows_S, tl.load(sampled_ptr + rows_S, mask=grows_S, other=0), mask=grows_S)
    tl.store(positions_ptr + rows_S, seq_len_S.to(tl.int64), mask=grows_S)
    tl.store(seq_lens_ptr + rows_S, seq_len_S + 1, mask=grows_S)
    tl.store(slot_ptr + rows_S, slot_S, mask=ok_S)


def advance_step(
    sampled_S: torch.Tensor,
    input_ids_S: torch.Tensor,
    positions_S: torch.Tensor,
    seq_lens_S: torch.Tensor,
    slot_mapping_S: torch.Tensor,
    block_table_SM: torch.Tensor,
    block_size: int,
) -> None:
    """Turn a decode step's inputs into the next step's, in place, in one launch that a graph may capture.

    For each live sequence (seq_len > 0): input id = its sampled token, position = its old length, seq_len += 1, and the slot of the
    new position from its block table. Rows with seq_len 0 are padding and stay so. A row whose next block is not there (-1, or past
    the table) does not advance either: it gets slot -1, so that the next step writes nothing for it, and that step's token is void.
    sampled_S, positions_S, slot_mapping_S: int64 [S]; input_ids_S: int64 [S]; seq_lens_S: int32 [S]; block_table_SM: int32 [S, M].
    """
    num_seqs = sampled_S.shape[0]
    if num_seqs == 0:
        return
    block_s = min(256, triton.next_power_of_2(num_seqs))
    _advance_kernel[(triton.cdiv(num_seqs, block_s),)](
        sampled_S, input_ids_S, positions_S, seq_lens_S, slot_mapping_S, block_table_SM,
        num_seqs, block_table_SM.stride(0), block_table_SM.shape[1], BLOCK_SIZE=block_size, BLOCK_S=block_s, num_warps=4,
    )  # fmt: skip
