"""`cas::experts` on CUDA over MXFP4 weights for few pairs: the "gemv" method.

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

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.moe.triton_experts import Operands, activated, normed
from compile_and_serve.custom_ops.moe.triton_mxfp4_decode import COLUMNS, FACTOR_PTX, NUM_PARTS, PLACE_PTX, WORDS, values_of_part
from compile_and_serve.custom_ops.quantized.mxfp4 import PARTS
from compile_and_serve.custom_ops.triton_common import cdiv, launch_options, let_next_start, supports_pdl, wait_for_previous

ROWS = tl.constexpr(8)  # of a half of a tile
PAIRS = tl.constexpr(WORDS.value // 2)


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


@triton.jit
def _spots(BLOCKS: tl.constexpr):
    """The block and the row of each row of a tile: int32 [B], int32 [B]"""
    spots_B = tl.arange(0, BLOCKS * ROWS)
    return spots_B // ROWS, spots_B % ROWS


@triton.jit
def _words(w_ptr, scale_ptr, blocks_B, rows_B, num_blocks, num_rows):
    """The words and scales of rows of blocks: int32 [B, C], int32 [B]. Blocks behind the last one have zeros."""
    at_B, ok_B = blocks_B * num_rows + rows_B, blocks_B < num_blocks
    at_BC = at_B[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    words_BC = tl.load(w_ptr + at_BC, mask=ok_B[:, None], other=0, eviction_policy="evict_first")
    return words_BC, tl.load(scale_ptr + at_B, mask=ok_B, other=0)


@triton.jit
def _values(words_BC, scales_B, PART: tl.constexpr):
    """For the interpreter: the values of a part, float32 [B, 2 C]"""
    low, high = words_BC.to(tl.int16), (words_BC >> 16).to(tl.int16)
    return values_of_part(tl.reshape(tl.join(low, high), (words_BC.shape[0], WORDS)), scales_B, PART, tl.float32, False)


@triton.jit
def _add_products(acc_BC, tile, x_ptr, blocks_B, inputs, PTX: tl.constexpr):
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
def _sums(acc_BC, BLOCKS: tl.constexpr):
    """The sums of the rows of both halves: [R], [R]. Each is eight times in a block's sums."""
    halves = tl.reshape(acc_BC, (BLOCKS, ROWS, PAIRS // 4, 2, 2))
    return tl.split(tl.sum(tl.sum(tl.sum(halves, 4), 2), 0) * 0.125)


@triton.jit
def _mxfp4_gemv_gate_up_kernel(
    x_ptr,
    experts_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    h_ptr,
    x_stride,
    features,
    inputs,
    top_k,
    limit,
    num_slots,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
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
    scale_ptr += expert * NUM_BLOCKS * 2 * features
    x_ptr += (pair // top_k).to(tl.int64) * x_stride
    tiles = ()
    for start in tl.static_range(0, NUM_BLOCKS, BLOCKS):
        gate, gate_scales = _words(w_ptr, scale_ptr, start + blocks_B, rows_B, NUM_BLOCKS, 2 * features)
        up, up_scales = _words(w_ptr, scale_ptr, start + blocks_B, features + rows_B, NUM_BLOCKS, 2 * features)
        tiles += ((gate, gate_scales, up, up_scales),)  # type: ignore[assignment]
    if HAS_BIAS:  # loads while the rows are multiplied
        bias_R = bias_ptr + expert * 2 * features + rows_R
        gate_bias_R = tl.load(bias_R, mask=ok_R, other=0.0).to(tl.float32)
        up_bias_R = tl.load(bias_R + features, mask=ok_R, other=0.0).to(tl.float32)
    acc = tl.zeros((BLOCKS * ROWS, PAIRS), dtype=tl.float32)
    for step in tl.static_range(len(tiles)):
        acc = _add_products(acc, tiles[step], x_ptr, step * BLOCKS + blocks_B, inputs, PTX)
    gate_R, up_R = _sums(acc, BLOCKS)
    if HAS_BIAS:
        gate_R += gate_bias_R
        up_R += up_bias_R
    h_R = activated(gate_R, up_R, limit, CLAMPED).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair * features + rows_R, h_R, mask=ok_R)


@triton.jit
def _mxfp4_gemv_down_kernel(
    h_ptr,
    experts_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    features,
    residual_stride,
    num_slots,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPREAD: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
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
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
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
            first, first_scales = _words(w, scales, start + blocks_B, rows_B, num_blocks, outputs)
            second, second_scales = _words(w, scales, start + blocks_B, second_rows_B, num_blocks, outputs)
            tiles += ((first, first_scales, second, second_scales),)  # type: ignore[assignment]
        if HAS_BIAS:
            bias_R = bias_ptr + expert * outputs + rows_R
            sum_R += weight * tl.load(bias_R, mask=ok_R, other=0.0).to(tl.float32)
            second_sum_R += weight * tl.load(bias_R + ROWS, mask=second_ok_R, other=0.0).to(tl.float32)
        acc = tl.zeros((BLOCKS * ROWS, PAIRS), dtype=tl.float32)
        for step in tl.static_range(len(tiles)):
            acc = _add_products(acc, tiles[step], h_ptr + pair * features, step * BLOCKS + blocks_B, inputs, PTX)
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


def run_mxfp4_gemv(tiles: GemvTiles, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """The method, on a GPU for bfloat16 only. gate_up: replaces the operands' weight, for the tuner."""
    operands = normed(operands)
    x_TD, pairs = operands.x_TD, operands.num_pairs
    (num_tokens, hidden), features = x_TD.shape, gate_up.shape[1] // 2
    h_PF, out_TD = x_TD.new_empty(pairs, features), x_TD.new_empty(num_tokens, hidden)
    pdl = supports_pdl(x_TD.device)
    constants = {"PTX": pdl, "PDL": pdl, **launch_options(pdl)}
    assert operands.gate_up_scale is not None
    assert operands.down_scale is not None
    launch(
        _mxfp4_gemv_gate_up_kernel,
        (cdiv(features, 8), pairs),
        x_TD,
        operands.ids_TK,
        gate_up.view(torch.int32),
        operands.gate_up_scale,
        operands.gate_up_bias,
        h_PF,
        x_TD.stride(0),
        features,
        hidden,
        operands.top_k,
        operands.limit,
        gate_up.shape[0],
        HAS_BIAS=operands.gate_up_bias is not None,
        CLAMPED=operands.clamped,
        BLOCKS=tiles.gate_up,
        num_warps=tiles.gate_up,
        NUM_BLOCKS=operands.gate_up_scale.shape[1],
        **constants,
    )
    launch(
        _mxfp4_gemv_down_kernel,
        (cdiv(hidden, 16), num_tokens),
        h_PF,
        operands.ids_TK,
        operands.weights_TK,
        operands.down.view(torch.int32),
        operands.down_scale,
        operands.down_bias,
        operands.residual_TD,
        out_TD,
        hidden,
        features,
        operands.residual_stride,
        gate_up.shape[0],
        HAS_BIAS=operands.down_bias is not None,
        HAS_RESIDUAL=operands.residual_TD is not None,
        SPREAD=operands.is_spread,
        TOP_K=operands.top_k,
        BLOCKS=tiles.down,
        num_warps=tiles.down,
        NUM_BLOCKS=operands.down_scale.shape[1],
        **constants,
    )
    return out_TD
