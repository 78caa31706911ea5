"""`cas::experts` on CUDA over unquantized weights, by two methods that the tuner chooses between:

- "gemv", for few pairs: each program multiplies a few rows of one expert by one token, in float32, without tensor cores;
- "grouped …", else: the pairs are sorted by expert into blocks, and each program multiplies a block of tokens by a tile of its expert's
  rows on the tensor cores. So each expert that has tokens is read once for each block of its tokens.

Both run two kernels: gate and up products with the activation, which writes h [P, F], and down products. The grouped one writes the
weighted results of pairs [P, D], and a third kernel adds those of each token. No sum depends on the order in which programs run.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), X experts, D hidden size, F intermediate size
of an expert, B blocks of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.build.triton_launch import launch
from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm
from compile_and_serve.custom_ops.moe.triton_order import ExpertOrder, order_by_expert
from compile_and_serve.custom_ops.quantization import BLOCK as SCALE_BLOCK
from compile_and_serve.custom_ops.triton_common import (
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    silu,
    supports_pdl,
    wait_for_previous,
)

GEMV_ROWS = 4  # of a program
# What a scale of 8-bit weights covers: a row [X, O], or a block of 128 × 128 [X, ceil(O / 128), ceil(I / 128)].
NO_SCALES, ROW_SCALES, BLOCK_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _block_scale_at(scale_ptr, expert, row, outputs, inputs):
    """The address of the scale of a row's first block."""
    row_blocks, column_blocks = (outputs + BLOCK - 1) // BLOCK, (inputs + BLOCK - 1) // BLOCK
    return scale_ptr + (expert * row_blocks + row // BLOCK) * column_blocks


@triton.jit
def activated(gate, up, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return silu(gate) * up


@triton.jit
def _gemv_gate_up_kernel(
    x_ptr, ids_ptr, w_ptr, scale_ptr, bias_ptr, norm_ptr, h_ptr, x_stride, features, inputs, top_k, limit, eps,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, CLAMPED: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    LANES: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    rows_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    ok_F = rows_F < features
    safe_rows_F = tl.where(ok_F, rows_F, 0).to(tl.int64)
    cols_1D = tl.arange(0, BLOCK_D)[None, :]
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    gate_FD = w_ptr + expert * (2 * features.to(tl.int64) * inputs) + safe_rows_F[:, None] * inputs + cols_1D
    up_FD = gate_FD + features.to(tl.int64) * inputs
    x_1D = x_ptr + (pair // top_k).to(tl.int64) * x_stride + cols_1D
    acc = tl.zeros((BLOCK_F, BLOCK_D // LANES), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_F, BLOCK_D // LANES), dtype=tl.float32)
    square_1D = tl.zeros((1, BLOCK_D), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_D):
        ok_1D = start + cols_1D < inputs
        gate = tl.load(gate_FD + start, mask=ok_1D, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(up_FD + start, mask=ok_1D, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_1D + start, mask=ok_1D, other=0.0).to(tl.float32)
        if HAS_NORM:
            square_1D += x * x
            x *= tl.load(norm_ptr + start + cols_1D, mask=ok_1D, other=0.0).to(tl.float32)
        x_up = x
        if SCALES == BLOCK_SCALES:  # the program's rows are in one block
            first_row = tl.program_id(0) * BLOCK_F
            at_1D = _block_scale_at(scale_ptr, expert, first_row, 2 * features, inputs) + (start + cols_1D) // BLOCK
            up_at_1D = (
                _block_scale_at(scale_ptr, expert, features + first_row, 2 * features, inputs)
                + (start + cols_1D) // BLOCK
            )
            x_up = x * tl.load(up_at_1D, mask=ok_1D, other=0.0)
            x *= tl.load(at_1D, mask=ok_1D, other=0.0)
        acc += tl.sum(tl.reshape(gate * x, (BLOCK_F, BLOCK_D // LANES, LANES)), 2)
        acc_up += tl.sum(tl.reshape(up * x_up, (BLOCK_F, BLOCK_D // LANES, LANES)), 2)
    gate_F, up_F = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if SCALES == ROW_SCALES:
        gate_F *= tl.load(scale_ptr + expert * 2 * features + safe_rows_F)
        up_F *= tl.load(scale_ptr + expert * 2 * features + features + safe_rows_F)
    if HAS_NORM:
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(square_1D) / inputs + eps)
        gate_F *= inverse_rms
        up_F *= inverse_rms
    if HAS_BIAS:
        bias_F = bias_ptr + expert * 2 * features + rows_F
        gate_F += tl.load(bias_F, mask=ok_F, other=0.0).to(tl.float32)
        up_F += tl.load(bias_F + features, mask=ok_F, other=0.0).to(tl.float32)
    out_F = activated(gate_F, up_F, limit, CLAMPED)
    tl.store(h_ptr + pair * features + rows_F, out_F.to(h_ptr.dtype.element_ty), mask=ok_F)


@triton.jit
def _gemv_down_kernel(
    h_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, outputs, features, top_k, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_F: tl.constexpr,
    SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < outputs
    safe_rows_O = tl.where(ok_O, rows_O, 0).to(tl.int64)
    slots_K = tl.arange(0, BLOCK_K)
    ok_K = slots_K < top_k
    pairs_K = token * top_k + tl.where(ok_K, slots_K, 0)
    cols_F = tl.arange(0, BLOCK_F)
    let_next_start(PDL)
    wait_for_previous(PDL)
    experts_K = tl.load(ids_ptr + pairs_K).to(tl.int64)
    weights_K = tl.load(weights_ptr + pairs_K, mask=ok_K, other=0.0).to(tl.float32)
    w_KO = experts_K[:, None] * (outputs.to(tl.int64) * features) + safe_rows_O[None, :] * features
    w_KOF = w_ptr + w_KO[:, :, None] + cols_F[None, None, :]
    h_KF = h_ptr + pairs_K[:, None] * features + cols_F[None, :]
    acc_KOF = tl.zeros((BLOCK_K, BLOCK_O, BLOCK_F), dtype=tl.float32)
    for start in range(0, features, BLOCK_F):
        ok_F = start + cols_F < features
        ok_KF = ok_K[:, None] & ok_F[None, :]
        w = tl.load(w_KOF + start, mask=ok_KF[:, None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        h = tl.load(h_KF + start, mask=ok_KF, other=0.0).to(tl.float32)
        if SCALES == BLOCK_SCALES:
            at_K = _block_scale_at(scale_ptr, experts_K, tl.program_id(0) * BLOCK_O, outputs, features)
            h *= tl.load(at_K[:, None] + ((start + cols_F) // BLOCK)[None, :], mask=ok_KF, other=0.0)
        acc_KOF += w * h[:, None, :]
    y_KO = tl.sum(acc_KOF, 2)
    if SCALES == ROW_SCALES:
        y_KO *= tl.load(scale_ptr + experts_K[:, None] * outputs + safe_rows_O[None, :])
    if HAS_BIAS:
        bias_KO = bias_ptr + experts_K[:, None] * outputs + rows_O[None, :]
        y_KO += tl.load(bias_KO, mask=ok_K[:, None] & ok_O[None, :], other=0.0).to(tl.float32)
    y_KO = y_KO.to(out_ptr.dtype.element_ty).to(tl.float32)
    out_O = tl.sum(y_KO * weights_K[:, None], 0)
    if HAS_RESIDUAL:
        out_O += tl.load(residual_ptr + token.to(tl.int64) * residual_stride + rows_O, mask=ok_O, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token * outputs + rows_O, out_O.to(out_ptr.dtype.element_ty), mask=ok_O)


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_gate_up_kernel(
    x_ptr, order_ptr, block_experts_ptr, w_ptr, scale_ptr, bias_ptr, h_ptr, x_stride, num_pairs, features, inputs, top_k, limit,
    HAS_BIAS: tl.constexpr, CLAMPED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, WHOLE_D: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    rows_F = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    ok_F = rows_F < features
    safe_rows_F = tl.where(ok_F, rows_F, 0).to(tl.int64)
    cols_D = tl.arange(0, BLOCK_D)
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert >= 0:
        pairs_P = tl.load(order_ptr + block * BLOCK_P + tl.arange(0, BLOCK_P))
        ok_P = pairs_P < num_pairs
        tokens_P = tl.where(ok_P, pairs_P, 0) // top_k
        x_PD = x_ptr + tokens_P[:, None].to(tl.int64) * x_stride + cols_D[None, :]
        gate_FD = (
            w_ptr + expert * (2 * features.to(tl.int64) * inputs) + safe_rows_F[:, None] * inputs + cols_D[None, :]
        )
        up_FD = gate_FD + features.to(tl.int64) * inputs
        acc_PF = tl.zeros((BLOCK_P, BLOCK_F), dtype=tl.float32)
        acc_up_PF = tl.zeros((BLOCK_P, BLOCK_F), dtype=tl.float32)
        for start in tl.range(0, inputs, BLOCK_D, num_stages=STAGES):
            if WHOLE_D:
                x = tl.load(x_PD + start)
                gate = tl.load(gate_FD + start)
                up = tl.load(up_FD + start)
            else:
                ok_1D = start + cols_D[None, :] < inputs
                x = tl.load(x_PD + start, mask=ok_1D, other=0.0)
                gate = tl.load(gate_FD + start, mask=ok_1D, other=0.0)
                up = tl.load(up_FD + start, mask=ok_1D, other=0.0)
            if SCALES == BLOCK_SCALES:
                at_F = _block_scale_at(scale_ptr, expert, safe_rows_F, 2 * features, inputs) + start // BLOCK
                up_at_F = (
                    _block_scale_at(scale_ptr, expert, features + safe_rows_F, 2 * features, inputs) + start // BLOCK
                )
                sums_PF = tl.dot(x, tl.trans(gate.to(x.dtype)), input_precision="ieee")
                acc_PF += sums_PF * tl.load(at_F)[None, :]
                sums_PF = tl.dot(x, tl.trans(up.to(x.dtype)), input_precision="ieee")
                acc_up_PF += sums_PF * tl.load(up_at_F)[None, :]
            else:
                acc_PF = tl.dot(x, tl.trans(gate.to(x.dtype)), acc_PF, input_precision="ieee")
                acc_up_PF = tl.dot(x, tl.trans(up.to(x.dtype)), acc_up_PF, input_precision="ieee")
        if SCALES == ROW_SCALES:
            acc_PF *= tl.load(scale_ptr + expert * 2 * features + safe_rows_F)[None, :]
            acc_up_PF *= tl.load(scale_ptr + expert * 2 * features + features + safe_rows_F)[None, :]
        if HAS_BIAS:
            bias_F = bias_ptr + expert * 2 * features + rows_F
            acc_PF += tl.load(bias_F, mask=ok_F, other=0.0).to(tl.float32)[None, :]
            acc_up_PF += tl.load(bias_F + features, mask=ok_F, other=0.0).to(tl.float32)[None, :]
        out_PF = activated(acc_PF, acc_up_PF, limit, CLAMPED)
        h_PF = h_ptr + pairs_P[:, None].to(tl.int64) * features + rows_F[None, :]
        tl.store(h_PF, out_PF.to(h_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_F[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_down_kernel(
    h_ptr, order_ptr, block_experts_ptr, weights_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, num_pairs, outputs, features,
    HAS_BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
    WHOLE_F: tl.constexpr, SCALES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    rows_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = rows_O < outputs
    safe_rows_O = tl.where(ok_O, rows_O, 0).to(tl.int64)
    cols_F = tl.arange(0, BLOCK_F)
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert >= 0:
        pairs_P = tl.load(order_ptr + block * BLOCK_P + tl.arange(0, BLOCK_P))
        ok_P = pairs_P < num_pairs
        safe_pairs_P = tl.where(ok_P, pairs_P, 0)
        h_PF = h_ptr + safe_pairs_P[:, None].to(tl.int64) * features + cols_F[None, :]
        w_OF = w_ptr + expert * (outputs.to(tl.int64) * features) + safe_rows_O[:, None] * features + cols_F[None, :]
        acc_PO = tl.zeros((BLOCK_P, BLOCK_O), dtype=tl.float32)
        for start in tl.range(0, features, BLOCK_F, num_stages=STAGES):
            if WHOLE_F:
                h = tl.load(h_PF + start)
                w = tl.load(w_OF + start)
            else:
                ok_1F = start + cols_F[None, :] < features
                h = tl.load(h_PF + start, mask=ok_1F, other=0.0)
                w = tl.load(w_OF + start, mask=ok_1F, other=0.0)
            if SCALES == BLOCK_SCALES:
                at_O = _block_scale_at(scale_ptr, expert, safe_rows_O, outputs, features) + start // BLOCK
                sums_PO = tl.dot(h, tl.trans(w.to(h.dtype)), input_precision="ieee")
                acc_PO += sums_PO * tl.load(at_O)[None, :]
            else:
                acc_PO = tl.dot(h, tl.trans(w.to(h.dtype)), acc_PO, input_precision="ieee")
        if SCALES == ROW_SCALES:
            acc_PO *= tl.load(scale_ptr + expert * outputs + safe_rows_O)[None, :]
        if HAS_BIAS:
            acc_PO += tl.load(bias_ptr + expert * outputs + rows_O, mask=ok_O, other=0.0).to(tl.float32)[None, :]
        acc_PO *= tl.load(weights_ptr + safe_pairs_P).to(tl.float32)[:, None]
        y_PO = y_ptr + safe_pairs_P[:, None].to(tl.int64) * outputs + rows_O[None, :]
        tl.store(y_PO, acc_PO.to(y_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_O[None, :])


@triton.jit
def _add_pairs_kernel(
    y_ptr, residual_ptr, out_ptr, outputs, residual_stride,
    TOP_K: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_O: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = cols_O < outputs
    let_next_start(PDL)
    wait_for_previous(PDL)
    acc_O = tl.zeros((BLOCK_O,), dtype=tl.float32)
    if HAS_RESIDUAL:
        acc_O += tl.load(residual_ptr + token * residual_stride + cols_O, mask=ok_O, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        acc_O += tl.load(y_ptr + (token * TOP_K + k) * outputs + cols_O, mask=ok_O, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * outputs + cols_O, acc_O.to(out_ptr.dtype.element_ty), mask=ok_O)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of the grouped kernels: block_p pairs; block_f rows of gate and as many of up; block_o rows of down; depth columns at once."""

    block_p: int
    block_f: int
    block_o: int
    depth: int
    stages: int
    warps: int

    @property
    def name(self) -> str:
        return f"grouped {self.block_p}x{self.block_f}x{self.depth}/{self.block_o} {self.stages} stages"


# By the number of pairs that an expert has on average, the likely best first.
_FEW = (Tiles(16, 64, 128, 128, 4, 4), Tiles(16, 32, 64, 256, 3, 4), Tiles(16, 64, 64, 128, 4, 4))
_SOME = (
    Tiles(32, 64, 128, 128, 3, 4),
    Tiles(16, 64, 128, 128, 4, 4),
    Tiles(32, 64, 128, 128, 4, 4),
    Tiles(32, 64, 128, 64, 6, 4),
)
_MORE = (
    Tiles(64, 64, 128, 64, 4, 4),
    Tiles(64, 128, 128, 64, 3, 8),
    Tiles(32, 64, 128, 128, 3, 4),
    Tiles(128, 64, 128, 64, 4, 8),
)
_MANY = (Tiles(128, 128, 256, 64, 4, 8), Tiles(128, 128, 256, 64, 3, 8), Tiles(128, 128, 128, 64, 4, 8))


def grouped_tiles(num_pairs: int, num_experts: int) -> tuple[Tiles, ...]:
    """The candidates for a number of pairs that are spread evenly over the experts."""
    each = num_pairs / num_experts
    return _FEW if each <= 8 else _SOME if each <= 24 else _MORE if each <= 96 else _MANY


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of `cas::experts`, in its order. Kernels take them `normalized`."""

    x_TD: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: str = "silu"
    limit: float = 0.0
    residual_TD: torch.Tensor | None = None
    norm_weight_D: torch.Tensor | None = None
    eps: float = 1e-6
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def normalized(self) -> Operands:
        """With contiguous rows of x and the residual, contiguous weights, and contiguous int32 ids."""
        x_TD, residual_TD = self.x_TD, self.residual_TD
        return replace(
            self,
            x_TD=x_TD if x_TD.stride(1) == 1 else x_TD.contiguous(),
            ids_TK=self.ids_TK.to(torch.int32).contiguous(),
            weights_TK=self.weights_TK.contiguous(),
            residual_TD=residual_TD if residual_TD is None or residual_TD.stride(1) == 1 else residual_TD.contiguous(),
        )

    @property
    def clamped(self) -> bool:
        return self.activation == "clamped_swiglu"

    @property
    def scales(self) -> int:
        """What a scale of the weights covers, for the kernels."""
        return 0 if self.gate_up_scale is None else self.gate_up_scale.dim() - 1

    @property
    def num_pairs(self) -> int:
        return self.ids_TK.numel()

    @property
    def top_k(self) -> int:
        return self.ids_TK.shape[1]

    @property
    def residual_stride(self) -> int:
        return 0 if self.residual_TD is None else self.residual_TD.stride(0)


# Weights [X, O, …], their scales, input features I, dtype → [X, O, I].
Dequantize = Callable[[torch.Tensor, torch.Tensor, int, torch.dtype], torch.Tensor]


def run_gemv(operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """The "gemv" method. gate_up: replaces the operands' weight, for the tuner."""
    x_TD, top_k = operands.x_TD, operands.top_k
    (num_tokens, hidden), features = x_TD.shape, operands.down.shape[2]
    h_PF = x_TD.new_empty(operands.num_pairs, features)
    out_TD = x_TD.new_empty(num_tokens, hidden)
    pdl = supports_pdl(x_TD.device)
    lanes = 16 // gate_up.element_size()
    warps, block_f, block_o, block_k = 4, GEMV_ROWS, GEMV_ROWS, next_power_of_2(top_k)
    launch(
        _gemv_gate_up_kernel, (cdiv(features, block_f), operands.num_pairs),
        x_TD, operands.ids_TK, gate_up, operands.gate_up_scale, operands.gate_up_bias, operands.norm_weight_D,
        h_PF, x_TD.stride(0), features, hidden, top_k,
        operands.limit, operands.eps,
        HAS_BIAS=operands.gate_up_bias is not None, HAS_NORM=operands.norm_weight_D is not None, CLAMPED=operands.clamped,
        BLOCK_F=block_f, BLOCK_D=32 * warps * lanes, LANES=lanes, SCALES=operands.scales, PDL=pdl, num_warps=warps, **launch_options(pdl),
    )  # fmt: skip
    launch(
        _gemv_down_kernel, (cdiv(hidden, block_o), num_tokens),
        h_PF, operands.ids_TK, operands.weights_TK, operands.down, operands.down_scale, operands.down_bias,
        operands.residual_TD, out_TD, hidden, features,
        top_k, operands.residual_stride,
        HAS_BIAS=operands.down_bias is not None, HAS_RESIDUAL=operands.residual_TD is not None, BLOCK_K=block_k,
        BLOCK_O=block_o, BLOCK_F=256, SCALES=operands.scales, PDL=pdl, num_warps=warps,
        **launch_options(pdl),
    )  # fmt: skip
    return out_TD


def run_grouped(tiles: Tiles, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """A "grouped" method. gate_up: replaces the operands' weight, for the tuner."""
    operands = normed(operands)
    order = order_by_expert(operands.ids_TK, gate_up.shape[0], tiles.block_p)
    h_PF = _grouped_gate_up(tiles, operands, gate_up, order)
    return _grouped_down(tiles, operands, h_PF, order)


def run_expanded(dequantize: Dequantize, tiles: Tiles, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """An "expanded" method: `run_grouped` over dequantized weights. gate_up: replaces the operands' weight, for the tuner."""
    operands = expanded(dequantize, operands, gate_up)
    return run_grouped(tiles, operands, operands.gate_up)


def expanded(dequantize: Dequantize, operands: Operands, gate_up: torch.Tensor) -> Operands:
    """The operands with weights in x's dtype."""
    assert operands.gate_up_scale is not None
    assert operands.down_scale is not None
    hidden, features, dtype = operands.x_TD.shape[1], gate_up.shape[1] // 2, operands.x_TD.dtype
    return replace(
        operands,
        gate_up=dequantize(gate_up, operands.gate_up_scale, hidden, dtype), gate_up_scale=None,
        down=dequantize(operands.down, operands.down_scale, features, dtype), down_scale=None,
    )  # fmt: skip


def normed(operands: Operands) -> Operands:
    """The operands with the norm already applied to x."""
    if operands.norm_weight_D is None:
        return operands
    x_TD = rms_norm(operands.x_TD, operands.norm_weight_D, operands.eps)
    return replace(operands, x_TD=x_TD, norm_weight_D=None)


def _grouped_gate_up(tiles: Tiles, operands: Operands, gate_up: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    x_TD = operands.x_TD
    hidden, features = x_TD.shape[1], operands.down.shape[2]
    h_PF = x_TD.new_empty(operands.num_pairs, features)
    pdl = supports_pdl(x_TD.device)
    launch(
        _grouped_gate_up_kernel, (cdiv(features, tiles.block_f), order.max_blocks),
        x_TD, order.pairs, order.experts, gate_up, operands.gate_up_scale, operands.gate_up_bias,
        h_PF, x_TD.stride(0), operands.num_pairs, features,
        hidden, operands.top_k, operands.limit,
        HAS_BIAS=operands.gate_up_bias is not None, CLAMPED=operands.clamped, BLOCK_P=tiles.block_p, BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.depth, STAGES=tiles.stages, WHOLE_D=hidden % tiles.depth == 0, SCALES=operands.scales, PDL=pdl, num_warps=tiles.warps,
        **launch_options(pdl),
    )  # fmt: skip
    return h_PF


def _grouped_down(tiles: Tiles, operands: Operands, h_PF: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    y_PD = multiply_pairs(
        tiles, h_PF, operands.down, operands.down_scale, operands.down_bias, order, operands.weights_TK
    )
    return add_results_of_pairs(operands, y_PD)


def multiply_pairs(
    tiles: Tiles, x_PI: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None,
    order: ExpertOrder, weights_TK: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Each pair's row times its expert's matrix [X, O, I], times the pair's weight. → [P, O]"""
    (num_pairs, inputs), outputs = x_PI.shape, weight.shape[1]
    y_PO = x_PI.new_empty(num_pairs, outputs)
    pdl = supports_pdl(x_PI.device)
    launch(
        _grouped_down_kernel, (cdiv(outputs, tiles.block_o), order.max_blocks),
        x_PI, order.pairs, order.experts, weights_TK, weight, scale, bias, y_PO, num_pairs, outputs, inputs,
        HAS_BIAS=bias is not None, BLOCK_P=tiles.block_p, BLOCK_O=tiles.block_o, BLOCK_F=tiles.depth,
        STAGES=tiles.stages, WHOLE_F=inputs % tiles.depth == 0, SCALES=0 if scale is None else scale.dim() - 1, PDL=pdl,
        num_warps=tiles.warps, **launch_options(pdl),
    )  # fmt: skip
    return y_PO


def add_results_of_pairs(operands: Operands, y_PD: torch.Tensor) -> torch.Tensor:
    """The sum of each token's weighted results and of its residual. → [T, D]"""
    num_tokens, hidden = operands.x_TD.shape
    out_TD = y_PD.new_empty(num_tokens, hidden)
    pdl = supports_pdl(y_PD.device)
    block = min(1024, next_power_of_2(hidden))
    launch(
        _add_pairs_kernel, (num_tokens, cdiv(hidden, block)), y_PD, operands.residual_TD, out_TD, hidden,
        operands.residual_stride,
        TOP_K=operands.top_k, HAS_RESIDUAL=operands.residual_TD is not None, BLOCK_O=block, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out_TD
