"""`cas::experts` on CUDA over MXFP4 weights (the Triton layout of `custom_ops/quantized/mxfp4.py`). The tuner chooses a method:

- "gemv …", for few pairs, in bfloat16 on Hopper: `triton_mxfp4_gemv`;
- "direct …", for few pairs else: each pair is a block of its own, so that nothing is sorted;
- "mxfp4 …": blocks of pairs of one expert, as in `triton_experts`;
- "expanded …", for many pairs: the weights are dequantized to x's dtype in scratch memory, then `triton_experts`' kernels run.

Direct and mxfp4 decode the weights in registers (`triton_mxfp4_decode`), between their load and a product on the tensor cores.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), X experts, D hidden size, F intermediate size
of an expert, O output features, C words of a tile's row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.moe.triton_experts import Operands, activated, add_results_of_pairs, grouped_tiles, normed, run_expanded
from compile_and_serve.custom_ops.moe.triton_mxfp4_decode import COLUMNS, NUM_PARTS, WORDS, values_of_part
from compile_and_serve.custom_ops.moe.triton_mxfp4_gemv import GEMV_TILES, run_mxfp4_gemv
from compile_and_serve.custom_ops.moe.triton_order import order_by_expert
from compile_and_serve.custom_ops.triton_common import TRITON_TYPES, cdiv, launch_options, let_next_start, supports_pdl, wait_for_previous

MAX_FEW_PAIRS = 16
MIN_EXPANDED_PAIRS_EACH = 64  # of an expert; writing and reading the expanded weights takes longer: with 32 pairs three times as long


@triton.jit
def _add_products(acc, x_PC, block, words_OC, scales_O, inputs, DOT: tl.constexpr, ROWS_FIRST: tl.constexpr, PTX: tl.constexpr):
    """acc + x wᵀ over one block of columns. x_PC: pointers to the first WORDS columns of x's rows."""
    for part in tl.static_range(NUM_PARTS):
        # Behind the last column, codes are zeros: any columns of x will do.
        x = tl.load(x_PC + tl.minimum(block * COLUMNS + part * WORDS, inputs - WORDS))
        w = values_of_part(words_OC, scales_O, part, DOT, PTX)
        if ROWS_FIRST:
            acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


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
def _mxfp4_gate_up_kernel(
    x_ptr, order_ptr, experts_ptr, w_ptr, scale_ptr, bias_ptr, h_ptr, x_stride, num_pairs, features, inputs, num_blocks, top_k, limit,
    num_slots, HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, DIRECT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr,
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
        block_words = 2 * features * WORDS
        gate_FC = w_ptr + expert * num_blocks * block_words + safe_rows_F[:, None] * WORDS + words_C[None, :]
        up_FC = gate_FC + features * WORDS
        scale_F = scale_ptr + expert * num_blocks * 2 * features + safe_rows_F
        if ROWS_FIRST:
            acc = tl.zeros((BLOCK_F, BLOCK_P), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_F, BLOCK_P), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_P, BLOCK_F), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_P, BLOCK_F), dtype=tl.float32)
        if HAS_BIAS:  # loads while the rows are multiplied
            bias_F = bias_ptr + expert * 2 * features + rows_F
            gate_bias_F = tl.load(bias_F, mask=ok_F, other=0.0).to(tl.float32)
            up_bias_F = tl.load(bias_F + features, mask=ok_F, other=0.0).to(tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            gate = tl.load(gate_FC + block * block_words)
            up = tl.load(up_FC + block * block_words)
            gate_scale = tl.load(scale_F + block * 2 * features)
            up_scale = tl.load(scale_F + block * 2 * features + features)
            acc = _add_products(acc, x_PC, block, gate, gate_scale, inputs, DOT, ROWS_FIRST, PTX)
            acc_up = _add_products(acc_up, x_PC, block, up, up_scale, inputs, DOT, ROWS_FIRST, PTX)
        if ROWS_FIRST:
            acc, acc_up = tl.trans(acc), tl.trans(acc_up)
        if HAS_BIAS:
            acc += gate_bias_F[None, :]
            acc_up += up_bias_F[None, :]
        out_PF = activated(acc, acc_up, limit, CLAMPED)
        h_PF = h_ptr + pairs_P[:, None].to(tl.int64) * features + rows_F[None, :]
        tl.store(h_PF, out_PF.to(h_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_F[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _mxfp4_down_kernel(
    h_ptr,
    order_ptr,
    experts_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    num_pairs,
    outputs,
    features,
    num_blocks,
    num_slots,
    HAS_BIAS: tl.constexpr,
    DIRECT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    DOT: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
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
        block_words = outputs * WORDS
        w_OC = w_ptr + expert * num_blocks * block_words + safe_rows_O[:, None] * WORDS + words_C[None, :]
        scale_O = scale_ptr + expert * num_blocks * outputs + safe_rows_O
        if ROWS_FIRST:
            acc = tl.zeros((BLOCK_O, BLOCK_P), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_P, BLOCK_O), dtype=tl.float32)
        weights_P = tl.load(weights_ptr + safe_pairs_P).to(tl.float32)  # loads while the rows are multiplied
        if HAS_BIAS:
            bias_O = tl.load(bias_ptr + expert * outputs + rows_O, mask=ok_O, other=0.0).to(tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            w = tl.load(w_OC + block * block_words)
            scales = tl.load(scale_O + block * outputs)
            acc = _add_products(acc, h_PC, block, w, scales, features, DOT, ROWS_FIRST, PTX)
        if ROWS_FIRST:
            acc = tl.trans(acc)
        if HAS_BIAS:
            acc += bias_O[None, :]
        acc *= weights_P[:, None]
        y_PO = y_ptr + safe_pairs_P[:, None].to(tl.int64) * outputs + rows_O[None, :]
        tl.store(y_PO, acc.to(y_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_O[None, :])


@triton.jit
def _dequantize_mxfp4_kernel(
    w_ptr, scale_ptr, out_ptr, outputs, inputs, num_blocks, BLOCK_O: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr
):
    expert, block = tl.program_id(2).to(tl.int64), tl.program_id(1)
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < outputs
    words_C = tl.arange(0, WORDS)
    let_next_start(PDL)
    w_OC = w_ptr + ((expert * num_blocks + block) * outputs + rows_O)[:, None] * WORDS + words_C[None, :]
    words = tl.load(w_OC, mask=ok_O[:, None], other=0)
    scales = tl.load(scale_ptr + (expert * num_blocks + block) * outputs + rows_O, mask=ok_O, other=0)
    wait_for_previous(PDL)
    for part in tl.static_range(NUM_PARTS):
        columns_C = block * COLUMNS + part * WORDS + words_C
        at_OC = out_ptr + (expert * outputs + rows_O)[:, None] * inputs + columns_C[None, :]
        values = values_of_part(words, scales, part, DOT, PTX)
        tl.store(at_OC, values, mask=ok_O[:, None] & (columns_C < inputs)[None, :])


@dataclass(frozen=True, slots=True)
class Mxfp4Tiles:
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
_DIRECT = (Mxfp4Tiles(16, 64, 64, 5, 4, rows_first=True), Mxfp4Tiles(16, 32, 32, 6, 4))
_FEW = (
    Mxfp4Tiles(16, 64, 128, 3, 4, rows_first=True),
    Mxfp4Tiles(16, 128, 128, 4, 4),
    Mxfp4Tiles(16, 64, 128, 4, 4),
    Mxfp4Tiles(16, 64, 64, 5, 4, rows_first=True),
)
_SOME = (Mxfp4Tiles(32, 64, 128, 4, 4), Mxfp4Tiles(32, 64, 64, 4, 4, rows_first=True), Mxfp4Tiles(16, 64, 128, 4, 4))
_MORE = (Mxfp4Tiles(64, 64, 128, 4, 4, rows_first=True), Mxfp4Tiles(32, 64, 128, 4, 4), Mxfp4Tiles(64, 128, 128, 3, 8, rows_first=True))
_MANY = (Mxfp4Tiles(128, 128, 256, 3, 8, rows_first=True), Mxfp4Tiles(128, 64, 128, 4, 4, rows_first=True))


def mxfp4_tiles(num_pairs: int, num_experts: int) -> tuple[Mxfp4Tiles, ...]:
    """The candidates for a number of pairs that are spread evenly over the experts."""
    each = num_pairs / num_experts
    return _FEW if each <= 12 else _SOME if each <= 32 else _MORE if each <= 96 else _MANY


def _constants(operands: Operands, tiles: Mxfp4Tiles, direct: bool) -> dict[str, object]:
    x_TD = operands.x_TD
    pdl = supports_pdl(x_TD.device)
    return {
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


def run_mxfp4(tiles: Mxfp4Tiles, direct: bool, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """A method without expanded weights. gate_up: replaces the operands' weight, for the tuner."""
    operands = normed(operands)
    x_TD, down = operands.x_TD, operands.down
    hidden, (num_experts, rows, _), pairs = x_TD.shape[1], gate_up.shape, operands.num_pairs
    features = rows // 2
    if direct:
        order_pairs, block_experts, blocks = None, operands.ids_TK, pairs
    else:
        order = order_by_expert(operands.ids_TK, num_experts, tiles.block_p)
        order_pairs, block_experts, blocks = order.pairs, order.experts, order.max_blocks
    h_PF, y_PD = x_TD.new_empty(pairs, features), x_TD.new_empty(pairs, hidden)
    constants = _constants(operands, tiles, direct)
    assert operands.gate_up_scale is not None
    assert operands.down_scale is not None
    launch(
        _mxfp4_gate_up_kernel,
        (cdiv(features, tiles.block_f), blocks),
        x_TD,
        order_pairs,
        block_experts,
        gate_up,
        operands.gate_up_scale,
        operands.gate_up_bias,
        h_PF,
        x_TD.stride(0),
        pairs,
        features,
        hidden,
        operands.gate_up_scale.shape[1],
        operands.top_k,
        operands.limit,
        num_experts,
        HAS_BIAS=operands.gate_up_bias is not None,
        CLAMPED=operands.clamped,
        BLOCK_F=tiles.block_f,
        **constants,
    )
    launch(
        _mxfp4_down_kernel,
        (cdiv(hidden, tiles.block_o), blocks),
        h_PF,
        order_pairs,
        block_experts,
        operands.weights_TK,
        down,
        operands.down_scale,
        operands.down_bias,
        y_PD,
        pairs,
        hidden,
        features,
        operands.down_scale.shape[1],
        num_experts,
        HAS_BIAS=operands.down_bias is not None,
        BLOCK_O=tiles.block_o,
        **constants,
    )
    return add_results_of_pairs(operands, y_PD)


def dequantize(words: torch.Tensor, scales: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights in `dtype`, from the Triton layout: int16 [X, O, B · 32], int32 [X, B, O] → [X, O, inputs]"""
    num_experts, outputs, _ = words.shape
    out = torch.empty(num_experts, outputs, inputs, dtype=dtype, device=words.device)
    pdl, block_o = supports_pdl(words.device), 64
    launch(
        _dequantize_mxfp4_kernel,
        (cdiv(outputs, block_o), scales.shape[1], num_experts),
        words,
        scales,
        out,
        outputs,
        inputs,
        scales.shape[1],
        BLOCK_O=block_o,
        DOT=TRITON_TYPES[dtype],
        PTX=pdl and dtype in (torch.bfloat16, torch.float16),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out


def mxfp4_methods(operands: Operands) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The methods for these operands by name, as functions of the gate/up weight. The first is the default."""
    if operands.num_pairs <= MAX_FEW_PAIRS:
        if operands.x_TD.dtype == torch.bfloat16 and supports_pdl(operands.x_TD.device):
            return {tiles.name: functools.partial(run_mxfp4_gemv, tiles, operands) for tiles in GEMV_TILES}
        return {f"direct {tiles.name}": functools.partial(run_mxfp4, tiles, True, operands) for tiles in _DIRECT}
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    num_experts = operands.num_experts
    if operands.num_pairs / num_experts >= MIN_EXPANDED_PAIRS_EACH:
        for tiles in grouped_tiles(operands.num_pairs, num_experts):
            runs[f"expanded {tiles.name}"] = functools.partial(run_expanded, dequantize, tiles, operands)
    for own in mxfp4_tiles(operands.num_pairs, num_experts):
        runs[f"mxfp4 {own.name}"] = functools.partial(run_mxfp4, own, False, operands)
    return runs
