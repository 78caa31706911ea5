"""Triton kernels of linears over group-quantized weights: a product for up to some hundred tokens, and dequantization.

Shape legend: T tokens, I input features, O output features (R: stored outputs, O or O / 2 with silu_mul), C words of a tile's row.

The product multiplies tiles of the weight by xᵀ on the tensor cores, split over I where there are few rows. Codes become numbers of x's
dtype in registers: OR puts a code into the low bits of a power of 2, which gives 128 + code (bfloat16) or 1024 + code (float16), and a
subtraction removes the power and the zero point. Both instructions take two codes. Scales multiply the sums of one group, in float32.
Minima multiply Σ x of the group, which is a product with ones, so that it has the layout of the sums. Codes may be indices of a table of
16 numbers, which are rounded to x's dtype (e2m1: exact). Groups of 16 inputs are half a part of a block: their scales multiply the numbers,
and the scaled numbers are rounded to x's dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.quantized.group_layout import TABLES, TILE_OUTPUTS, TILE_WORDS
from compile_and_serve.custom_ops.quantized.triton_epilogue import add_splits, store_outputs
from compile_and_serve.custom_ops.triton_common import (
    TRITON_TYPES,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    prefetch_rows_l2,
    split_counters,
    supports_pdl,
    wait_for_previous,
)

MAX_BLOCK_T = 64  # tokens per tile


def _number_instructions(power_bits: str, subtract: str) -> tuple[str, ...]:
    """PTX that makes two numbers from part 0, 1, 2 or 3 of two words ($1), less the two of $2."""
    return tuple(
        f"{{.reg .b32 codes; shr.u32 codes, $1, {shift}; lop3.b32 codes, codes, 0x000F000F, {power_bits}, 0xEA;{subtract} $0, codes, $2;}}"
        for shift in (0, 4, 8, 12)
    )


BFLOAT16_PTX = tl.constexpr(_number_instructions("0x43004300", "sub.rn.bf16x2"))  # 128 in both halves
FLOAT16_PTX = tl.constexpr(_number_instructions("0x64006400", "sub.rn.f16x2"))  # 1024 in both halves
AHEAD = tl.constexpr(3)  # blocks by which scales are prefetched
_NF4, _FP4, _IQ4_NL = (tl.constexpr(TABLES[name]) for name in ("nf4", "fp4", "iq4_nl"))


@triton.jit
def _e2m1(codes):
    """The numbers of e2m1 codes, by float32's own bits. int32 → float32"""
    magnitude = codes & 7
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)  # the exponent's bias is 1, float32's 127
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(codes >= 8, -value, value)


@triton.jit
def _of_eight(codes, TABLE: tl.constexpr, FIRST: tl.constexpr):
    """TABLE[FIRST + the lowest three bits of the codes], by seven selections."""
    b0, b1 = (codes & 1) != 0, (codes & 2) != 0
    low = tl.where(b1, tl.where(b0, TABLE[FIRST + 3], TABLE[FIRST + 2]), tl.where(b0, TABLE[FIRST + 1], TABLE[FIRST]))
    high = tl.where(b1, tl.where(b0, TABLE[FIRST + 7], TABLE[FIRST + 6]), tl.where(b0, TABLE[FIRST + 5], TABLE[FIRST + 4]))
    return tl.where((codes & 4) != 0, high, low)


@triton.jit
def from_table(codes, TABLE: tl.constexpr):
    """The numbers of codes 0 to 15. TABLE: a name of `TABLES`. int32 → float32"""
    if TABLE == "e2m1":
        return _e2m1(codes)
    elif TABLE == "nf4":
        return tl.where(codes >= 8, _of_eight(codes, _NF4, 8), _of_eight(codes, _NF4, 0))
    elif TABLE == "iq4_nl":
        return tl.where(codes >= 8, _of_eight(codes, _IQ4_NL, 8), _of_eight(codes, _IQ4_NL, 0))
    else:
        return tl.where(codes >= 8, _of_eight(codes, _FP4, 8), _of_eight(codes, _FP4, 0))


