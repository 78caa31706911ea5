"""`cas::experts` on CUDA over weights of codes, in the layouts of `quantized/mxfp4.py` (MXFP4) and `code_format.py`. The tuner chooses:

- "gemv …", for few pairs, in bfloat16 on Hopper: `triton_coded_gemv`;
- "direct …", for few pairs: each pair is a block of its own, so that nothing is sorted;
- "codes …": blocks of pairs of one expert, as in `triton_experts`;
- "expanded …", for many pairs: the weights are dequantized to x's dtype in scratch memory, then `triton_experts`' kernels run.

Direct and codes decode the weights in registers (`triton_mxfp4_decode`, `triton_code_decode`), between their load and a product on the
tensor cores.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), X experts, D hidden size, F intermediate size
of an expert, O output features, C words of a tile's row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.moe.coded_linear import MXFP4_TABLE, CodedLinear, coded_linears
from compile_and_serve.custom_ops.moe.triton_code_decode import add_code_products, high_words, values_of_codes
from compile_and_serve.custom_ops.moe.triton_coded_gemv import gemv_tiles, run_coded_gemv
from compile_and_serve.custom_ops.moe.triton_experts import Operands, activated, add_results_of_pairs, grouped_tiles, normed, run_grouped
from compile_and_serve.custom_ops.moe.triton_mxfp4_decode import COLUMNS, NUM_PARTS, WORDS, values_of_part
from compile_and_serve.custom_ops.moe.triton_order import ExpertOrder, order_by_expert
from compile_and_serve.custom_ops.triton_common import TRITON_TYPES, cdiv, launch_options, let_next_start, supports_pdl, wait_for_previous

MAX_FEW_PAIRS = 16
MIN_EXPANDED_PAIRS_EACH = 64  # of an expert; writing and reading the expanded weights takes longer: with 32 pairs three times as long
_MXFP4 = tl.constexpr(MXFP4_TABLE)


@triton.jit
def _add_products(
    acc, x_PC, block, w_O, scale_ptr, offset_ptr, factor_ptr, expert, rows_O, num_rows, num_blocks, num_groups, inputs,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr,
    FACTORS: tl.constexpr, WHOLE: tl.constexpr, ROWS_FIRST: tl.constexpr, DOT: tl.constexpr, POWER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc + x wᵀ over one block of columns. x_PC: pointers to the first WORDS columns of x's rows. w_O: to the block's rows."""
    words_OC = tl.load(w_O[:, None] + tl.arange(0, WORDS)[None, :])
    if TABLE == _MXFP4:
        scales_O = tl.load(scale_ptr + (expert * num_blocks + block) * num_rows + rows_O)
        for part in tl.static_range(NUM_PARTS):
            # Behind the last column, codes are zeros: any columns of x will do.
            x = tl.load(x_PC + tl.minimum(block * COLUMNS + part * WORDS, inputs - WORDS))
            w = values_of_part(words_OC, scales_O, part, DOT, PTX)
            if ROWS_FIRST:
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            else:
                acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        return acc
    else:
        return add_code_products(
            acc, x_PC, block, words_OC, high_words(w_O, BITS), scale_ptr, offset_ptr, factor_ptr, expert, rows_O, num_rows, num_groups,
            inputs, BITS, GROUP_SIZE, TABLE, MINIMA, PER_FACTOR, FACTORS, WHOLE, ROWS_FIRST, DOT, POWER, PTX,
        )  # fmt: skip


@triton.jit
def _block_of_pairs(order_ptr, experts_ptr, num_pairs, num_slots, DIRECT: tl.constexpr, BLOCK_P: tl.constexpr):
    """(the expert of this program's block or -1, its pairs, which of them exist). DIRECT: the block is one pair."""
    block = tl.program_id(1)
    spots_P = tl.arange(0, BLOCK_P)
    if DIRECT:
        expert = tl.load(experts_ptr + block).to(tl.int64)
        return tl.where(expert < num_slots, expert, -1), block + tl.zeros_like(spots_P), spots_P == 0
    else:
        pairs_P = tl.load(order_ptr + block * BLOCK_P + spots_P)
        return tl.load(experts_ptr + block).to(tl.int64), pairs_P, pairs_P < num_pairs


