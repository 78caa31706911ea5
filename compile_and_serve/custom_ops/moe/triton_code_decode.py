"""Products with weights of codes (the Triton layout of `code_format.py`) that are decoded in registers, on the tensor cores.

Codes become numbers of x's dtype, exactly, as in `quantized/triton_group_matmul.py`; scales multiply the sums of a group, in float32.
Minima multiply Σ x of the group, a product with ones, so that it has the layout of the sums. Groups of 16 inputs are half a part of a
block: their scales multiply the numbers, which are then rounded to x's dtype.

Shape legend: O rows, P rows of x, C words of a row of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_and_serve.custom_ops.quantized.group_layout import TILE_WORDS
from compile_and_serve.custom_ops.quantized.triton_group_matmul import from_table, numbers_of_part, zeros_of

WORDS = tl.constexpr(TILE_WORDS)


@triton.jit
def scales_at(
    ptr, factor_ptr, expert, rows, group, num_rows, num_groups, PER_FACTOR: tl.constexpr, FACTORS: tl.constexpr, WHICH: tl.constexpr
):  # fmt: skip
    """The scales of rows of an expert in a group, or with WHICH = 1 their minima. rows, group: shapes that broadcast. → float32"""
    values = tl.load(ptr + (expert * num_groups + group) * num_rows + rows).to(tl.float32)
    if FACTORS > 0:
        at = expert * tl.cdiv(num_groups, PER_FACTOR) + group // PER_FACTOR
        factors = tl.load(factor_ptr + (at * FACTORS + WHICH) * num_rows + rows).to(tl.float32)
        values *= -factors if WHICH else factors
    return values


@triton.jit
def high_words(w_O, BITS: tl.constexpr):
    """The words of the highest bits of codes with 5 or 6. w_O: pointers to rows of a block. → [O, C]"""
    if BITS == 5 or BITS == 6:
        width: tl.constexpr = 8 * (BITS - 4)
        return tl.load(w_O[:, None] + WORDS + tl.arange(0, WORDS)[None, :] % width)
    else:
        return w_O[:, None]  # not used


@triton.jit
def codes_of_part(words, high, PART: tl.constexpr, BITS: tl.constexpr):
    """→ int32 [O, C]"""
    if BITS == 5 or BITS == 6:
        width: tl.constexpr = 8 * (BITS - 4)
        shift_C = tl.arange(0, WORDS) // width * (4 * (BITS - 4)) + (BITS - 4) * PART
        codes = ((high.to(tl.int32) >> shift_C[None, :]) & ((1 << (BITS - 4)) - 1)) << 4
        return codes | ((words.to(tl.int32) >> (4 * PART)) & 15)
    else:
        return (words.to(tl.int32) >> (BITS * PART)) & ((1 << BITS) - 1)


@triton.jit
def add_code_products(
    acc, x_PC, block, words, high, scale_ptr, offset_ptr, factor_ptr, expert, rows_O, num_rows, num_groups, inputs,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr,
    FACTORS: tl.constexpr, WHOLE: tl.constexpr, ROWS_FIRST: tl.constexpr, DOT: tl.constexpr, POWER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc + x wᵀ (ROWS_FIRST: w xᵀ) over one block of columns.

    x_PC: pointers to the first columns of x's rows. words, high: of the block's rows. rows_O: of `num_rows` of each expert. WHOLE: the
    last block is full. POWER: as in `numbers_of_part`.
    """
    PARTS: tl.constexpr = 4 if BITS < 8 else 2
    COLUMNS: tl.constexpr = PARTS * WORDS
    HALF_PARTS: tl.constexpr = GROUP_SIZE < WORDS
    PER_GROUP: tl.constexpr = 1 if HALF_PARTS else min(GROUP_SIZE // WORDS, PARTS)
    HAS_ZEROS: tl.constexpr = offset_ptr is not None and not MINIMA
    ZERO: tl.constexpr = 0 if MINIMA else 1 << (BITS - 1)
    last = num_groups - 1
    for first in tl.static_range(0, PARTS, PER_GROUP):
        group = tl.minimum((block * COLUMNS + first * WORDS) // GROUP_SIZE, last)
        at_O = (expert * num_groups + group) * num_rows + rows_O
        zeros = zeros_of(offset_ptr, at_O, HAS_ZEROS, ZERO, DOT, POWER, WORDS)
        sums = tl.zeros(acc.shape, dtype=tl.float32)
        totals = tl.zeros(acc.shape, dtype=tl.float32)
        for part in tl.static_range(first, first + PER_GROUP):
            columns_C = block * COLUMNS + part * WORDS + tl.arange(0, WORDS)
            if WHOLE:
                x = tl.load(x_PC + (block * COLUMNS + part * WORDS))
            else:
                x = tl.load(x_PC + (block * COLUMNS + part * WORDS), mask=(columns_C < inputs)[None, :], other=0.0)
            if BITS == 5 or BITS == 6:
                w = (codes_of_part(words, high, part, BITS).to(tl.float32) - zeros.to(tl.float32)).to(DOT)
            else:
                w = numbers_of_part(words, zeros, part, BITS, DOT, POWER, PTX, TABLE)
            if HALF_PARTS:
                half_1C = tl.minimum(columns_C // GROUP_SIZE, last)[None, :]
                scale_OC = scales_at(scale_ptr, factor_ptr, expert, rows_O[:, None], half_1C, num_rows, num_groups, PER_FACTOR, FACTORS, 0)
                w = (w.to(tl.float32) * scale_OC).to(DOT)
            if ROWS_FIRST:
                sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
            else:
                sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
            if MINIMA:
                ones = tl.full(w.shape, 1.0, dtype=DOT)
                if ROWS_FIRST:
                    totals = tl.dot(ones, tl.trans(x), totals, input_precision="ieee")
                else:
                    totals = tl.dot(x, tl.trans(ones), totals, input_precision="ieee")
        if HALF_PARTS:
            acc += sums
        else:
            scale_O = scales_at(scale_ptr, factor_ptr, expert, rows_O, group, num_rows, num_groups, PER_FACTOR, FACTORS, 0)
            acc += sums * _over_rows(scale_O, ROWS_FIRST)
        if MINIMA:
            minima_O = scales_at(offset_ptr, factor_ptr, expert, rows_O, group, num_rows, num_groups, PER_FACTOR, FACTORS, 1)
            acc += totals * _over_rows(minima_O, ROWS_FIRST)
    return acc


@triton.jit
def _over_rows(values_O, ROWS_FIRST: tl.constexpr):
    return values_O[:, None] if ROWS_FIRST else values_O[None, :]


@triton.jit
def values_of_codes(
    words, high, scale_ptr, offset_ptr, factor_ptr, expert, rows_O, num_rows, num_groups, block,
    PART: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr,
    PER_FACTOR: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """The weights of a part in float32 [O, C]. The arguments are as in `add_code_products`."""
    COLUMNS: tl.constexpr = (4 if BITS < 8 else 2) * WORDS
    columns_C = block * COLUMNS + PART * WORDS + tl.arange(0, WORDS)
    group_1C = tl.minimum(columns_C // GROUP_SIZE, num_groups - 1)[None, :]
    rows_O1 = rows_O[:, None]
    scale = scales_at(scale_ptr, factor_ptr, expert, rows_O1, group_1C, num_rows, num_groups, PER_FACTOR, FACTORS, 0)
    codes = codes_of_part(words, high, PART, BITS)
    if TABLE != "":
        return from_table(codes, TABLE) * scale
    elif MINIMA:
        minima = scales_at(offset_ptr, factor_ptr, expert, rows_O1, group_1C, num_rows, num_groups, PER_FACTOR, FACTORS, 1)
        return codes.to(tl.float32) * scale + minima
    elif offset_ptr is not None:
        zeros = tl.load(offset_ptr + (expert * num_groups + group_1C) * num_rows + rows_O1).to(tl.float32)
        return (codes.to(tl.float32) - zeros) * scale
    else:
        return (codes - (1 << (BITS - 1))).to(tl.float32) * scale
