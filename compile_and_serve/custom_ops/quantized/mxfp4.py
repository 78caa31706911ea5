"""MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 inputs, each input a 4-bit e2m1 number, each block a power of two as its scale.

Shape legend: X experts, O output features, I input features, G = I / 32 blocks.

A checkpoint holds e2m1 codes uint8 [X, O, G, 16], two in a byte, the lower input in the lower bits, and scales uint8 [X, O, G], which mean
2^(scale − 127) (e8m0). A code is a sign bit, two bits of exponent and one of mantissa: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}.

The Triton layout has codes int16 [X, B, O, 32], which are given the shape [X, O, B · 32], and scales int32 [X, B, O], with
B = ceil(I / 128). So a tile of rows is contiguous in each block. Word c of block b has the codes of the inputs 128 b + c + {0, 32, 64, 96}
(parts 0 to 3): the codes of a part belong to 32 adjacent inputs, which share a scale. The bits lie where few instructions bring those of a
part to where bfloat16 has them, in two words at once: parts 1 and 2 by rotating the pair of words, so that their signs are in the other
word of the pair, part 3 by one multiplication. Byte p of a scale's number is the scale of part p plus 126, the exponent that turns a
decoded code into its value (`moe/triton_mxfp4_decode.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.weight_functions import weight_function

MX_BLOCK = 32  # inputs that share a scale
PARTS = 4  # codes in a word of the Triton layout
BLOCK_COLUMNS = MX_BLOCK * PARTS
# Where the bits of a part's code are in a word: of its magnitude, lowest first, and its sign.
CODE_BITS = ((6, 7, 8, 15), (12, 13, 14, 5), (9, 10, 11, 2), (3, 4, 0, 1))
SWAPPED_SIGNS = (1, 2)  # parts whose signs are in the other word of the pair
LARGEST_SCALE = 128  # of the Triton layout; weights of 12 and more have larger ones
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-one for one in _MAGNITUDES))  # of each code


@weight_function("dequantize_mxfp4")
def dequantize_mxfp4(codes_XOGH: torch.Tensor, scales_XOG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e2m1 · 2^(scale − 127), with one rounding to `dtype`. uint8 [X, O, G, 16], uint8 [X, O, G] → [X, O, I]"""
    math_dtype = torch.promote_types(dtype, torch.float32)
    values = torch.tensor(E2M1_VALUES, dtype=math_dtype, device=codes_XOGH.device)
    codes = unpack_mxfp4_codes(codes_XOGH).unflatten(-1, (-1, MX_BLOCK))
    factors = torch.ldexp(torch.ones_like(scales_XOG, dtype=math_dtype), scales_XOG.to(torch.int32) - 127)
    return (values[codes.to(torch.int32)] * factors[..., None]).to(dtype).flatten(-2)


def unpack_mxfp4_codes(codes: torch.Tensor) -> torch.Tensor:
    """A checkpoint's codes, one in a byte. uint8 […, G, 16] → uint8 […, I]"""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-3)


@weight_function("deinterleave_rows")
def deinterleave_rows(weight: torch.Tensor) -> torch.Tensor:
    """Gate and up rows that alternate → gate rows before up rows. [X, 2F, …] → the same shape"""
    return weight.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


@weight_function("swap_inputs_and_outputs")
def swap_inputs_and_outputs(weight_XIO: torch.Tensor) -> torch.Tensor:
    """[X, I, O] → [X, O, I]"""
    return weight_XIO.transpose(1, 2)


@weight_function("pack_mxfp4_codes")
def pack_mxfp4_codes(codes_XOGH: torch.Tensor) -> torch.Tensor:
    """A checkpoint's codes in the Triton layout, padded with zeros. uint8 [X, O, G, 16] → int16 [X, O, B · 32], in memory [X, B, O, 32]"""
    blocks = -(-codes_XOGH.shape[2] // PARTS)
    padded = F.pad(codes_XOGH, (0, 0, 0, blocks * PARTS - codes_XOGH.shape[2]))
    words: torch.Tensor | None = None
    for part in range(PARTS):
        codes_XOBH = padded[:, :, part::PARTS]
        codes = torch.stack((codes_XOBH & 15, codes_XOBH >> 4), -1).flatten(-2).to(torch.int16)
        signs = codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if part in SWAPPED_SIGNS else codes
        for bit, at in enumerate(CODE_BITS[part]):
            bits = ((signs if bit == 3 else codes) >> bit & 1) << at
            words = bits if words is None else words | bits
    assert words is not None
    return words.transpose(1, 2).contiguous().view(*words.shape[:2], -1)


@weight_function("pack_mxfp4_scales")
def pack_mxfp4_scales(scales_XOG: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scales in the Triton layout. uint8 [X, O, G] → int32 [X, B, O]"""
    if type(scales_XOG) is torch.Tensor and scales_XOG.numel() and int(scales_XOG.max()) > LARGEST_SCALE:
        raise ValueError(
            f"An MXFP4 scale of the checkpoint is {int(scales_XOG.max())}, but the kernel takes at most {LARGEST_SCALE}: "
            "the weights are 12 and larger, which no trained model has."
        )
    blocks = -(-scales_XOG.shape[2] // PARTS)
    padded = F.pad(scales_XOG, (0, blocks * PARTS - scales_XOG.shape[2])).to(torch.int64) + 126
    bytes_XOBP = padded.unflatten(2, (blocks, PARTS))
    numbers = sum((bytes_XOBP[..., part] << (8 * part) for part in range(1, PARTS)), bytes_XOBP[..., 0])
    return numbers.to(torch.int32).transpose(1, 2).contiguous()  # the upper half wraps to negative numbers