@triton.jit(do_not_specialize=["num_pairs"])
def _coded_gate_up_kernel(
    x_ptr, order_ptr, experts_ptr, w_ptr, scale_ptr, offset_ptr, factor_ptr, bias_ptr, h_ptr, x_stride, num_pairs, features, inputs,
    num_blocks, num_groups, top_k, limit, num_slots,
    HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, DIRECT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr,
    FACTORS: tl.constexpr, WHOLE: tl.constexpr, ROW_WORDS: tl.constexpr, POWER: tl.constexpr,
    STAGES: tl.constexpr, ROWS_FIRST: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    ok_F = rows_F < features
    safe_rows_F = tl.where(ok_F, rows_F, 0)
    words_C = tl.arange(0, WORDS)
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, pairs_P, ok_P = _block_of_pairs(order_ptr, experts_ptr, num_pairs, num_slots, DIRECT, BLOCK_P)
    if expert >= 0:
        tokens_P = tl.where(ok_P | DIRECT, pairs_P, 0) // top_k
        x_PC = x_ptr + tokens_P[:, None].to(tl.int64) * x_stride + words_C[None, :]
        rows = 2 * features
        block_words = rows * ROW_WORDS
        gate_F = w_ptr + expert * num_blocks * block_words + safe_rows_F * ROW_WORDS
        if ROWS_FIRST:
            acc = tl.zeros((BLOCK_F, BLOCK_P), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_F, BLOCK_P), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_P, BLOCK_F), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_P, BLOCK_F), dtype=tl.float32)
        if HAS_BIAS:  # loads while the rows are multiplied
            bias_F = bias_ptr + expert * rows + rows_F
            gate_bias_F = tl.load(bias_F, mask=ok_F, other=0.0).to(tl.float32)
            up_bias_F = tl.load(bias_F + features, mask=ok_F, other=0.0).to(tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            acc = _add_products(
                acc, x_PC, block, gate_F + block * block_words, scale_ptr, offset_ptr, factor_ptr, expert, safe_rows_F, rows, num_blocks,
                num_groups, inputs, BITS, GROUP_SIZE, TABLE, MINIMA, PER_FACTOR, FACTORS, WHOLE, ROWS_FIRST, DOT, POWER, PTX,
            )  # fmt: skip
            acc_up = _add_products(
                acc_up, x_PC, block, gate_F + block * block_words + features * ROW_WORDS, scale_ptr, offset_ptr, factor_ptr, expert,
                safe_rows_F + features, rows, num_blocks, num_groups, inputs, BITS, GROUP_SIZE, TABLE, MINIMA, PER_FACTOR, FACTORS, WHOLE,
                ROWS_FIRST, DOT, POWER, PTX,
            )  # fmt: skip
        if ROWS_FIRST:
            acc, acc_up = tl.trans(acc), tl.trans(acc_up)
        if HAS_BIAS:
            acc += gate_bias_F[None, :]
            acc_up += up_bias_F[None, :]
        out_PF = activated(acc, acc_up, limit, CLAMPED)
        h_PF = h_ptr + pairs_P[:, None].to(tl.int64) * features + rows_F[None, :]
        tl.store(h_PF, out_PF.to(h_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_F[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _coded_down_kernel(
    h_ptr, order_ptr, experts_ptr, weights_ptr, w_ptr, scale_ptr, offset_ptr, factor_ptr, bias_ptr, y_ptr, num_pairs, outputs, features,
    num_blocks, num_groups, num_slots,
    HAS_BIAS: tl.constexpr, DIRECT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr, PER_FACTOR: tl.constexpr,
    FACTORS: tl.constexpr, WHOLE: tl.constexpr, ROW_WORDS: tl.constexpr, POWER: tl.constexpr,
    STAGES: tl.constexpr, ROWS_FIRST: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < outputs
    safe_rows_O = tl.where(ok_O, rows_O, 0)
    words_C = tl.arange(0, WORDS)
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, pairs_P, ok_P = _block_of_pairs(order_ptr, experts_ptr, num_pairs, num_slots, DIRECT, BLOCK_P)
    if expert >= 0:
        safe_pairs_P = tl.where(ok_P | DIRECT, pairs_P, 0)
        h_PC = h_ptr + safe_pairs_P[:, None].to(tl.int64) * features + words_C[None, :]
        block_words = outputs * ROW_WORDS
        w_O = w_ptr + expert * num_blocks * block_words + safe_rows_O * ROW_WORDS
        if ROWS_FIRST:
            acc = tl.zeros((BLOCK_O, BLOCK_P), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_P, BLOCK_O), dtype=tl.float32)
        weights_P = tl.load(weights_ptr + safe_pairs_P).to(tl.float32)  # loads while the rows are multiplied
        if HAS_BIAS:
            bias_O = tl.load(bias_ptr + expert * outputs + rows_O, mask=ok_O, other=0.0).to(tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            acc = _add_products(
                acc, h_PC, block, w_O + block * block_words, scale_ptr, offset_ptr, factor_ptr, expert, safe_rows_O, outputs, num_blocks,
                num_groups, features, BITS, GROUP_SIZE, TABLE, MINIMA, PER_FACTOR, FACTORS, WHOLE, ROWS_FIRST, DOT, POWER, PTX,
            )  # fmt: skip
        if ROWS_FIRST:
            acc = tl.trans(acc)
        if HAS_BIAS:
            acc += bias_O[None, :]
        acc *= weights_P[:, None]
        y_PO = y_ptr + safe_pairs_P[:, None].to(tl.int64) * outputs + rows_O[None, :]
        tl.store(y_PO, acc.to(y_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_O[None, :])


@triton.jit
def _dequantize_coded_kernel(
    w_ptr, scale_ptr, offset_ptr, factor_ptr, out_ptr, outputs, inputs, num_blocks, num_groups,
    BLOCK_O: tl.constexpr, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, TABLE: tl.constexpr, MINIMA: tl.constexpr,
    PER_FACTOR: tl.constexpr, FACTORS: tl.constexpr, ROW_WORDS: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    expert, block = tl.program_id(2).to(tl.int64), tl.program_id(1)
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < outputs
    safe_rows_O = tl.where(ok_O, rows_O, 0)
    words_C = tl.arange(0, WORDS)
    PARTS: tl.constexpr = 4 if BITS < 8 else 2
    let_next_start(PDL)
    w_O = w_ptr + ((expert * num_blocks + block) * outputs + safe_rows_O) * ROW_WORDS
    words = tl.load(w_O[:, None] + words_C[None, :])
    high = high_words(w_O, BITS)
    if TABLE == _MXFP4:
        scales = tl.load(scale_ptr + (expert * num_blocks + block) * outputs + safe_rows_O)
    wait_for_previous(PDL)
    for part in tl.static_range(PARTS):
        columns_C = block * (PARTS * WORDS) + part * WORDS + words_C
        at_OC = out_ptr + (expert * outputs + rows_O)[:, None] * inputs + columns_C[None, :]
        if TABLE == _MXFP4:
            values = values_of_part(words, scales, part, DOT, PTX)
        else:
            values = values_of_codes(
                words, high, scale_ptr, offset_ptr, factor_ptr, expert, safe_rows_O, outputs, num_groups, block,
                part, BITS, GROUP_SIZE, TABLE, MINIMA, PER_FACTOR, FACTORS,
            ).to(DOT)  # fmt: skip
        tl.store(at_OC, values, mask=ok_O[:, None] & (columns_C < inputs)[None, :])


@dataclass(frozen=True, slots=True)
class CodeTiles:
    """block_p pairs; block_f rows of gate and of up; block_o rows of down. rows_first: the products' first factor is the weights."""

    block_p: int
    block_f: int
    block_o: int
    stages: int
    warps: int
    rows_first: bool = False

    @property
    def name(self) -> str:
        order = "wx" if self.rows_first else "xw"
        return f"{self.block_p}x{self.block_f}/{self.block_o} {order} {self.stages} stages {self.warps} warps"


# By the number of pairs that an expert has on average, the likely best first.
_DIRECT = (CodeTiles(16, 64, 64, 5, 4, rows_first=True), CodeTiles(16, 32, 32, 6, 4))
_FEW = (
    CodeTiles(16, 64, 128, 3, 4, rows_first=True),
    CodeTiles(16, 128, 128, 4, 4),
    CodeTiles(16, 64, 128, 4, 4),
    CodeTiles(16, 64, 64, 5, 4, rows_first=True),
)
_SOME = (CodeTiles(32, 64, 128, 4, 4), CodeTiles(32, 64, 64, 4, 4, rows_first=True), CodeTiles(16, 64, 128, 4, 4))
_MORE = (CodeTiles(64, 64, 128, 4, 4, rows_first=True), CodeTiles(32, 64, 128, 4, 4), CodeTiles(64, 128, 128, 3, 8, rows_first=True))
_MANY = (CodeTiles(128, 128, 256, 3, 8, rows_first=True), CodeTiles(128, 64, 128, 4, 4, rows_first=True))


def code_tiles(num_pairs: int, num_experts: int) -> tuple[CodeTiles, ...]:
    """The candidates for a number of pairs that are spread evenly over the experts."""
    each = num_pairs / num_experts
    return _FEW if each <= 12 else _SOME if each <= 32 else _MORE if each <= 96 else _MANY


def _constants(operands: Operands, tiles: CodeTiles, linear: CodedLinear, direct: bool) -> dict[str, object]:
    x_TD = operands.x_TD
    pdl = supports_pdl(x_TD.device)
    return linear.constants(x_TD.dtype) | {
        "HAS_BIAS": linear.bias is not None,
        "DIRECT": direct,
        "BLOCK_P": tiles.block_p,
        "STAGES": tiles.stages,
        "ROWS_FIRST": tiles.rows_first,
        "DOT": TRITON_TYPES[x_TD.dtype],
        "PTX": pdl and x_TD.dtype in (torch.bfloat16, torch.float16),
        "PDL": pdl,
        "num_warps": tiles.warps,
        **launch_options(pdl),
    }


def run_coded(tiles: CodeTiles, direct: bool, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """A method without expanded weights. gate_up: replaces the operands' weight, for the tuner."""
    operands = normed(operands)
    x_TD, hidden, pairs, features = operands.x_TD, operands.x_TD.shape[1], operands.num_pairs, gate_up.shape[1] // 2
    first, second = coded_linears(operands, gate_up)
    order = None if direct else order_by_expert(operands.ids_TK, gate_up.shape[0], tiles.block_p)
    order_pairs, block_experts, blocks = _blocks(order, operands)
    h_PF = x_TD.new_empty(pairs, features)
    launch(
        _coded_gate_up_kernel, (cdiv(features, tiles.block_f), blocks),
        x_TD, order_pairs, block_experts, gate_up, first.scale, first.offset, first.factor, first.bias, h_PF, x_TD.stride(0), pairs,
        features, hidden, first.num_blocks, first.num_groups, operands.top_k, operands.limit, gate_up.shape[0],
        CLAMPED=operands.clamped, BLOCK_F=tiles.block_f, **_constants(operands, tiles, first, direct),
    )  # fmt: skip
    y_PD = multiply_coded_pairs(tiles, operands, h_PF, second, order, operands.weights_TK)
    return add_results_of_pairs(operands, y_PD)


def _blocks(order: ExpertOrder | None, operands: Operands) -> tuple[torch.Tensor | None, torch.Tensor, int]:
    """(pairs of each block, its expert, blocks). order: None if each pair is a block."""
    if order is None:
        return None, operands.ids_TK, operands.num_pairs
    return order.pairs, order.experts, order.max_blocks


def multiply_coded_pairs(
    tiles: CodeTiles, operands: Operands, x_PI: torch.Tensor, linear: CodedLinear, order: ExpertOrder | None, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Each pair's row times its expert's matrix, times the pair's weight. order: as of `_blocks`. → [P, O]"""
    order_pairs, block_experts, blocks = _blocks(order, operands)
    (num_pairs, inputs), outputs = x_PI.shape, linear.weight.shape[1]
    y_PO = x_PI.new_empty(num_pairs, outputs)
    launch(
        _coded_down_kernel, (cdiv(outputs, tiles.block_o), blocks),
        x_PI, order_pairs, block_experts, weights_TK, linear.weight, linear.scale, linear.offset, linear.factor, linear.bias, y_PO,
        num_pairs, outputs, inputs, linear.num_blocks, linear.num_groups, linear.weight.shape[0],
        BLOCK_O=tiles.block_o, **_constants(operands, tiles, linear, order is None),
    )  # fmt: skip
    return y_PO


def dequantize(linear: CodedLinear, dtype: torch.dtype) -> torch.Tensor:
    """The weights in `dtype`. → [X, O, I]"""
    num_experts, outputs, _ = linear.weight.shape
    out = torch.empty(num_experts, outputs, linear.inputs, dtype=dtype, device=linear.weight.device)
    pdl, block_o = supports_pdl(linear.weight.device), 64
    constants = linear.constants(dtype)
    launch(
        _dequantize_coded_kernel, (cdiv(outputs, block_o), linear.num_blocks, num_experts),
        linear.weight, linear.scale, linear.offset, linear.factor, out, outputs, linear.inputs, linear.num_blocks, linear.num_groups,
        BLOCK_O=block_o, DOT=TRITON_TYPES[dtype], PTX=pdl and dtype in (torch.bfloat16, torch.float16), PDL=pdl,
        **{name: value for name, value in constants.items() if name not in ("WHOLE", "POWER")}, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def expanded_codes(operands: Operands, gate_up: torch.Tensor) -> Operands:
    """The operands with weights in x's dtype."""
    first, second = (dequantize(linear, operands.x_TD.dtype) for linear in coded_linears(operands, gate_up))
    return replace(
        operands,
        gate_up=first,
        gate_up_scale=None,
        gate_up_offset=None,
        gate_up_factor=None,
        down=second,
        down_scale=None,
        down_offset=None,
        down_factor=None,
        codes="",
    )


def _run_expanded(tiles: Any, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    operands = expanded_codes(operands, gate_up)
    return run_grouped(tiles, operands, operands.gate_up)


def coded_methods(operands: Operands) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The methods for these operands by name, as functions of the gate/up weight. The first is the default."""
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    if operands.num_pairs <= MAX_FEW_PAIRS:
        for one in gemv_tiles(operands):
            runs[one.name] = functools.partial(run_coded_gemv, one, operands)
        if not runs or operands.codes:
            runs |= {f"direct {tiles.name}": functools.partial(run_coded, tiles, True, operands) for tiles in _DIRECT}
        return runs
    num_experts = operands.num_experts
    if operands.num_pairs / num_experts >= MIN_EXPANDED_PAIRS_EACH:
        for tiles in grouped_tiles(operands.num_pairs, num_experts):
            runs[f"expanded {tiles.name}"] = functools.partial(_run_expanded, tiles, operands)
    for own in code_tiles(operands.num_pairs, num_experts):
        runs[f"codes {own.name}"] = functools.partial(run_coded, own, False, operands)
    return runs
