"""The Triton kernel of linears over 8-bit weights [O, I] for one token, with bias, SiLU-mul and residual in the same kernel.

Shape legend: I input features, O output features (R: stored outputs, O or O / 2 with silu_mul), W words of four values.

Each program multiplies blocks of rows of W by x in float32 (float8 by float8: in float16, with sums in float32), and normalizes and
quantizes x itself. The limit is reading the weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import LARGEST
from compile_and_serve.custom_ops.triton_common import (
    TRITON_TYPES,
    add_pairs,
    cdiv,
    launch_options,
    let_next_start,
    next_power_of_2,
    num_sms,
    prefetch_l2,
    silu,
    supports_pdl,
    wait_for_previous,
    weight_tile,
)
from compile_and_serve.custom_ops.triton_quantize import round_to

_THREAD_BYTES = 16  # of a row, per load of a thread
HALVES_SCALE = tl.constexpr(64.0)  # its inverse in float16 is 0x2400


@triton.jit
def _value(words, N: tl.constexpr, DTYPE: tl.constexpr):
    """Value N of the four in each word, in float32."""
    return (words >> (8 * N)).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _values(words, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The four values of each word, in float32. PTX: by PTX instructions, which convert two adjacent values at a time."""
    if PTX and tl.float8e4nv == DTYPE:
        return tl.inline_asm_elementwise(
            "{.reg .b16 low, high, a, b, c, d; .reg .b32 ab, cd; mov.b32 {low, high}, $4;"
            "cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high; mov.b32 {a, b}, ab; mov.b32 {c, d}, cd;"
            "cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d;}",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return _value(words, 0, DTYPE), _value(words, 1, DTYPE), _value(words, 2, DTYPE), _value(words, 3, DTYPE)


@triton.jit
def _row_sums(
    words_OW, x0, x1, x2, x3, DTYPE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_W: tl.constexpr, PTX: tl.constexpr, HALVES: tl.constexpr
):
    """Σ w · x over the adjacent values of a thread: [O, W / 4], in float32. x0 to x3: from `_activations`."""
    if HALVES:
        return _half_sums(words_OW, x0, x1, BLOCK_O, BLOCK_W)
    else:
        w0, w1, w2, w3 = _values(words_OW, DTYPE, PTX)
        sums = w0 * x0
        sums += w1 * x1
        sums += w2 * x2
        sums += w3 * x3
        return tl.sum(tl.reshape(sums, (BLOCK_O, BLOCK_W // 4, 4)), 2)


@triton.jit
def _add_halves(a, b):
    """a + b of words with two float16 values each."""
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _half_sums(words_OW, x01, x23, BLOCK_O: tl.constexpr, BLOCK_W: tl.constexpr):
    """As `_row_sums` for float8 on both sides, with half the instructions: products and a thread's sums are in float16.

    x01, x23: words of two float16 values, x / HALVES_SCALE. With this scale, float16 holds every product and every sum of eight of them.
    The sums, which have float16's 11 bits, are then added in float32.
    """
    halves = tl.inline_asm_elementwise(
        "{.reg .b16 low, high; .reg .b32 ab, cd; mov.b32 {low, high}, $1;"
        "cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high; mul.rn.f16x2 ab, ab, $2; fma.rn.f16x2 $0, cd, $3, ab;}",
        "=r,r,r,r",
        [words_OW, x01, x23],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    halves = tl.reduce(tl.reshape(halves, (BLOCK_O, BLOCK_W // 4, 4)), 2, _add_halves)
    low, high = tl.inline_asm_elementwise(
        "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
        "=f,=f,r",
        [halves],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return low + high


@triton.jit
def _normed(x, norm_weight, inverse_rms, x_ptr):
    """x / rms · weight in float32, after one rounding to x's dtype."""
    return (x * inverse_rms * norm_weight).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _activations(
    x_ptr,
    norm_ptr,
    cols_I,
    in_features,
    inverse_rms,
    inverse_scale,
    HAS_NORM: tl.constexpr,
    QUANTIZES: tl.constexpr,
    DTYPE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HALVES: tl.constexpr,
):
    """The activations for the first, second, third and fourth value of each word: four of [1, W], in float32.

    They are x, normalized and quantized to the weight's dtype as by `quantize_rows`. HALVES: for `_half_sums`, words of the first two
    values and of the last two, each twice.
    """
    ok_I = cols_I < in_features
    x_I = tl.load(x_ptr + cols_I, mask=ok_I, other=0.0).to(tl.float32)
    if HAS_NORM:
        x_I = _normed(x_I, tl.load(norm_ptr + cols_I, mask=ok_I, other=0.0).to(tl.float32), inverse_rms, x_ptr)
    if QUANTIZES:
        x_I *= inverse_scale
        if not HALVES:  # the conversion below rounds
            x_I = round_to(tl.minimum(tl.maximum(x_I, -LARGEST_VALUE), LARGEST_VALUE), DTYPE).to(tl.float32)
    even, odd = tl.split(tl.reshape(x_I, (BLOCK_W, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    if HALVES:
        x01, x23 = tl.inline_asm_elementwise(
            "{.reg .b16 low, high; .reg .b32 ab, cd; cvt.rn.satfinite.e4m3x2.f32 low, $3, $2; cvt.rn.satfinite.e4m3x2.f32 high, $5, $4;"
            "cvt.rn.f16x2.e4m3x2 ab, low; cvt.rn.f16x2.e4m3x2 cd, high;"
            "mul.rn.f16x2 $0, ab, $6; mul.rn.f16x2 $1, cd, $6;}",
            "=r,=r,f,f,f,f,r",
            [x0, x1, x2, x3, tl.full((BLOCK_W,), 0x24002400, dtype=tl.int32)],  # 1 / HALVES_SCALE in both halves
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return x01[None, :], x23[None, :], x01[None, :], x23[None, :]
    else:
        return x0[None, :], x1[None, :], x2[None, :], x3[None, :]


@triton.jit(do_not_specialize=["prefetch_blocks"])
def _gemv_kernel(
    x_ptr, w_ptr, out_ptr, scale_ptr, norm_ptr, input_scale_ptr, bias_ptr, residual_ptr, num_rows, in_features, in_words, eps,
    prefetch_blocks, HAS_NORM: tl.constexpr, QUANTIZES: tl.constexpr, IS_STATIC: tl.constexpr, DTYPE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The weight is loaded as words of four values, so that it takes few registers until it is multiplied.
    # A program runs over blocks of rows (pid, pid + programs, …) and over the chunks of columns in each, in one loop, so that the next
    # tile of weights loads while the current one is multiplied.
    first_block, num_programs = tl.program_id(0), tl.num_programs(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_O)
    num_chunks = tl.cdiv(in_features, BLOCK_I)
    cols_I = tl.arange(0, BLOCK_I)
    BLOCK_W: tl.constexpr = BLOCK_I // 4
    HALVES: tl.constexpr = PDL and QUANTIZES and tl.float8e4nv == DTYPE  # by PTX instructions
    up_ptr = w_ptr + num_rows.to(tl.int64) * in_words
    # Weights do not depend on the previous kernel. While it still runs, the first tile is loaded and more tiles are prefetched into L2.
    next_w = weight_tile(w_ptr, first_block, 0, num_rows, num_blocks, in_words, BLOCK_O, BLOCK_W)
    if SILU_MUL:
        next_up = weight_tile(up_ptr, first_block, 0, num_rows, num_blocks, in_words, BLOCK_O, BLOCK_W)
    if HAS_NORM:
        cols_W = tl.arange(0, WIDTH)
        norm_W = tl.load(norm_ptr + cols_W, mask=cols_W < in_features, other=0.0).to(tl.float32)
    let_next_start(PDL)
    if PDL:
        FIRST: tl.constexpr = 0 if WIDTH > BLOCK_I else 1  # a block of one chunk is already loading
        block_words = BLOCK_O * in_words.to(tl.int64)
        for i in range(FIRST, FIRST + prefetch_blocks):
            block = first_block + i * num_programs
            if (block + 1) * BLOCK_O <= num_rows:
                prefetch_l2(w_ptr + block * block_words, block_words, THREADS)
                if SILU_MUL:
                    prefetch_l2(up_ptr + block * block_words, block_words, THREADS)
    wait_for_previous(PDL)

    # Every program computes 1 / rms and the largest value of x itself: x is small, and a separate kernel would cost more.
    inverse_rms, x_scale, inverse_scale = 1.0, 1.0, 1.0
    if HAS_NORM:
        x_W = tl.load(x_ptr + cols_W, mask=cols_W < in_features, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x_W * x_W) / in_features + eps)
        if QUANTIZES:
            x_W = _normed(x_W, norm_W, inverse_rms, x_ptr)
            largest, is_nan = tl.max(tl.abs(x_W)), tl.sum((x_W != x_W).to(tl.int32))
    elif QUANTIZES:
        largest_I = tl.zeros((BLOCK_I,), dtype=tl.float32)
        is_nan_I = tl.zeros((BLOCK_I,), dtype=tl.int32)
        for start in range(0, in_features, BLOCK_I):
            x_I = tl.load(x_ptr + start + cols_I, mask=start + cols_I < in_features, other=0.0).to(tl.float32)
            largest_I = tl.maximum(largest_I, tl.abs(x_I))
            is_nan_I |= (x_I != x_I).to(tl.int32)
        largest, is_nan = tl.max(largest_I), tl.sum(is_nan_I)
    if QUANTIZES:
        if IS_STATIC:
            x_scale = tl.load(input_scale_ptr).to(tl.float32)
        else:
            x_scale = tl.maximum(tl.div_rn(largest, LARGEST_VALUE), 1e-12)
        x_scale = tl.where(is_nan > 0, float("nan"), x_scale)  # maxima and rounding drop NaN
        inverse_scale = tl.div_rn(1.0, x_scale)
        if HALVES:
            x_scale *= HALVES_SCALE

    x0, x1, x2, x3 = _activations(
        x_ptr, norm_ptr, cols_I, in_features, inverse_rms, inverse_scale, HAS_NORM, QUANTIZES, DTYPE, LARGEST_VALUE, BLOCK_W, HALVES
    )
    acc = tl.zeros((BLOCK_O, BLOCK_W // 4), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_O, BLOCK_W // 4), dtype=tl.float32)
    block, chunk = first_block, 0
    for _ in range(0, tl.cdiv(num_blocks - first_block, num_programs) * num_chunks):
        w = next_w
        if SILU_MUL:
            up = next_up
        here_block, here_I = block, chunk * BLOCK_I + cols_I
        is_last = chunk + 1 == num_chunks
        block = tl.where(is_last, block + num_programs, block)
        chunk = tl.where(is_last, 0, chunk + 1)
        next_w = weight_tile(w_ptr, block, chunk * BLOCK_W, num_rows, num_blocks, in_words, BLOCK_O, BLOCK_W)
        if SILU_MUL:
            next_up = weight_tile(up_ptr, block, chunk * BLOCK_W, num_rows, num_blocks, in_words, BLOCK_O, BLOCK_W)
        if WIDTH > BLOCK_I:  # otherwise one chunk is all of x
            x0, x1, x2, x3 = _activations(
                x_ptr, norm_ptr, here_I, in_features, inverse_rms, inverse_scale, HAS_NORM, QUANTIZES, DTYPE, LARGEST_VALUE, BLOCK_W, HALVES
            )
        acc += _row_sums(w, x0, x1, x2, x3, DTYPE, BLOCK_O, BLOCK_W, PDL, HALVES)
        if SILU_MUL:
            acc_up += _row_sums(up, x0, x1, x2, x3, DTYPE, BLOCK_O, BLOCK_W, PDL, HALVES)
        if is_last:
            rows_O = here_block * BLOCK_O + tl.arange(0, BLOCK_O)
            ok_O = rows_O < num_rows
            if HAS_RESIDUAL:  # loads while the sums are reduced
                residual_O = tl.load(residual_ptr + rows_O, mask=ok_O, other=0.0).to(tl.float32)
            scale_O = tl.load(scale_ptr + rows_O, mask=ok_O, other=0.0)
            if SILU_MUL:
                up_scale_O = tl.load(scale_ptr + num_rows + rows_O, mask=ok_O, other=0.0)
                y_O, up_O = tl.reduce((acc, acc_up), 1, add_pairs)
            else:
                y_O = tl.sum(acc, 1)
            y_O *= scale_O * x_scale
            if HAS_BIAS:
                y_O += tl.load(bias_ptr + rows_O, mask=ok_O, other=0.0).to(tl.float32)
            if SILU_MUL:
                up_O *= up_scale_O * x_scale
                if HAS_BIAS:
                    up_O += tl.load(bias_ptr + num_rows + rows_O, mask=ok_O, other=0.0).to(tl.float32)
                y_O = silu(y_O) * up_O
            if HAS_RESIDUAL:
                y_O += residual_O
            tl.store(out_ptr + rows_O, y_O.to(out_ptr.dtype.element_ty), mask=ok_O)
            acc = tl.zeros((BLOCK_O, BLOCK_W // 4), dtype=tl.float32)
            acc_up = tl.zeros((BLOCK_O, BLOCK_W // 4), dtype=tl.float32)


def gemv_config(num_rows: int, in_features: int, silu_mul: bool, quantizes_float8: bool, sms: int) -> tuple[int, int, int, int]:
    """(rows per block, warps, programs per multiprocessor, MiB to prefetch into L2) of the 1-token kernel. num_rows: stored outputs.

    The programs just fill a multiprocessor's registers. So when they start while the previous kernel still runs, no multiprocessor gets
    more than its share of the rows. The warps are enough for a chunk to hold all of x, where possible, so that x is quantized once.
    Quantizing to float8 takes few instructions; there, an equal number of blocks for all programs matters more when there are few rows.
    """
    if quantizes_float8 and not silu_mul:
        blocks = cdiv(num_rows, 8)
        return 8, 4, max((4, 3, 2), key=lambda per_sm: blocks / (cdiv(blocks, per_sm * sms) * per_sm)), 16
    warps = 8 if in_features > 2048 else 4
    return (4 if silu_mul else 8), warps, 16 // warps, 16


def gemv(
    x_1I: torch.Tensor,
    weight_OI: torch.Tensor,
    scale_O: torch.Tensor,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_1O: torch.Tensor | None,
    activations: str,
    input_scale: torch.Tensor | None,
    config: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:
    """`cas::quantized_linear` for one token and scales per output, in one kernel. I: a multiple of 4. → x's dtype [1, R]

    config: replaces `gemv_config`'s.
    """
    out_features, in_features = weight_OI.shape
    device = x_1I.device
    num_rows = out_features // 2 if silu_mul else out_features
    quantizes_float8 = activations != "none" and weight_OI.dtype == torch.float8_e4m3fn
    rows, warps, per_sm, prefetch_mib = config or gemv_config(num_rows, in_features, silu_mul, quantizes_float8, num_sms(device))
    out = x_1I.new_empty(1, num_rows)
    pdl = supports_pdl(device)
    num_programs = min(cdiv(num_rows, rows), per_sm * num_sms(device))
    block_bytes = rows * in_features
    round_bytes = num_programs * block_bytes * (2 if silu_mul else 1)
    # Each thread prefetches a part of a block, of at least 16 bytes.
    prefetch_blocks = (prefetch_mib << 20) // round_bytes if block_bytes % (16 * 32 * warps) == 0 else 0
    # A multiprocessor has 65,536 registers.
    limit = {"maxnreg": min(255, 65536 // (per_sm * 32 * warps))} if platform_of(device).runs_triton_kernels else {}
    launch(
        _gemv_kernel, (num_programs,),
        x_1I, weight_OI.view(torch.int32), out, scale_O, norm_weight_I, input_scale, bias_O, residual_1O, num_rows, in_features,
        in_features // 4, eps, prefetch_blocks, HAS_NORM=norm_weight_I is not None, QUANTIZES=activations != "none",
        IS_STATIC=activations == "static", DTYPE=TRITON_TYPES[weight_OI.dtype], LARGEST_VALUE=LARGEST[weight_OI.dtype],
        HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_1O is not None, SILU_MUL=silu_mul,
        WIDTH=next_power_of_2(in_features), BLOCK_O=rows, BLOCK_I=32 * warps * _THREAD_BYTES, THREADS=32 * warps, PDL=pdl,
        num_warps=warps, **limit, **launch_options(pdl),
    )  # fmt: skip
    return out
