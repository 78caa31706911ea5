"""LoRA adapters on a GPU: shrink (h = A x) and expand (+ B h), a kernel for each, without a host sync.

- 1 token: `lora_linear` runs shrink, then the linear's own kernel adds B h to its sums (`_gemv_kernel`).
- Up to MAX_SMALL_TOKENS tokens: so does `_small_batch_kernel`. Its products go over the B of all adapters in use.
- Up to MAX_SORTED tokens: each program takes a tile of up to TILE tokens of one adapter, from the step's sorted order (`lora_groups`).
  So an adapter is read once for TILE tokens, and the tokens of a decode step may have any mix of adapters.
- More: each program takes a block of consecutive tokens, and multiplies it by each adapter that the block uses. Tokens of a prompt are
  consecutive, so a block mostly uses one or two adapters.

Shrink splits the input features of few tokens, which alone would not fill the device; the last program of a tile adds up the parts.

Shape legend: T tokens, I and O input and output features, S adapter slots, R the largest rank, P merged linears, Q = P · R,
C blocks of N = 16 outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm
from compile_and_serve.custom_ops.linear.triton_linear import (
    b_offsets,
    fused_linear,
    gemv,
    part_of,
    small_batch,
    takes_gemv,
    takes_small_batch,
)
from compile_and_serve.custom_ops.linear.triton_linear_configs import MAX_SMALL_TOKENS, SMALL_BLOCK_O
from compile_and_serve.custom_ops.lora.limits import MAX_PARTS, TILE
from compile_and_serve.custom_ops.triton_common import (
    add_pairs,
    cdiv,
    gate,
    launch_options,
    let_next_start,
    next_power_of_2,
    split_counters,
    supports_pdl,
    wait_for_previous,
)

MAX_SORTED = 512
BLOCK_T = 32
MAX_SPLITS = 8


@triton.jit(do_not_specialize=["num_tokens"])
def _groups_kernel(index_ptr, groups_ptr, num_tokens, BLOCK: tl.constexpr, TILE: tl.constexpr):
    tokens_T = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok_T = tokens_T < num_tokens
    index_T = tl.load(index_ptr + tokens_T, mask=ok_T, other=0)
    key_T = tl.where(index_T > 0, index_T, 1 << 30)  # tokens without an adapter come last
    smaller_T = tl.zeros((BLOCK,), dtype=tl.int32)
    equal_T = tl.zeros((BLOCK,), dtype=tl.int32)
    place_T = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_tokens, BLOCK):
        others_U = start + tl.arange(0, BLOCK)
        other_U = tl.load(index_ptr + others_U, mask=others_U < num_tokens, other=0)
        key_U = tl.where(others_U < num_tokens, tl.where(other_U > 0, other_U, 1 << 30), (1 << 30) + 1)
        is_equal_TU = key_U[None, :] == key_T[:, None]
        smaller_T += tl.sum((key_U[None, :] < key_T[:, None]).to(tl.int32), 1)
        equal_T += tl.sum(is_equal_TU.to(tl.int32), 1)
        place_T += tl.sum((is_equal_TU & (others_U[None, :] < tokens_T[:, None])).to(tl.int32), 1)
    count_T = tl.where(place_T % TILE == 0, tl.minimum(equal_T - place_T, TILE), 0)
    row_ptrs = groups_ptr + (smaller_T + place_T) * 4
    tl.store(row_ptrs, tokens_T, mask=ok_T)
    tl.store(row_ptrs + 1, index_T, mask=ok_T)
    tl.store(row_ptrs + 2, count_T, mask=ok_T)
    if num_tokens <= BLOCK:  # this program has all tokens
        is_first_T = (place_T == 0) & (index_T > 0)
        is_used_before_TU = (key_T[None, :] < key_T[:, None]) & is_first_T[None, :]
        number_T = tl.sum(is_used_before_TU.to(tl.int32), 1)
        tl.store(groups_ptr + number_T * 4 + 3, index_T, mask=ok_T & is_first_T)
        is_free_T = tokens_T >= tl.sum(is_first_T.to(tl.int32))
        tl.store(groups_ptr + tokens_T * 4 + 3, tl.zeros_like(index_T), mask=ok_T & is_free_T)


@triton.jit
def _flush_kernel(groups_ptr):
    """Nothing. An ordinary kernel starts when all writes before it are visible, so kernels behind it need not wait to read the groups."""


@triton.jit
def _shrink_one_kernel(
    x_ptr, a_ptr, index_ptr, norm_ptr, h_ptr, num_features, num_rows, eps, HAS_NORM: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    cols_I = tl.arange(0, BLOCK_I)
    ok_I = cols_I < num_features
    let_next_start(PDL)
    # The adapters and the step's inputs do not depend on the previous kernel.
    slot = tl.load(index_ptr).to(tl.int64) - 1
    a_row_ptr = a_ptr + (slot * num_rows + row) * num_features
    a_I = tl.load(a_row_ptr + cols_I, mask=cols_I < tl.where(slot >= 0, num_features, 0), other=0.0)
    if HAS_NORM:
        norm_I = tl.load(norm_ptr + cols_I, mask=ok_I, other=0.0)
    wait_for_previous(PDL)
    x_I = tl.load(x_ptr + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    if HAS_NORM:
        h, squares = tl.reduce((a_I.to(tl.float32) * (x_I * norm_I.to(tl.float32)), x_I * x_I), 0, add_pairs)
        h *= 1.0 / tl.sqrt_rn(squares / num_features + eps)
    else:
        h = tl.sum(a_I.to(tl.float32) * x_I)
    tl.store(h_ptr + row, h)


@triton.jit
def _tokens(index_ptr, groups_ptr, num_tokens, SORTED: tl.constexpr, BLOCK_T: tl.constexpr):
    """A program's tokens: their numbers, which of them exist, their adapters."""
    if SORTED:
        row_ptrs_T = groups_ptr + (tl.program_id(0) + tl.arange(0, BLOCK_T)) * 4
        ok_T = tl.arange(0, BLOCK_T) < tl.load(groups_ptr + tl.program_id(0) * 4 + 2)
        tokens_T = tl.load(row_ptrs_T, mask=ok_T, other=0)
        index_T = tl.load(row_ptrs_T + 1, mask=ok_T, other=0)
    else:
        tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        ok_T = tokens_T < num_tokens
        index_T = tl.load(index_ptr + tokens_T, mask=ok_T, other=0)
    return tokens_T.to(tl.int64), ok_T, index_T


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    index_ptr,
    groups_ptr,
    h_ptr,
    partial_ptr,
    counter_ptr,
    num_tokens,
    num_features,
    num_rows,
    x_stride,
    split_size,
    SORTED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    # An ordinary kernel wrote these, and another one came after it (`_flush_kernel`).
    tokens_T, ok_T, index_T = _tokens(index_ptr, groups_ptr, num_tokens, SORTED, BLOCK_T)
    wait_for_previous(PDL)
    index = tl.min(tl.where(index_T > 0, index_T, 1 << 30))
    last_index = tl.max(index_T)
    if last_index > 0:
        split = tl.program_id(2)
        rows_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        end = tl.minimum((split + 1) * split_size, num_features)
        x_ptrs = x_ptr + tokens_T[:, None] * x_stride
        sums_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
        while index <= last_index:
            own_T = index_T == index
            a_ptrs = a_ptr + ((index - 1).to(tl.int64) * num_rows + rows_R[:, None]) * num_features
            for start in range(split * split_size, end, BLOCK_I):
                cols_I = start + tl.arange(0, BLOCK_I)
                ok_I = cols_I < end
                x_TI = tl.load(x_ptrs + cols_I[None, :], mask=own_T[:, None] & ok_I[None, :], other=0.0)
                a_RI = tl.load(a_ptrs + cols_I[None, :], mask=(rows_R[:, None] < num_rows) & ok_I[None, :], other=0.0)
                sums_TR = tl.dot(x_TI, tl.trans(a_RI.to(x_TI.dtype)), sums_TR, input_precision="ieee")
            index = tl.min(tl.where(index_T > index, index_T, 1 << 30))
        at_TR = tokens_T[:, None] * num_rows + rows_R[None, :]
        ok_TR = (ok_T & (index_T > 0))[:, None] & (rows_R[None, :] < num_rows)
        is_last = True
        if SPLITS > 1:
            # Each split stores partial sums. The last program of the tile adds them in order, so that every run has the same bits.
            size = num_tokens * num_rows
            tl.store(partial_ptr + split * size + at_TR, sums_TR, mask=ok_TR)
            tl.debug_barrier()
            counter = counter_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
            if is_last:
                sums_TR = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
                for other in tl.static_range(SPLITS):
                    sums_TR += tl.load(partial_ptr + other * size + at_TR, mask=ok_TR, other=0.0, cache_modifier=".cg")
                tl.store(counter, 0)
        if is_last:
            tl.store(h_ptr + at_TR, sums_TR.to(h_ptr.dtype.element_ty), mask=ok_TR)


