"""`cas::experts` on CUDA over MXFP4 weights, and over integer codes of 4 bits, for few pairs: the "gemv" method.

A program multiplies 16 rows of one expert by one token. Its warps share the columns, so that all of its loads are in flight at once; the
sums of the warps are added at the end. Decoded weights go from registers to the tensor cores, without shared memory. Triton has no such
product, so it is PTX over a whole warp (`_products_ptx`). It relies on the layout of a tile of 32-bit numbers [8 · N, 16] that is loaded
16 bytes at a time: lane 4 g + t has row g of a block, and of that row the columns 4 t to 4 t + 3. `test_moe_compiles.py` checks that
Triton chooses this layout.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), N blocks of 128 inputs at once, R = 8 rows,
B = N · R rows of blocks, C = 16 pairs of words of a row of a block, D hidden size, F intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.moe.activation import num_parts
from compile_and_serve.custom_ops.moe.coded_linear import MXFP4_TABLE, CodedLinear, coded_linears
from compile_and_serve.custom_ops.moe.triton_code_decode import scales_at
from compile_and_serve.custom_ops.moe.triton_experts import Operands, activated, normed
from compile_and_serve.custom_ops.moe.triton_mxfp4_decode import COLUMNS, FACTOR_PTX, NUM_PARTS, PLACE_PTX, WORDS, values_of_part
from compile_and_serve.custom_ops.quantized.mxfp4 import PARTS
from compile_and_serve.custom_ops.triton_common import cdiv, launch_options, let_next_start, supports_pdl, wait_for_previous

ROWS = tl.constexpr(8)  # of a half of a tile
PAIRS = tl.constexpr(WORDS.value // 2)
_MXFP4 = tl.constexpr(MXFP4_TABLE)


def _products_ptx(part: int) -> str:
    """PTX that adds w x over a part of a block: two products of 16 rows (8 of each half of the tile), 16 inputs and 8 equal columns.

    Outputs $0 to $3: the sums of row g of the first half (twice) and of the second half (twice), which are whole in every lane of a row.
    Inputs, four registers each: the words of both halves, those of x, the factors of both halves, the sums before.
    """
    lines = [".reg .b32 m, a0, a1, a2, a3;"]
    for step in range(2):
        for register, (words, word, factor) in enumerate(((4, 0, 16), (8, 0, 20), (4, 1, 16), (8, 1, 20))):
            place = PLACE_PTX[part].replace("$1", f"${words + 2 * step + word}")
            lines.append(f"{place} mul.rn.bf16x2 a{register}, m, ${factor};")
        before = ("$24, $25, $26, $27", "$0, $1, $2, $3")[step]
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {a0, a1, a2, a3}, "
            f"{{${12 + 2 * step}, ${13 + 2 * step}}}, {{{before}}};"
        )
    return "{" + " ".join(lines) + "}"


PRODUCTS_PTX = tl.constexpr(tuple(_products_ptx(part) for part in range(PARTS)))
CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 20 + ["f"] * 4))


def _code_products_ptx(part: int, kind: str, power: str, ones: str, has_minima: bool) -> str:
    """As `_products_ptx`, of integer codes in x's dtype ("bf16" or "f16").

    Inputs, four registers each: the words of both halves, those of x, pairs of power + zero point of both halves, the scales of both
    halves, with minima those of both halves, the sums before. power: of two, whose lowest bits a code fills. ones: two ones.
    """
    lines = [".reg .b32 c, o, a0, a1, a2, a3; .reg .f32 z, s0, s1, s2, s3, m0, m1, m2, m3; mov.f32 z, 0f00000000;"]
    lines += [f"mov.b32 o, {ones};"] if has_minima else []
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    for step in range(2):
        for register, (words, word, zero) in enumerate(((4, 0, 16), (8, 0, 20), (4, 1, 16), (8, 1, 20))):
            at = words + 2 * step + word
            lines.append(
                f"shr.u32 c, ${at}, {4 * part}; lop3.b32 c, c, 0x000F000F, {power}, 0xEA; sub.rn.{kind}x2 a{register}, c, ${zero};"
            )
        x = f"{{${12 + 2 * step}, ${13 + 2 * step}}}"
        before = "{z, z, z, z}" if step == 0 else "{s0, s1, s2, s3}"
        lines.append(f"{mma} {{s0, s1, s2, s3}}, {{a0, a1, a2, a3}}, {x}, {before};")
        if has_minima:
            before = before.replace("s", "m")
            lines.append(f"{mma} {{m0, m1, m2, m3}}, {{o, o, o, o}}, {x}, {before};")
    acc = 40 if has_minima else 32
    for i in range(4):
        half = i // 2
        lines.append(f"fma.rn.f32 ${i}, s{i}, ${24 + 4 * half}, ${acc + i};")
        if has_minima:
            lines.append(f"fma.rn.f32 ${i}, m{i}, ${32 + 4 * half}, ${i};")
    return "{" + " ".join(lines) + "}"


BFLOAT16_CODES_PTX = tl.constexpr(
    tuple(_code_products_ptx(part, "bf16", "0x43004300", "0x3F803F80", minima) for minima in (False, True) for part in range(PARTS))
)
FLOAT16_CODES_PTX = tl.constexpr(
    tuple(_code_products_ptx(part, "f16", "0x64006400", "0x3C003C00", minima) for minima in (False, True) for part in range(PARTS))
)
CODES_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 20 + ["f"] * 12))
MINIMA_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 20 + ["f"] * 20))


@triton.jit
def _spots(BLOCKS: tl.constexpr):
    """The block and the row of each row of a tile: int32 [B], int32 [B]"""
    spots_B = tl.arange(0, BLOCKS * ROWS)
    return spots_B // ROWS, spots_B % ROWS


@triton.jit
def _words(w_ptr, blocks_B, rows_B, num_blocks, num_rows):
    """The words of rows of blocks: int32 [B, C]. Blocks behind the last one have zeros."""
    at_BC = (blocks_B * num_rows + rows_B)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    return tl.load(w_ptr + at_BC, mask=(blocks_B < num_blocks)[:, None], other=0, eviction_policy="evict_first")


@triton.jit
def _block_scales(scale_ptr, blocks_B, rows_B, num_blocks, num_rows, TABLE: tl.constexpr):
    """Of MXFP4, the scales of rows of blocks: int32 [B]"""
    if TABLE == _MXFP4:
        return tl.load(scale_ptr + blocks_B * num_rows + rows_B, mask=blocks_B < num_blocks, other=0)
    else:
        return rows_B  # not used


@triton.jit
def _values(words_BC, scales_B, PART: tl.constexpr):
    """For the interpreter: the values of a part, float32 [B, 2 C]"""
    low, high = words_BC.to(tl.int16), (words_BC >> 16).to(tl.int16)
    return values_of_part(tl.reshape(tl.join(low, high), (words_BC.shape[0], WORDS)), scales_B, PART, tl.float32, False)


@triton.jit
def _add_mxfp4_products(acc_BC, tile, x_ptr, blocks_B, inputs, PTX: tl.constexpr):
    """acc + w x. tile: words and scales of both halves. acc[b, 4 t + i]: a sum of row b of the first half for i < 2, else of the second."""
    first, first_scales, second, second_scales = tile
    for part in tl.static_range(NUM_PARTS):
        ok_B1 = (blocks_B * COLUMNS < inputs - part * WORDS)[:, None]
        if PTX:
            pairs_BC = blocks_B[:, None] * (COLUMNS // 2) + part * PAIRS + tl.arange(0, PAIRS)[None, :]
            x_BC = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pairs_BC, mask=ok_B1, other=0)
            factors = tl.inline_asm_elementwise(FACTOR_PTX[part], "=r,r", [first_scales], dtype=tl.int32, is_pure=True, pack=1)
            second_factors = tl.inline_asm_elementwise(FACTOR_PTX[part], "=r,r", [second_scales], dtype=tl.int32, is_pure=True, pack=1)
            acc_BC = tl.inline_asm_elementwise(
                PRODUCTS_PTX[part],
                CONSTRAINTS,
                [
                    first,
                    second,
                    x_BC,
                    tl.broadcast_to(factors[:, None], first.shape),
                    tl.broadcast_to(second_factors[:, None], first.shape),
                    acc_BC,
                ],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
        else:
            columns_BK = blocks_B[:, None] * COLUMNS + part * WORDS + tl.arange(0, WORDS)[None, :]
            x_BK = tl.load(x_ptr + columns_BK, mask=ok_B1, other=0.0).to(tl.float32)
            y_B = tl.sum(_values(first, first_scales, part) * x_BK, 1)
            second_y_B = tl.sum(_values(second, second_scales, part) * x_BK, 1)
            acc_BC += tl.where((tl.arange(0, PAIRS) % 4 < 2)[None, :], y_B[:, None], second_y_B[:, None])
    return acc_BC


@triton.jit
def _pairs_of(values_B, DOT: tl.constexpr):
    """Two equal numbers of x's dtype in one register: int32 [B]"""
    bits_B = values_B.to(DOT).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits_B | (bits_B << 16)


