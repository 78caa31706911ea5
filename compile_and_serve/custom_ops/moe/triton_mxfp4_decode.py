"""Decoding MXFP4 weights (the Triton layout of `custom_ops/quantized/mxfp4.py`) in registers, for products on the tensor cores.

A code's bits become the lowest two exponent bits and the highest mantissa bit of a number of x's dtype, which is the value times a power of
two (2^-126 for bfloat16): one multiplication by a power of two undoes that and applies the scale, without rounding. All instructions take
two codes at once; the codes of all four parts of two words take twelve.

Shape legend: O rows, C words of a row of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_and_serve.custom_ops.quantized.mxfp4 import BLOCK_COLUMNS, MX_BLOCK, PARTS

WORDS = tl.constexpr(MX_BLOCK)  # of a row of a block
COLUMNS = tl.constexpr(BLOCK_COLUMNS)
NUM_PARTS = tl.constexpr(PARTS)
# PTX that brings the codes of a part of the two words in $1 to where bfloat16 has sign, exponent and mantissa (`CODE_BITS`).
PLACE_PTX = (
    "and.b32 m, $1, 0x81C081C0;",
    "shf.r.wrap.b32 m, $1, $1, 6; and.b32 m, m, 0x81C081C0;",
    "shf.r.wrap.b32 m, $1, $1, 3; and.b32 m, m, 0x81C081C0;",
    "and.b32 m, $1, 0x001B001B; mul.lo.u32 m, m, 0x4108; and.b32 m, m, 0x81C081C0;",
)
_TO_FLOAT16 = "and.b32 s, m, 0x80008000; shl.b32 m, m, 3; lop3.b32 m, m, 0x0E000E00, s, 0xEA;"
BFLOAT16_PTX = tl.constexpr(tuple(f"{{.reg .b32 m; {place} mul.rn.bf16x2 $0, m, $2;}}" for place in PLACE_PTX))
FLOAT16_PTX = tl.constexpr(tuple(f"{{.reg .b32 m, s; {place} {_TO_FLOAT16} mul.rn.f16x2 $0, m, $2;}}" for place in PLACE_PTX))
# PTX that makes a byte of $1 the exponent of two bfloat16 numbers.
FACTOR_PTX = tl.constexpr(
    tuple(f"{{.reg .b32 f; prmt.b32 f, $1, 0, {0x4040 | part << 8 | part:#x}; shl.b32 $0, f, 7;}}" for part in range(PARTS))
)


@triton.jit
def _code(words, others, PART: tl.constexpr):
    """The codes of a part of each word. others: the other word of each pair. int32 → int32, sign and magnitude in the lowest four bits"""
    if PART == 0:
        return (words >> 6 & 7) | (words >> 12 & 8)
    elif PART == 1:
        return (words >> 12 & 7) | (others >> 2 & 8)
    elif PART == 2:
        return (words >> 9 & 7) | (others << 1 & 8)
    else:
        return (words >> 3 & 3) | ((words & 1) << 2) | (words << 2 & 8)


@triton.jit
def values_of_part(words, scales, PART: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """The values of a part of each word. words: int16 [O, C], scales: int32 [O] → DOT [O, C]. PTX: by PTX, on two words at a time."""
    if PTX and tl.bfloat16 == DOT:
        factors = tl.inline_asm_elementwise(FACTOR_PTX[PART], "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1)
        factors = tl.broadcast_to(factors[:, None], words.shape)
        return tl.inline_asm_elementwise(BFLOAT16_PTX[PART], "=r,r,r,r", [words, factors], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif PTX and tl.float16 == DOT:
        exponents = ((scales >> (8 * PART)) & 0xFF) - 112
        factors = (exponents << 23).to(tl.float32, bitcast=True).to(tl.float16)
        factors = tl.broadcast_to(factors[:, None], words.shape)
        return tl.inline_asm_elementwise(FLOAT16_PTX[PART], "=r,r,r", [words, factors], dtype=tl.float16, is_pure=True, pack=2)
    else:
        exponents = ((scales >> (8 * PART)) & 0xFF) - 126
        factors = (exponents << 23).to(tl.float32, bitcast=True)[:, None]
        rows: tl.constexpr = words.shape[0]
        bits = words.to(tl.int32)
        even, odd = tl.split(tl.reshape(bits, (rows, WORDS // 2, 2)))
        code = _code(bits, tl.reshape(tl.join(odd, even), (rows, WORDS)), PART)
        magnitude = code & 7
        exponent, mantissa = magnitude >> 1, (magnitude & 1).to(tl.float32)
        power = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
        value = tl.where(exponent == 0, mantissa * 0.5, (1.0 + mantissa * 0.5) * power)
        sign = 1.0 - 2.0 * (code >> 3).to(tl.float32)
        return (sign * value * factors).to(DOT)
