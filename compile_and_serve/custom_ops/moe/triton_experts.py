"""`cas::experts` on CUDA by the "grouped …" methods: the pairs are sorted by expert into blocks, and each program multiplies a block
of tokens by a tile of its expert's rows on the tensor cores. So each expert that has tokens is read once for each block of its tokens.

Two kernels run: gate and up products with the activation, which writes h [P, F], and down products, which writes the weighted results of
pairs [P, D]. A third kernel adds those of each token. No sum depends on the order in which programs run. With float8 activations, x (after
the norm) and h are rounded by kernels of their own, and the products are of float8.

Shape legend: T tokens, K experts of a token, P = T · K pairs (pair p is of token p // K), X experts, D hidden size, F intermediate size
of an expert, B blocks of pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
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
from compile_and_serve.custom_ops.triton_quantize import quantize_rows

# What a scale of 8-bit weights covers: a row [X, O], or a block of 128 × 128 [X, ceil(O / 128), ceil(I / 128)].
NO_SCALES, ROW_SCALES, BLOCK_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def block_scale_at(scale_ptr, expert, row, outputs, inputs):
    """The address of the scale of a row's first block."""
    row_blocks, column_blocks = (outputs + BLOCK - 1) // BLOCK, (inputs + BLOCK - 1) // BLOCK
    return scale_ptr + (expert * row_blocks + row // BLOCK) * column_blocks


@triton.jit
def _block_scales(scale_ptr, expert, first_row, rows_O, outputs, inputs, column, ONE_SCALE: tl.constexpr):
    """The scales of a tile's rows in the block of a column: one number if the rows lie in one block, which takes fewer registers."""
    if ONE_SCALE:
        return tl.load(block_scale_at(scale_ptr, expert, first_row, outputs, inputs) + column // BLOCK)
    else:
        return tl.load(block_scale_at(scale_ptr, expert, rows_O, outputs, inputs) + column // BLOCK)[None, :]


@triton.jit
def multiply_tiles(x_PI, w_OI, acc_PO=None):
    """x wᵀ in float32, added to `acc_PO`. Products are in x's dtype.

    Float8 tensor cores keep fewer bits of a sum than float32 has: after at most 128 inputs, it is added to a sum in float32.
    """
    FLOAT8: tl.constexpr = x_PI.dtype == tl.float8e4nv
    IMPRECISE: tl.constexpr = 0 if not FLOAT8 else BLOCK if x_PI.shape[1] > BLOCK else x_PI.shape[1]
    w_IO = tl.trans(w_OI.to(x_PI.dtype))
    if acc_PO is None:
        return tl.dot(x_PI, w_IO, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)
    else:
        return tl.dot(x_PI, w_IO, acc_PO, input_precision="ieee", max_num_imprecise_acc=IMPRECISE)


@triton.jit
def activated(gate, up, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return silu(gate) * up


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    order_ptr,
    block_experts_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    h_ptr,
    x_stride,
    num_pairs,
    features,
    inputs,
    top_k,
    limit,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE_D: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
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
        gate_FD = w_ptr + expert * (2 * features.to(tl.int64) * inputs) + safe_rows_F[:, None] * inputs + cols_D[None, :]
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
                first = tl.program_id(0) * BLOCK_F
                scale = _block_scales(scale_ptr, expert, first, safe_rows_F, 2 * features, inputs, start, ONE_SCALE)
                up_scale = _block_scales(
                    scale_ptr, expert, features + first, features + safe_rows_F, 2 * features, inputs, start, ONE_SCALE
                )
                x_scale_P1 = tl.full((BLOCK_P, 1), 1.0, dtype=tl.float32)
                if HAS_X_SCALE:
                    x_scale_P1 = tl.load(x_scale_ptr + tokens_P * tl.cdiv(inputs, BLOCK) + start // BLOCK)[:, None]
                acc_PF += multiply_tiles(x, gate) * (scale * x_scale_P1)
                acc_up_PF += multiply_tiles(x, up) * (up_scale * x_scale_P1)
            else:
                acc_PF = multiply_tiles(x, gate, acc_PF)
                acc_up_PF = multiply_tiles(x, up, acc_up_PF)
        if SCALES == ROW_SCALES:
            acc_PF *= tl.load(scale_ptr + expert * 2 * features + safe_rows_F)[None, :]
            acc_up_PF *= tl.load(scale_ptr + expert * 2 * features + features + safe_rows_F)[None, :]
            if HAS_X_SCALE:
                x_scale_P1 = tl.load(x_scale_ptr + tokens_P)[:, None]
                acc_PF *= x_scale_P1
                acc_up_PF *= x_scale_P1
        if HAS_BIAS:
            bias_F = bias_ptr + expert * 2 * features + rows_F
            acc_PF += tl.load(bias_F, mask=ok_F, other=0.0).to(tl.float32)[None, :]
            acc_up_PF += tl.load(bias_F + features, mask=ok_F, other=0.0).to(tl.float32)[None, :]
        out_PF = activated(acc_PF, acc_up_PF, limit, CLAMPED)
        h_PF = h_ptr + pairs_P[:, None].to(tl.int64) * features + rows_F[None, :]
        tl.store(h_PF, out_PF.to(h_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_F[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_down_kernel(
    h_ptr,
    x_scale_ptr,
    order_ptr,
    block_experts_ptr,
    weights_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    num_pairs,
    outputs,
    features,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE_F: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_X_SCALE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
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
                first = tl.program_id(0) * BLOCK_O
                scale = _block_scales(scale_ptr, expert, first, safe_rows_O, outputs, features, start, ONE_SCALE)
                x_scale_P1 = tl.full((BLOCK_P, 1), 1.0, dtype=tl.float32)
                if HAS_X_SCALE:
                    at_P = x_scale_ptr + safe_pairs_P * tl.cdiv(features, BLOCK) + start // BLOCK
                    x_scale_P1 = tl.load(at_P)[:, None]
                acc_PO += multiply_tiles(h, w) * (scale * x_scale_P1)
            else:
                acc_PO = multiply_tiles(h, w, acc_PO)
        if SCALES == ROW_SCALES:
            acc_PO *= tl.load(scale_ptr + expert * outputs + safe_rows_O)[None, :]
            if HAS_X_SCALE:
                acc_PO *= tl.load(x_scale_ptr + safe_pairs_P)[:, None]
        if HAS_BIAS:
            acc_PO += tl.load(bias_ptr + expert * outputs + rows_O, mask=ok_O, other=0.0).to(tl.float32)[None, :]
        acc_PO *= tl.load(weights_ptr + safe_pairs_P).to(tl.float32)[:, None]
        y_PO = y_ptr + safe_pairs_P[:, None].to(tl.int64) * outputs + rows_O[None, :]
        tl.store(y_PO, acc_PO.to(y_ptr.dtype.element_ty), mask=ok_P[:, None] & ok_O[None, :])


@triton.jit
def _add_pairs_kernel(
    y_ptr,
    ids_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    residual_stride,
    num_slots,
    TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    ok_O = cols_O < outputs
    let_next_start(PDL)
    wait_for_previous(PDL)
    acc_O = tl.zeros((BLOCK_O,), dtype=tl.float32)
    if HAS_RESIDUAL:
        acc_O += tl.load(residual_ptr + token * residual_stride + cols_O, mask=ok_O, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        here_O = ok_O
        if SPREAD:  # nobody wrote the results of another rank's pairs
            here_O = cols_O < tl.where(tl.load(ids_ptr + token * TOP_K + k) < num_slots, outputs, 0)
        acc_O += tl.load(y_ptr + (token * TOP_K + k) * outputs + cols_O, mask=here_O, other=0.0).to(tl.float32)
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


def is_in_one_block(rows: int) -> bool:
    """Whether the rows of each tile of so many rows share their scales per block."""
    return SCALE_BLOCK % rows == 0


# By the number of pairs that an expert has on average, the likely best first.
_FEW = (Tiles(16, 64, 128, 128, 4, 4), Tiles(16, 32, 64, 256, 3, 4), Tiles(16, 64, 64, 128, 4, 4))
_SOME = (Tiles(32, 64, 128, 128, 3, 4), Tiles(16, 64, 128, 128, 4, 4), Tiles(32, 64, 128, 128, 4, 4), Tiles(32, 64, 128, 64, 6, 4))
_MORE = (Tiles(64, 64, 128, 64, 4, 4), Tiles(64, 128, 128, 64, 3, 8), Tiles(32, 64, 128, 128, 3, 4), Tiles(128, 64, 128, 64, 4, 8))
_MANY = (Tiles(128, 128, 256, 64, 4, 8), Tiles(128, 128, 256, 64, 3, 8), Tiles(128, 128, 128, 64, 4, 8))

# Of float8 activations: rows have half the bytes. Scales per block allow 128 columns at once.
_FLOAT8_FEW = (Tiles(16, 64, 128, 128, 4, 4), Tiles(16, 64, 128, 256, 3, 4), Tiles(16, 32, 64, 256, 4, 4))
_FLOAT8_SOME = (Tiles(32, 64, 128, 128, 4, 4), Tiles(16, 64, 128, 128, 4, 4), Tiles(32, 64, 128, 256, 3, 4))
_FLOAT8_MORE = (
    Tiles(64, 64, 128, 128, 4, 4),
    Tiles(64, 128, 256, 128, 3, 8),
    Tiles(32, 64, 128, 128, 4, 4),
    Tiles(128, 64, 128, 128, 4, 8),
)
# Two sums are kept in registers (`multiply_tiles`), which rules out tiles of 256 rows of down.
_FLOAT8_MANY = (Tiles(128, 128, 128, 128, 3, 8), Tiles(128, 128, 128, 128, 4, 8), Tiles(128, 64, 128, 128, 4, 8))


def grouped_tiles(num_pairs: int, num_experts: int, *, is_float8: bool = False) -> tuple[Tiles, ...]:
    """The candidates for a number of pairs that are spread evenly over the experts. is_float8: of float8 activations."""
    each = num_pairs / num_experts
    if is_float8:
        return _FLOAT8_FEW if each <= 8 else _FLOAT8_SOME if each <= 24 else _FLOAT8_MORE if each <= 96 else _FLOAT8_MANY
    return _FEW if each <= 8 else _SOME if each <= 24 else _MORE if each <= 96 else _MANY


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of `cas::experts`, in its order. Kernels take them `normalized`.

    With a placement, `ids_TK` are the rank's slots: kernels skip a pair whose id is the number of slots.
    """

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
    activations: str = "none"
    gate_up_offset: torch.Tensor | None = None
    down_offset: torch.Tensor | None = None
    codes: str = ""
    placement: torch.Tensor | None = None
    gate_up_factor: torch.Tensor | None = None
    down_factor: torch.Tensor | None = None

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
    def rounds_activations(self) -> bool:
        """Whether x and h are rounded to the weights' dtype, with a scale per row, or per row and block of 128 columns."""
        return self.activations == "dynamic"

    def rounded(self, x_RI: torch.Tensor, *, is_input: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows before a product with the weights, and their scales if they are rounded. is_input: x, which the norm comes before."""
        if not self.rounds_activations:
            return x_RI, None
        norm_weight = self.norm_weight_D if is_input else None
        return quantize_rows(x_RI, self.gate_up.dtype, norm_weight_I=norm_weight, eps=self.eps, per_group=self.scales == BLOCK_SCALES.value)

    @property
    def is_spread(self) -> bool:
        """Whether some experts are on other ranks."""
        return self.placement is not None

    @property
    def num_experts(self) -> int:
        """Experts of all ranks, over which the pairs are spread."""
        return self.gate_up.shape[0] if self.placement is None else self.placement.shape[0]

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


def run_grouped(tiles: Tiles, operands: Operands, gate_up: torch.Tensor) -> torch.Tensor:
    """A "grouped" method. gate_up: replaces the operands' weight, for the tuner."""
    if not operands.rounds_activations:
        operands = normed(operands)
    x_TD, x_scale = operands.rounded(operands.x_TD, is_input=True)
    order = order_by_expert(operands.ids_TK, gate_up.shape[0], tiles.block_p)
    h_PF = _grouped_gate_up(tiles, operands, x_TD, x_scale, gate_up, order)
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
        gate_up=dequantize(gate_up, operands.gate_up_scale, hidden, dtype),
        gate_up_scale=None,
        down=dequantize(operands.down, operands.down_scale, features, dtype),
        down_scale=None,
    )


def normed(operands: Operands) -> Operands:
    """The operands with the norm already applied to x."""
    if operands.norm_weight_D is None:
        return operands
    x_TD = rms_norm(operands.x_TD, operands.norm_weight_D, operands.eps)
    return replace(operands, x_TD=x_TD, norm_weight_D=None)


def _grouped_gate_up(
    tiles: Tiles, operands: Operands, x_TD: torch.Tensor, x_scale: torch.Tensor | None, gate_up: torch.Tensor, order: ExpertOrder
) -> torch.Tensor:
    hidden, features = x_TD.shape[1], operands.down.shape[2]
    h_PF = operands.x_TD.new_empty(operands.num_pairs, features)
    pdl = supports_pdl(x_TD.device)
    launch(
        _grouped_gate_up_kernel, (cdiv(features, tiles.block_f), order.max_blocks),
        x_TD, x_scale, order.pairs, order.experts, gate_up, operands.gate_up_scale, operands.gate_up_bias,
        h_PF, x_TD.stride(0), operands.num_pairs, features,
        hidden, operands.top_k, operands.limit,
        HAS_BIAS=operands.gate_up_bias is not None, CLAMPED=operands.clamped, BLOCK_P=tiles.block_p, BLOCK_F=tiles.block_f,
        BLOCK_D=tiles.depth, STAGES=tiles.stages, WHOLE_D=hidden % tiles.depth == 0, SCALES=operands.scales,
        HAS_X_SCALE=x_scale is not None, ONE_SCALE=is_in_one_block(tiles.block_f) and features % SCALE_BLOCK == 0, PDL=pdl,
        num_warps=tiles.warps, **launch_options(pdl),
    )  # fmt: skip
    return h_PF


def _grouped_down(tiles: Tiles, operands: Operands, h_PF: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    y_PD = multiply_pairs(tiles, operands, h_PF, operands.down, operands.down_scale, operands.down_bias, order, operands.weights_TK)
    return add_results_of_pairs(operands, y_PD)


def multiply_pairs(
    tiles: Tiles,
    operands: Operands,
    x_PI: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    order: ExpertOrder,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """Each pair's row, rounded if the operands are, times its expert's matrix [X, O, I], times the pair's weight. → [P, O]"""
    (num_pairs, inputs), outputs = x_PI.shape, weight.shape[1]
    y_PO = x_PI.new_empty(num_pairs, outputs)
    x_PI, x_scale = operands.rounded(x_PI)
    pdl = supports_pdl(x_PI.device)
    launch(
        _grouped_down_kernel,
        (cdiv(outputs, tiles.block_o), order.max_blocks),
        x_PI,
        x_scale,
        order.pairs,
        order.experts,
        weights_TK,
        weight,
        scale,
        bias,
        y_PO,
        num_pairs,
        outputs,
        inputs,
        HAS_BIAS=bias is not None,
        BLOCK_P=tiles.block_p,
        BLOCK_O=tiles.block_o,
        BLOCK_F=tiles.depth,
        STAGES=tiles.stages,
        WHOLE_F=inputs % tiles.depth == 0,
        SCALES=0 if scale is None else scale.dim() - 1,
        HAS_X_SCALE=x_scale is not None,
        ONE_SCALE=is_in_one_block(tiles.block_o),
        PDL=pdl,
        num_warps=tiles.warps,
        **launch_options(pdl),
    )
    return y_PO


def add_results_of_pairs(operands: Operands, y_PD: torch.Tensor) -> torch.Tensor:
    """The sum of each token's weighted results and of its residual. → [T, D]"""
    num_tokens, hidden = operands.x_TD.shape
    out_TD = y_PD.new_empty(num_tokens, hidden)
    pdl = supports_pdl(y_PD.device)
    block = min(1024, next_power_of_2(hidden))
    launch(
        _add_pairs_kernel,
        (num_tokens, cdiv(hidden, block)),
        y_PD,
        operands.ids_TK,
        operands.residual_TD,
        out_TD,
        hidden,
        operands.residual_stride,
        operands.gate_up.shape[0],
        TOP_K=operands.top_k,
        HAS_RESIDUAL=operands.residual_TD is not None,
        SPREAD=operands.is_spread,
        BLOCK_O=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out_TD