@triton.jit
def _code_values(words_BC, zeros_B, PART: tl.constexpr):
    """For the interpreter: code less zero point of a part, float32 [B, 2 C]"""
    words = tl.reshape(tl.join(words_BC & 0xFFFF, (words_BC >> 16) & 0xFFFF), (words_BC.shape[0], WORDS))
    return ((words >> (4 * PART)) & 15).to(tl.float32) - zeros_B[:, None]


@triton.jit
def _add_code_products(
    acc_BC, first, second, x_ptr, blocks_B, rows_B, second_rows_B, scale_ptr, offset_ptr, factor_ptr, expert, num_rows, num_groups, inputs,
    GROUP_SIZE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr, FACTORS: tl.constexpr, POWER: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """As `_add_mxfp4_products`, of integer codes."""
    DOT: tl.constexpr = x_ptr.dtype.element_ty
    CODES_PTX: tl.constexpr = BFLOAT16_CODES_PTX if tl.bfloat16 == DOT else FLOAT16_CODES_PTX
    for part in tl.static_range(NUM_PARTS):
        ok_B1 = (blocks_B * COLUMNS < inputs - part * WORDS)[:, None]
        if part * WORDS % GROUP_SIZE == 0:  # else the group of the part before
            group_B = tl.minimum((blocks_B * COLUMNS + part * WORDS) // GROUP_SIZE, num_groups - 1)
            scales = scales_at(scale_ptr, factor_ptr, expert, rows_B, group_B, num_rows, num_groups, PER_FACTOR, FACTORS, 0)
            second_scales = scales_at(scale_ptr, factor_ptr, expert, second_rows_B, group_B, num_rows, num_groups, PER_FACTOR, FACTORS, 0)
            if MINIMA:
                minima = scales_at(offset_ptr, factor_ptr, expert, rows_B, group_B, num_rows, num_groups, PER_FACTOR, FACTORS, 1)
                second_minima = scales_at(
                    offset_ptr, factor_ptr, expert, second_rows_B, group_B, num_rows, num_groups, PER_FACTOR, FACTORS, 1
                )
                zeros = tl.zeros(scales.shape, dtype=tl.float32)
                second_zeros = zeros
            elif offset_ptr is not None:
                at_B = (expert * num_groups + group_B) * num_rows
                zeros = tl.load(offset_ptr + at_B + rows_B).to(tl.float32)
                second_zeros = tl.load(offset_ptr + at_B + second_rows_B).to(tl.float32)
            else:
                zeros = tl.full(scales.shape, 8.0, dtype=tl.float32)
                second_zeros = zeros
        if PTX:
            pairs_BC = blocks_B[:, None] * (COLUMNS // 2) + part * PAIRS + tl.arange(0, PAIRS)[None, :]
            x_BC = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + pairs_BC, mask=ok_B1, other=0)
            zero_pairs = tl.broadcast_to(_pairs_of(zeros + POWER, DOT)[:, None], first.shape)
            second_zero_pairs = tl.broadcast_to(_pairs_of(second_zeros + POWER, DOT)[:, None], first.shape)
            scales_BC = tl.broadcast_to(scales[:, None], first.shape)
            second_scales_BC = tl.broadcast_to(second_scales[:, None], first.shape)
            if MINIMA:
                minima_BC = tl.broadcast_to(minima[:, None], first.shape)
                second_minima_BC = tl.broadcast_to(second_minima[:, None], first.shape)
                acc_BC = tl.inline_asm_elementwise(
                    CODES_PTX[NUM_PARTS + part], MINIMA_CONSTRAINTS,
                    [first, second, x_BC, zero_pairs, second_zero_pairs, scales_BC, second_scales_BC, minima_BC, second_minima_BC, acc_BC],
                    dtype=tl.float32, is_pure=True, pack=4,
                )  # fmt: skip
            else:
                acc_BC = tl.inline_asm_elementwise(
                    CODES_PTX[part], CODES_CONSTRAINTS,
                    [first, second, x_BC, zero_pairs, second_zero_pairs, scales_BC, second_scales_BC, acc_BC],
                    dtype=tl.float32, is_pure=True, pack=4,
                )  # fmt: skip
        else:
            columns_BK = blocks_B[:, None] * COLUMNS + part * WORDS + tl.arange(0, WORDS)[None, :]
            x_BK = tl.load(x_ptr + columns_BK, mask=ok_B1, other=0.0).to(tl.float32)
            y_B = tl.sum(_code_values(first, zeros, part) * x_BK, 1) * scales
            second_y_B = tl.sum(_code_values(second, second_zeros, part) * x_BK, 1) * second_scales
            if MINIMA:
                total_B = tl.sum(x_BK, 1)
                y_B += total_B * minima
                second_y_B += total_B * second_minima
            acc_BC += tl.where((tl.arange(0, PAIRS) % 4 < 2)[None, :], y_B[:, None], second_y_B[:, None])
    return acc_BC


@triton.jit
def _sums(acc_BC, BLOCKS: tl.constexpr):
    """The sums of the rows of both halves: [R], [R]. Each is eight times in a block's sums."""
    halves = tl.reshape(acc_BC, (BLOCKS, ROWS, PAIRS // 4, 2, 2))
    return tl.split(tl.sum(tl.sum(tl.sum(halves, 4), 2), 0) * 0.125)


@triton.jit
def _coded_gemv_gate_up_kernel(
    x_ptr, experts_ptr, w_ptr, scale_ptr, offset_ptr, factor_ptr, bias_ptr, h_ptr, x_stride, features, inputs, num_groups, top_k, limit,
    num_slots, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, BLOCKS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr, FACTORS: tl.constexpr,
    POWER: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, first_row = tl.program_id(1), tl.program_id(0) * ROWS
    rows_R = first_row + tl.arange(0, ROWS)
    ok_R = rows_R < features
    blocks_B, rows_B = _spots(BLOCKS)
    rows_B = tl.minimum(first_row + rows_B, features - 1)
    wait_for_previous(PDL)
    let_next_start(PDL)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert >= num_slots:  # another rank's
        return
    w_ptr += expert * NUM_BLOCKS * 2 * features * PAIRS
    x_ptr += (pair // top_k).to(tl.int64) * x_stride
    tiles = ()
    for start in tl.static_range(0, NUM_BLOCKS, BLOCKS):
        gate = _words(w_ptr, start + blocks_B, rows_B, NUM_BLOCKS, 2 * features)
        up = _words(w_ptr, start + blocks_B, features + rows_B, NUM_BLOCKS, 2 * features)
        block_scales = scale_ptr + expert * NUM_BLOCKS * 2 * features
        gate_scales = _block_scales(block_scales, start + blocks_B, rows_B, NUM_BLOCKS, 2 * features, TABLE)
        up_scales = _block_scales(block_scales, start + blocks_B, features + rows_B, NUM_BLOCKS, 2 * features, TABLE)
        tiles += ((gate, gate_scales, up, up_scales),)  # type: ignore[assignment]
    if HAS_BIAS:  # loads while the rows are multiplied
        bias_R = bias_ptr + expert * 2 * features + rows_R
        gate_bias_R = tl.load(bias_R, mask=ok_R, other=0.0).to(tl.float32)
        up_bias_R = tl.load(bias_R + features, mask=ok_R, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCKS * ROWS, PAIRS), dtype=tl.float32)
    for step in tl.static_range(len(tiles)):
        if TABLE == _MXFP4:
            acc = _add_mxfp4_products(acc, tiles[step], x_ptr, step * BLOCKS + blocks_B, inputs, PTX)
        else:
            acc = _add_code_products(
                acc, tiles[step][0], tiles[step][2], x_ptr, step * BLOCKS + blocks_B, rows_B, features + rows_B, scale_ptr, offset_ptr,
                factor_ptr, expert, 2 * features, num_groups, inputs, GROUP_SIZE, MINIMA, PER_FACTOR, FACTORS, POWER, PTX,
            )  # fmt: skip
    gate_R, up_R = _sums(acc, BLOCKS)
    if HAS_BIAS:
        gate_R += gate_bias_R
        up_R += up_bias_R
    h_R = activated(gate_R, up_R, limit, CLAMPED).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair * features + rows_R, h_R, mask=ok_R)


@triton.jit
def _coded_gemv_down_kernel(
    h_ptr, experts_ptr, weights_ptr, w_ptr, scale_ptr, offset_ptr, factor_ptr, bias_ptr, residual_ptr, out_ptr, outputs, features,
    num_groups, residual_stride, num_slots,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPREAD: tl.constexpr, TOP_K: tl.constexpr, BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr,
    FACTORS: tl.constexpr, POWER: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, first_row = tl.program_id(1), tl.program_id(0) * 2 * ROWS
    rows_R = first_row + tl.arange(0, ROWS)
    ok_R, second_ok_R = rows_R < outputs, rows_R + ROWS < outputs
    blocks_B, rows_B = _spots(BLOCKS)
    second_rows_B = tl.minimum(first_row + ROWS + rows_B, outputs - 1)
    rows_B = tl.minimum(first_row + rows_B, outputs - 1)
    sum_R = tl.zeros((ROWS,), dtype=tl.float32)
    second_sum_R = tl.zeros((ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCKS * ROWS, PAIRS), dtype=tl.float32)
    let_next_start(PDL)
    wait_for_previous(PDL)
    # Loads of as many experts are in flight. With all of them, Triton takes minutes where an expert has many scales.
    UNROLL: tl.constexpr = TOP_K if TABLE == _MXFP4 else 4 if FACTORS == 0 and TOP_K % 4 == 0 else 2 if TOP_K % 2 == 0 else 1
    for first_k in tl.range(0, TOP_K, UNROLL):
        for k in tl.static_range(UNROLL):
            pair = token * TOP_K + first_k + k
            expert = tl.load(experts_ptr + pair).to(tl.int64)
            weight = tl.load(weights_ptr + pair).to(tl.float32)
            num_blocks, inputs = NUM_BLOCKS, features
            if SPREAD:  # of another rank's pair, nothing is read and zero is added
                is_here = expert < num_slots
                expert, weight = tl.where(is_here, expert, 0), tl.where(is_here, weight, 0.0)
                num_blocks, inputs = tl.where(is_here, NUM_BLOCKS, 0), tl.where(is_here, features, 0)
            w, scales = w_ptr + expert * NUM_BLOCKS * outputs * PAIRS, scale_ptr + expert * NUM_BLOCKS * outputs
            tiles = ()
            for start in tl.static_range(0, NUM_BLOCKS, BLOCKS):
                first = _words(w, start + blocks_B, rows_B, num_blocks, outputs)
                second = _words(w, start + blocks_B, second_rows_B, num_blocks, outputs)
                first_scales = _block_scales(scales, start + blocks_B, rows_B, num_blocks, outputs, TABLE)
                second_scales = _block_scales(scales, start + blocks_B, second_rows_B, num_blocks, outputs, TABLE)
                tiles += ((first, first_scales, second, second_scales),)  # type: ignore[assignment]
            if HAS_BIAS:
                bias_R = bias_ptr + expert * outputs + rows_R
                sum_R += weight * tl.load(bias_R, mask=ok_R, other=0.0).to(tl.float32)
                second_sum_R += weight * tl.load(bias_R + ROWS, mask=second_ok_R, other=0.0).to(tl.float32)
            acc = tl.zeros((BLOCKS * ROWS, PAIRS), dtype=tl.float32)
            for step in tl.static_range(len(tiles)):
                if TABLE == _MXFP4:
                    acc = _add_mxfp4_products(acc, tiles[step], h_ptr + pair * features, step * BLOCKS + blocks_B, inputs, PTX)
                else:
                    acc = _add_code_products(
                        acc, tiles[step][0], tiles[step][2], h_ptr + pair * features, step * BLOCKS + blocks_B, rows_B, second_rows_B,
                        scale_ptr, offset_ptr, factor_ptr, expert, outputs, num_groups, inputs, GROUP_SIZE, MINIMA, PER_FACTOR, FACTORS,
                        POWER, PTX,
                    )  # fmt: skip
            total += acc * weight
    if HAS_RESIDUAL:  # loads while the sums are reduced
        residual_R = residual_ptr + token.to(tl.int64) * residual_stride + rows_R
        sum_R += tl.load(residual_R, mask=ok_R, other=0.0).to(tl.float32)
        second_sum_R += tl.load(residual_R + ROWS, mask=second_ok_R, other=0.0).to(tl.float32)
    total_R, second_total_R = _sums(total, BLOCKS)
    out_R = out_ptr + token * outputs + rows_R
    tl.store(out_R, (sum_R + total_R).to(out_ptr.dtype.element_ty), mask=ok_R)
    tl.store(out_R + ROWS, (second_sum_R + second_total_R).to(out_ptr.dtype.element_ty), mask=second_ok_R)


@dataclass(frozen=True, slots=True)
class GemvTiles:
    """Blocks of columns at once, which the warps share, of gate and up, and of down."""

    gate_up: int
    down: int

    @property
    def name(self) -> str:
        return f"gemv {self.gate_up}/{self.down} blocks"


GEMV_TILES = (GemvTiles(8, 8), GemvTiles(4, 4))
# Of integer codes: models with many small experts have few blocks in a row of down.
CODES_TILES = (GemvTiles(8, 8), GemvTiles(4, 4), GemvTiles(8, 4), GemvTiles(16, 8), GemvTiles(8, 2))


def gemv_tiles(operands: Operands) -> tuple[GemvTiles, ...]:
    """The candidates; none where the method does not take the operands."""
    dtype = operands.x_TD.dtype
    if not supports_pdl(operands.x_TD.device) or num_parts(operands.activation) == 1:
        return ()
    if not operands.codes:
        return GEMV_TILES if dtype == torch.bfloat16 else ()
    takes = dtype in (torch.bfloat16, torch.float16) and all(_takes(one) for one in coded_linears(operands, operands.gate_up))
    return CODES_TILES if takes and operands.x_TD.stride(0) % 2 == 0 else ()


def _takes(linear: CodedLinear) -> bool:
    form = linear.form
    return form is not None and form.bits == 4 and not form.table and form.group_size >= 32 and linear.inputs % 32 == 0


def run_coded_gemv(tiles: GemvTiles, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """The method. gate_up: replaces the operands' weight, for the tuner."""
    operands = normed(operands)
    x_TD, pairs = operands.x_TD, operands.num_pairs
    (num_tokens, hidden), features = x_TD.shape, gate_up.shape[1] // 2
    h_PF, out_TD = x_TD.new_empty(pairs, features), x_TD.new_empty(num_tokens, hidden)
    first, second = coded_linears(operands, gate_up)
    pdl = supports_pdl(x_TD.device)
    names = ("GROUP_SIZE", "TABLE", "MINIMA", "PER_FACTOR", "FACTORS", "POWER")

    def constants(linear: CodedLinear) -> dict[str, Any]:
        made = linear.constants(x_TD.dtype)
        shared = {"PTX": pdl, "PDL": pdl, "NUM_BLOCKS": linear.num_blocks, "HAS_BIAS": linear.bias is not None}
        return {name: made[name] for name in names} | shared | launch_options(pdl)

    launch(
        _coded_gemv_gate_up_kernel, (cdiv(features, 8), pairs),
        x_TD, operands.ids_TK, gate_up.view(torch.int32), first.scale, first.offset, first.factor, first.bias, h_PF, x_TD.stride(0),
        features, hidden, first.num_groups, operands.top_k, operands.limit, gate_up.shape[0],
        CLAMPED=operands.clamped, BLOCKS=tiles.gate_up, num_warps=tiles.gate_up, **constants(first),
    )  # fmt: skip
    launch(
        _coded_gemv_down_kernel, (cdiv(hidden, 16), num_tokens),
        h_PF, operands.ids_TK, operands.weights_TK, second.weight.view(torch.int32), second.scale, second.offset, second.factor,
        second.bias, operands.residual_TD, out_TD, hidden, features, second.num_groups, operands.residual_stride,
        gate_up.shape[0], SPREAD=operands.is_spread,
        HAS_RESIDUAL=operands.residual_TD is not None, TOP_K=operands.top_k, BLOCKS=tiles.down, num_warps=tiles.down, **constants(second),
    )  # fmt: skip
    return out_TD