@triton.jit
def _add_expanded(
    sums_TO,
    h_ptr,
    b_ptr,
    tokens_T,
    index_T,
    cols_O,
    num_tokens,
    num_features,
    num_rows,
    rank,
    end_0,
    end_1,
    end_2,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """sums + B h, for all adapters of the tokens and all parts of the columns."""
    part_O = part_of(cols_O, end_0, end_1, end_2)
    first_part, last_part = tl.min(part_O), tl.max(tl.where(cols_O < num_features, part_O, 0))
    index = tl.min(tl.where(index_T > 0, index_T, 1 << 30))
    last = tl.max(index_T)
    while index <= last:
        own_T = index_T == index
        b_slot_ptr = b_ptr + (index - 1).to(tl.int64) * rank * tl.cdiv(num_features, 16) * 16
        for part in range(first_part, last_part + 1):
            for start in range(0, rank, BLOCK_R):
                rows_R = start + tl.arange(0, BLOCK_R)
                ok_TR = own_T[:, None] & (rows_R[None, :] < rank)
                at_TR = tokens_T[:, None] * num_rows + part * rank + rows_R[None, :]
                h_TR = tl.load(h_ptr + at_TR, mask=ok_TR, other=0.0)
                # B of a linear that the adapter does not change is not read.
                if tl.max(tl.abs(h_TR.to(tl.float32))) > 0:
                    ok_RO = (rows_R[:, None] < rank) & ((part_O == part) & (cols_O < num_features))[None, :]
                    b_RO = tl.load(b_slot_ptr + b_offsets(rows_R[:, None], cols_O[None, :], rank), mask=ok_RO, other=0.0)
                    sums_TO = tl.dot(h_TR.to(b_RO.dtype), b_RO, sums_TO, input_precision="ieee")
        index = tl.min(tl.where(index_T > index, index_T, 1 << 30))
    return sums_TO


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    y_ptr,
    h_ptr,
    b_ptr,
    index_ptr,
    groups_ptr,
    residual_ptr,
    out_ptr,
    num_tokens,
    num_features,
    num_rows,
    rank,
    y_stride,
    residual_stride,
    end_0,
    end_1,
    end_2,
    SORTED: tl.constexpr,
    SILU_MUL: tl.constexpr,
    GELU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_previous(PDL)
    tokens_T, ok_T, index_T = _tokens(index_ptr, groups_ptr, num_tokens, SORTED, BLOCK_T)
    if SILU_MUL:
        num_out = num_features // 2
    else:
        num_out = num_features
    cols_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_TO = ok_T[:, None] & (cols_O < num_out)[None, :]
    if tl.max(ok_T.to(tl.int32)) > 0:  # few tokens of the sorted order begin a tile
        y_ptrs = y_ptr + tokens_T[:, None] * y_stride + cols_O[None, :]
        sums_TO = tl.load(y_ptrs, mask=ok_TO, other=0.0).to(tl.float32)
        sums_TO = _add_expanded(
            sums_TO,
            h_ptr,
            b_ptr,
            tokens_T,
            index_T,
            cols_O,
            num_tokens,
            num_features,
            num_rows,
            rank,
            end_0,
            end_1,
            end_2,
            BLOCK_T,
            BLOCK_R,
        )
        if SILU_MUL:
            up_TO = tl.load(y_ptrs + num_out, mask=ok_TO, other=0.0).to(tl.float32)
            up_TO = _add_expanded(
                up_TO,
                h_ptr,
                b_ptr,
                tokens_T,
                index_T,
                num_out + cols_O,
                num_tokens,
                num_features,
                num_rows,
                rank,
                end_0,
                end_1,
                end_2,
                BLOCK_T,
                BLOCK_R,
            )
            sums_TO = gate(sums_TO, GELU) * up_TO
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + tokens_T[:, None] * residual_stride + cols_O[None, :]
            sums_TO += tl.load(residual_ptrs, mask=ok_TO, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + tokens_T[:, None] * num_out + cols_O[None, :]
        tl.store(out_ptrs, sums_TO.to(out_ptr.dtype.element_ty), mask=ok_TO)


def lora_groups(index_T: torch.Tensor) -> torch.Tensor:
    """`custom_ops.lora.lora_add.lora_groups`."""
    num_tokens = index_T.shape[0]
    groups_T4 = index_T.new_empty(num_tokens, 4)
    if 0 < num_tokens <= MAX_SORTED:
        launch(
            _groups_kernel,
            (cdiv(num_tokens, MAX_SMALL_TOKENS),),
            index_T,
            groups_T4,
            num_tokens,
            BLOCK=MAX_SMALL_TOKENS,
            TILE=TILE,
            num_warps=4,
        )
        launch(_flush_kernel, (1,), groups_T4, num_warps=1)
    return groups_T4


def lora_add(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None = None,
) -> torch.Tensor:
    """`custom_ops.lora.lora_add.lora_add`."""
    return _add(y_TO, x_TI, a_SQI, b_SCRN, index_T, ends, groups_T4)


def lora_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
    gelu: bool,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None = None,
) -> torch.Tensor:
    """`custom_ops.lora.lora_linear.lora_linear`, over the plain weight [O, I]."""
    x_TI = _with_rows(x_TI)
    residual_TO = None if residual_TO is None else _with_rows(residual_TO)
    if takes_gemv(x_TI, weight_OI):
        h_Q = _shrink_one(x_TI, a_SQI, index_T, norm_weight_I, eps)
        adapters = h_Q, b_SCRN, index_T, padded_ends(ends)
        return gemv(x_TI, weight_OI, out_features, norm_weight_I, eps, bias_O, silu_mul, residual_TO, gelu, adapters=adapters)
    if norm_weight_I is not None:
        x_TI = rms_norm(x_TI, norm_weight_I, eps)
    if takes_small_batch(x_TI, weight_OI) and _tiles_have_one_part(ends, silu_mul):
        groups_T4 = lora_groups(index_T) if groups_T4 is None else groups_T4
        small_adapters = _shrink(x_TI, a_SQI, index_T, groups_T4), b_SCRN, index_T, groups_T4, padded_ends(ends)
        return small_batch(x_TI, weight_OI, out_features, None, eps, bias_O, silu_mul, residual_TO, gelu, adapters=small_adapters)
    y_TO = fused_linear(x_TI, weight_OI, out_features, bias_O=bias_O)
    return _add(y_TO, x_TI, a_SQI, b_SCRN, index_T, ends, groups_T4, silu_mul, gelu, residual_TO)


def _tiles_have_one_part(ends: Sequence[int], silu_mul: bool) -> bool:
    return not any(end % SMALL_BLOCK_O for end in (*ends[:-1], ends[-1] // 2 if silu_mul else 0))


def padded_ends(ends: Sequence[int]) -> tuple[int, ...]:
    """The ends of the first parts; where there are fewer, no column is behind them."""
    return (*ends[:-1], *[1 << 30] * (MAX_PARTS - len(ends)))


def _with_rows(value: torch.Tensor) -> torch.Tensor:
    return value if value.stride(1) == 1 else value.contiguous()


def _shrink_one(
    x_1I: torch.Tensor, a_SQI: torch.Tensor, index_1: torch.Tensor, norm_weight_I: torch.Tensor | None, eps: float
) -> torch.Tensor:
    _, num_rows, num_in = a_SQI.shape
    h_Q = torch.empty(num_rows, dtype=torch.float32, device=x_1I.device)
    pdl, block_i = supports_pdl(x_1I.device), next_power_of_2(num_in)
    launch(
        _shrink_one_kernel,
        (num_rows,),
        x_1I,
        a_SQI,
        index_1,
        norm_weight_I,
        h_Q,
        num_in,
        num_rows,
        eps,
        HAS_NORM=norm_weight_I is not None,
        BLOCK_I=block_i,
        PDL=pdl,
        num_warps=8 if block_i <= 1 << 14 else 16,
        **launch_options(pdl),
    )
    return h_Q


def _shrink(x_TI: torch.Tensor, a_SQI: torch.Tensor, index_T: torch.Tensor, groups_T4: torch.Tensor | None) -> torch.Tensor:
    """h = A x of each token's adapter: [T, Q], x's dtype, not filled for tokens without one. groups_T4: for at most MAX_SORTED tokens."""
    (num_tokens, num_in), num_rows, is_sorted = x_TI.shape, a_SQI.shape[1], groups_T4 is not None
    block_t = TILE if is_sorted else BLOCK_T
    block_i = min(256 if is_sorted else 128, max(16, next_power_of_2(num_in)))
    block_r = min(64, max(16, next_power_of_2(num_rows)))
    splits = max(1, min(MAX_SPLITS if is_sorted else 1, num_in // (2 * block_i)))
    split_size = cdiv(cdiv(num_in, splits), block_i) * block_i
    splits = cdiv(num_in, split_size)
    h_TQ = x_TI.new_empty(num_tokens, num_rows)
    partial = counters = None
    if splits > 1:
        partial = torch.empty(splits * h_TQ.numel(), dtype=torch.float32, device=x_TI.device)
        counters = split_counters(x_TI.device)
    pdl = supports_pdl(x_TI.device)
    launch(
        _shrink_kernel,
        (num_tokens if is_sorted else cdiv(num_tokens, block_t), cdiv(num_rows, block_r), splits),
        x_TI,
        a_SQI,
        index_T,
        groups_T4,
        h_TQ,
        partial,
        counters,
        num_tokens,
        num_in,
        num_rows,
        x_TI.stride(0),
        split_size,
        SORTED=is_sorted,
        SPLITS=splits,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return h_TQ


def _add(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None,
    silu_mul: bool = False,
    gelu: bool = False,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """f(y + B A x) + residual."""
    y_TO, x_TI = _with_rows(y_TO), _with_rows(x_TI)
    num_tokens, num_features = y_TO.shape
    num_rows, rank = a_SQI.shape[1], b_SCRN.shape[2]
    num_out = num_features // 2 if silu_mul else num_features
    out_TO = y_TO.new_empty(num_tokens, num_out)
    if num_tokens == 0:
        return out_TO
    is_sorted = num_tokens <= MAX_SORTED
    if not is_sorted:
        groups_T4 = None
    elif groups_T4 is None:
        groups_T4 = lora_groups(index_T)
    h_TQ = _shrink(x_TI, a_SQI, index_T, groups_T4)
    block_t, block_o = TILE if is_sorted else BLOCK_T, min(128, max(16, next_power_of_2(num_out)))
    pdl = supports_pdl(y_TO.device)
    launch(
        _expand_kernel,
        (num_tokens if is_sorted else cdiv(num_tokens, block_t), cdiv(num_out, block_o)),
        y_TO,
        h_TQ,
        b_SCRN,
        index_T,
        groups_T4,
        residual_TO,
        out_TO,
        num_tokens,
        num_features,
        num_rows,
        rank,
        y_TO.stride(0),
        0 if residual_TO is None else residual_TO.stride(0),
        *padded_ends(ends),
        SORTED=is_sorted,
        SILU_MUL=silu_mul,
        GELU=gelu,
        HAS_RESIDUAL=residual_TO is not None,
        BLOCK_T=block_t,
        BLOCK_R=min(32, max(16, next_power_of_2(rank))),
        BLOCK_O=block_o,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out_TO