@triton.jit
def numbers_of_part(
    words, zeros, PART: tl.constexpr, BITS: tl.constexpr, DOT: tl.constexpr, POWER: tl.constexpr, PTX: tl.constexpr, TABLE: tl.constexpr
):
    """POWER + code PART of each word − zeros, in dtype DOT, exact. PTX: by PTX instructions, on two words at a time.

    TABLE: if not empty, the result is the number of code PART in the table, rounded to DOT.
    """
    if TABLE != "":
        return from_table((words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1), TABLE).to(DOT)
    elif PTX and BITS == 4 and tl.bfloat16 == DOT:
        return tl.inline_asm_elementwise(BFLOAT16_PTX[PART], "=r,r,r", [words, zeros], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PTX and BITS == 4 and tl.float16 == DOT:
        return tl.inline_asm_elementwise(FLOAT16_PTX[PART], "=r,r,r", [words, zeros], dtype=tl.float16, is_pure=True, pack=2)
    else:
        codes = (words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1)
        return (codes.to(tl.float32) + POWER - zeros.to(tl.float32)).to(DOT)


@triton.jit
def _prefetch_l1(pointers):
    """Prefetch the cache lines at the pointers."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def zeros_of(offset_ptr, at_O, HAS_ZEROS: tl.constexpr, ZERO: tl.constexpr, DOT: tl.constexpr, POWER: tl.constexpr, WORDS: tl.constexpr):
    """What `numbers_of_part` subtracts. HAS_ZEROS: offsets are zero points. ZERO: the zero point otherwise. → DOT [O, C]"""
    if HAS_ZEROS:
        zeros_O1 = (tl.load(offset_ptr + at_O).to(tl.float32) + POWER).to(DOT)[:, None]
        return tl.broadcast_to(zeros_O1, (at_O.shape[0], WORDS))
    else:
        return tl.full((at_O.shape[0], WORDS), POWER + ZERO, dtype=DOT)


@triton.jit(do_not_specialize=["num_tokens"])
def _group_matmul_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, offset_ptr, bias_ptr, residual_ptr, partial_ptr, counter_ptr,
    num_tokens, num_rows, in_features, num_blocks, num_groups, blocks_per_group, x_stride, residual_stride,
    BITS: tl.constexpr, POWER: tl.constexpr, PARTS_PER_GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr, DOT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, TILE_O: tl.constexpr, WORDS: tl.constexpr, PREFETCH_BLOCKS: tl.constexpr, PDL: tl.constexpr,
    TABLE: tl.constexpr = "", HALF_PARTS: tl.constexpr = False,
):  # fmt: skip
    """HALF_PARTS: groups of 16 inputs; a part has two, and PARTS_PER_GROUP is 1."""
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PARTS: tl.constexpr = 16 // BITS
    COLUMNS: tl.constexpr = PARTS * WORDS
    GROUPS_PER_BLOCK: tl.constexpr = PARTS // PARTS_PER_GROUP
    rows_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    row_ok_O = rows_O < num_rows
    safe_rows_O = tl.where(row_ok_O, rows_O, 0).to(tl.int64)
    tokens_T = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    token_ok_T = tokens_T < num_tokens
    safe_tokens_T = tl.where(token_ok_T, tokens_T, 0).to(tl.int64)
    words_C = tl.arange(0, WORDS)
    per_split = tl.cdiv(num_blocks, SPLITS)
    begin = split * per_split
    # With SiLU-mul, num_rows is a multiple of TILE_O.
    w_OC = w_ptr + (safe_rows_O // TILE_O * num_blocks * TILE_O + safe_rows_O % TILE_O)[:, None] * WORDS + words_C[None, :]
    scale_at_O = safe_rows_O // TILE_O * num_groups * TILE_O + safe_rows_O % TILE_O
    up_tiles = (num_rows // TILE_O).to(tl.int64)
    up_OC = w_OC + up_tiles * num_blocks * (TILE_O * WORDS)
    up_scale_at_O = scale_at_O + up_tiles * num_groups * TILE_O
    let_next_start(PDL)
    if PDL:  # prefetch the first weights into L2 while the previous kernel still runs
        if (begin + PREFETCH_BLOCKS <= num_blocks) & (tile * BLOCK_O + BLOCK_O <= num_rows):
            part_size: tl.constexpr = PREFETCH_BLOCKS * WORDS  # one part per row of the tile
            first_parts = tl.arange(0, TILE_O) * part_size + begin * (TILE_O * WORDS)
            for inner in tl.static_range(BLOCK_O // TILE_O):
                at = (tile * (BLOCK_O // TILE_O) + inner).to(tl.int64) * num_blocks * (TILE_O * WORDS)
                prefetch_rows_l2(w_ptr + at + first_parts, part_size)
                if SILU_MUL:
                    prefetch_rows_l2(w_ptr + at + up_tiles * num_blocks * (TILE_O * WORDS) + first_parts, part_size)
    wait_for_previous(PDL)
    HAS_ZEROS: tl.constexpr = offset_ptr is not None and not HAS_MINIMA
    ZERO: tl.constexpr = 0 if HAS_MINIMA else 1 << (BITS - 1)
    ones_OC = tl.full((BLOCK_O, WORDS), 1.0, dtype=DOT)
    acc_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    acc_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    last_at = (num_groups - 1) * TILE_O
    for block in tl.range(begin, tl.minimum(begin + per_split, num_blocks), num_stages=STAGES):
        w = tl.load(w_OC + block * (TILE_O * WORDS), eviction_policy="evict_first")
        if SILU_MUL:
            up = tl.load(up_OC + block * (TILE_O * WORDS), eviction_policy="evict_first")
        if PDL:
            ahead = tl.minimum((block + AHEAD) // blocks_per_group * (GROUPS_PER_BLOCK * TILE_O), last_at)
            _prefetch_l1(scale_ptr + scale_at_O + ahead)
            if offset_ptr is not None:
                _prefetch_l1(offset_ptr + scale_at_O + ahead)
            if SILU_MUL:
                _prefetch_l1(scale_ptr + up_scale_at_O + ahead)
                if offset_ptr is not None:
                    _prefetch_l1(offset_ptr + up_scale_at_O + ahead)
        for group in tl.static_range(GROUPS_PER_BLOCK):
            at = tl.minimum((block // blocks_per_group * GROUPS_PER_BLOCK + group) * TILE_O, last_at)
            zeros_OC = zeros_of(offset_ptr, scale_at_O + at, HAS_ZEROS, ZERO, DOT, POWER, WORDS)
            sums_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            totals_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            if SILU_MUL:
                up_zeros_OC = zeros_of(offset_ptr, up_scale_at_O + at, HAS_ZEROS, ZERO, DOT, POWER, WORDS)
                sums_up_OT = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            for part in tl.static_range(group * PARTS_PER_GROUP, (group + 1) * PARTS_PER_GROUP):
                here_C = block * COLUMNS + part * WORDS + words_C
                ok_TC = token_ok_T[:, None] & (here_C[None, :] < in_features)
                x_TC = tl.load(x_ptr + safe_tokens_T[:, None] * x_stride + here_C[None, :], mask=ok_TC, other=0.0)
                x_CT = tl.trans(x_TC.to(DOT))
                numbers = numbers_of_part(w, zeros_OC, part, BITS, DOT, POWER, PDL, TABLE)
                if HALF_PARTS:
                    half_OC = tl.minimum((2 * (block * PARTS + part) + words_C // 16) * TILE_O, last_at)[None, :]
                    scale_OC = tl.load(scale_ptr + scale_at_O[:, None] + half_OC).to(tl.float32)
                    numbers = (numbers.to(tl.float32) * scale_OC).to(DOT)
                sums_OT = tl.dot(numbers, x_CT, sums_OT, input_precision="ieee")
                if SILU_MUL:
                    numbers = numbers_of_part(up, up_zeros_OC, part, BITS, DOT, POWER, PDL, TABLE)
                    if HALF_PARTS:
                        scale_OC = tl.load(scale_ptr + up_scale_at_O[:, None] + half_OC).to(tl.float32)
                        numbers = (numbers.to(tl.float32) * scale_OC).to(DOT)
                    sums_up_OT = tl.dot(numbers, x_CT, sums_up_OT, input_precision="ieee")
                if HAS_MINIMA:
                    totals_OT = tl.dot(ones_OC, x_CT, totals_OT, input_precision="ieee")
            if HALF_PARTS:
                acc_OT += sums_OT
            else:
                acc_OT += sums_OT * tl.load(scale_ptr + scale_at_O + at).to(tl.float32)[:, None]
            if HAS_MINIMA:
                acc_OT += totals_OT * tl.load(offset_ptr + scale_at_O + at).to(tl.float32)[:, None]
            if SILU_MUL:
                if HALF_PARTS:
                    acc_up_OT += sums_up_OT
                else:
                    acc_up_OT += sums_up_OT * tl.load(scale_ptr + up_scale_at_O + at).to(tl.float32)[:, None]
                if HAS_MINIMA:
                    acc_up_OT += totals_OT * tl.load(offset_ptr + up_scale_at_O + at).to(tl.float32)[:, None]
    last = True
    if SPLITS > 1:
        output_tile = token_tile * tl.num_programs(0) + tile
        acc_OT, acc_up_OT, last = add_splits(acc_OT, acc_up_OT, partial_ptr, counter_ptr, output_tile, split, SILU_MUL, SPLITS)
    if last:
        store_outputs(
            acc_OT,
            acc_up_OT,
            bias_ptr,
            residual_ptr,
            out_ptr,
            rows_O,
            row_ok_O,
            safe_rows_O,
            safe_tokens_T,
            token_ok_T,
            num_rows,
            residual_stride,
            HAS_BIAS,
            HAS_RESIDUAL,
            SILU_MUL,
        )


@triton.jit
def _dequantize_kernel(
    w_ptr,
    out_ptr,
    scale_ptr,
    offset_ptr,
    num_rows,
    in_features,
    num_blocks,
    num_groups,
    blocks_per_group,
    BITS: tl.constexpr,
    PARTS_PER_GROUP: tl.constexpr,
    TILE_O: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
    TABLE: tl.constexpr = "",
    HALF_PARTS: tl.constexpr = False,
):
    """One tile: (code − zero point) · scale, code · scale + minimum or table[code] · scale, in float32, rounded once. num_rows: outputs."""
    tile, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    PARTS: tl.constexpr = 16 // BITS
    spots_O, words_C = tl.arange(0, TILE_O), tl.arange(0, WORDS)
    rows_O = tile * TILE_O + spots_O
    let_next_start(PDL)
    words = tl.load(w_ptr + (tile * num_blocks + block) * (TILE_O * WORDS) + spots_O[:, None] * WORDS + words_C[None, :])
    wait_for_previous(PDL)
    for part in tl.static_range(PARTS):
        group = block // blocks_per_group * (PARTS // PARTS_PER_GROUP) + part // PARTS_PER_GROUP
        at_O = (tile * num_groups + tl.minimum(group, num_groups - 1)) * TILE_O + spots_O
        scale_O1 = tl.load(scale_ptr + at_O).to(tl.float32)[:, None]
        whole = (words.to(tl.int32) >> (BITS * part)) & ((1 << BITS) - 1)
        codes = whole.to(tl.float32)
        if HALF_PARTS:
            half_C = tl.minimum(2 * (block * PARTS + part) + words_C // 16, num_groups - 1)
            at_OC = (tile * num_groups + half_C[None, :]) * TILE_O + spots_O[:, None]
            values = from_table(whole, TABLE) * tl.load(scale_ptr + at_OC).to(tl.float32)
        elif TABLE != "":
            values = from_table(whole, TABLE) * scale_O1
        elif offset_ptr is None:
            values = (codes - (1 << (BITS - 1))) * scale_O1
        elif offset_ptr.dtype.element_ty == tl.uint8:
            values = (codes - tl.load(offset_ptr + at_O).to(tl.float32)[:, None]) * scale_O1
        else:
            values = codes * scale_O1 + tl.load(offset_ptr + at_O).to(tl.float32)[:, None]
        columns_C = block * (PARTS * WORDS) + part * WORDS + words_C
        out_OC = out_ptr + rows_O[:, None] * in_features + columns_C[None, :]
        ok_OC = (rows_O < num_rows)[:, None] & (columns_C < in_features)[None, :]
        tl.store(out_OC, values.to(out_ptr.dtype.element_ty), mask=ok_OC)


def _shape_arguments(packed: torch.Tensor, scale: torch.Tensor, bits: int, group_size: int) -> tuple[int, int, int, int]:
    """(blocks of a row, groups of a row, blocks per group, parts of a block per group)"""
    columns = TILE_WORDS * 16 // bits
    parts_per_group = max(1, min(group_size, columns) // TILE_WORDS)
    return packed.shape[1], scale.shape[1], max(1, group_size // columns), parts_per_group


def group_matmul_config(num_tokens: int, num_rows: int, num_blocks: int, silu_mul: bool, sms: int) -> tuple[int, int, int, int]:
    """(BLOCK_O, splits, stages, warps) of the product. num_rows: stored outputs. num_blocks: of 128 inputs (8 bits: 64).

    Few tokens: enough programs that several run on each multiprocessor. More tokens: more outputs per tile, because x is read again for
    each tile.
    """
    # Measured on an H200 with Llama-3.1-8B's linears, 1 and 64 tokens.
    block_o = 64 if num_tokens <= MAX_BLOCK_T or silu_mul else 128
    tiles = cdiv(num_rows, block_o) * cdiv(num_tokens, MAX_BLOCK_T)
    wanted, splits = (4 if num_tokens <= MAX_BLOCK_T else 2) * sms, 1
    while tiles * splits * 3 < wanted * 2 and splits < (16 if num_tokens <= 16 else 4) and num_blocks >= 8 * splits:
        splits *= 2
    if num_tokens <= 16:
        stages = 3 if silu_mul else 6
    else:
        stages = 3 if num_tokens <= MAX_BLOCK_T and not silu_mul else 4
    return block_o, splits, stages, block_o // 16


def group_matmul(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
    config: tuple[int, int, int, int] | None = None,
    table: str = "",
) -> torch.Tensor:
    """y = f(x Wᵀ + bias) + residual, where f is SiLU-mul with silu_mul. → x's dtype [T, R]

    x_TI: rows may be strided. packed, scale, offset: in the Triton layout. With silu_mul, O / 2 must be a multiple of 64.
    config: replaces `group_matmul_config`'s. table: a name of `TABLES`, or "".
    """
    num_tokens, in_features = x_TI.shape
    device = x_TI.device
    num_rows = out_features // 2 if silu_mul else out_features
    assert not silu_mul or num_rows % TILE_OUTPUTS == 0, "a tile has rows of both halves"
    num_blocks, num_groups, blocks_per_group, parts_per_group = _shape_arguments(packed, scale, bits, group_size)
    block_o, splits, stages, warps = config or group_matmul_config(num_tokens, num_rows, num_blocks, silu_mul, num_sms(device))
    block_t = min(MAX_BLOCK_T, max(16, next_power_of_2(num_tokens)))
    tiles, token_tiles = cdiv(num_rows, block_o), cdiv(num_tokens, block_t)
    out = x_TI.new_empty(num_tokens, num_rows)
    if not num_tokens:
        return out
    partial = counters = None
    if splits > 1:
        size = tiles * token_tiles * splits * 2 * block_o * block_t
        partial, counters = torch.empty(size, dtype=torch.float32, device=device), split_counters(device)
    pdl = supports_pdl(device)
    power = {torch.bfloat16: 128.0, torch.float16: 1024.0}.get(x_TI.dtype, 0.0) if bits == 4 else 0.0
    launch(
        _group_matmul_kernel, (tiles, splits, token_tiles),
        x_TI, packed, out, scale, offset, bias_O, residual_TO, partial, counters, num_tokens, num_rows, in_features, num_blocks,
        num_groups, blocks_per_group, x_TI.stride(0), residual_TO.stride(0) if residual_TO is not None else 0,
        BITS=bits, POWER=power, PARTS_PER_GROUP=parts_per_group,
        HAS_MINIMA=offset is not None and offset.is_floating_point(), HAS_BIAS=bias_O is not None,
        HAS_RESIDUAL=residual_TO is not None, SILU_MUL=silu_mul, DOT=TRITON_TYPES[x_TI.dtype], BLOCK_T=block_t,
        BLOCK_O=block_o, SPLITS=splits, STAGES=stages, TILE_O=TILE_OUTPUTS, WORDS=TILE_WORDS, PREFETCH_BLOCKS=8, PDL=pdl,
        TABLE=table, HALF_PARTS=group_size < TILE_WORDS, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    return out


def dequantize(
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    in_features: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    table: str = "",
) -> torch.Tensor:
    """The weight in `dtype`, from the Triton layout. → [O, I]"""
    out = torch.empty(out_features, in_features, dtype=dtype, device=packed.device)
    num_blocks, num_groups, blocks_per_group, parts_per_group = _shape_arguments(packed, scale, bits, group_size)
    pdl = supports_pdl(packed.device)
    launch(
        _dequantize_kernel,
        (num_blocks, packed.shape[0]),
        packed,
        out,
        scale,
        offset,
        out_features,
        in_features,
        num_blocks,
        num_groups,
        blocks_per_group,
        BITS=bits,
        PARTS_PER_GROUP=parts_per_group,
        TILE_O=TILE_OUTPUTS,
        WORDS=TILE_WORDS,
        PDL=pdl,
        TABLE=table,
        HALF_PARTS=group_size < TILE_WORDS,
        num_warps=4,
        **launch_options(pdl),
    )
    return out
