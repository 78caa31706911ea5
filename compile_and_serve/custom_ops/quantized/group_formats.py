"""Decodes the packed tensors of group-quantized checkpoints: AWQ, GPTQ, compressed-tensors, bitsandbytes, NVFP4, MXFP4.

Shape legend: I input features, O output features, G groups of inputs.

Sources: AutoAWQ's `awq/utils/packing_utils.py` (order of nibbles), AutoGPTQ's `qlinear_cuda_old.py` (bit stream, zero points minus 1),
compressed-tensors' `pack_to_int32` (values + 2^(bits − 1)), bitsandbytes' `functional.py` (`dequantize_4bit`, `QuantState`).
"""

from __future__ import annotations

import json

import torch

# Of outputs 8 · word … 8 · word + 7. Nibbles are in the order 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first `count` values of `bits` bits along dimension 1, a little-endian stream over int32 words.

    words: int32 [R, W] → uint8 [R, count]
    """
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        values = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
        return values.flatten(1)[:, :count].to(torch.uint8)
    positions = torch.arange(count, device=words.device) * bits
    at, shift = positions // 32, (positions % 32).to(torch.int64)
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    following = torch.nn.functional.pad(unsigned, (0, 1))[:, at + 1]
    return (((unsigned[:, at] >> shift) | (following << (32 - shift))) & ((1 << bits) - 1)).to(torch.uint8)


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """AWQ's qweight [I, O / 8] or qzeros [G, O / 8], int32 → uint8 [O, I] or [O, G]"""
    shifts = torch.tensor(_AWQ_SHIFTS, dtype=torch.int32, device=words.device)
    nibbles = (words[:, :, None] >> shifts) & 15
    return nibbles.flatten(1).to(torch.uint8).t().contiguous()


def gptq_codes(words: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """GPTQ's qweight, int32 [I · bits / 32, O] → uint8 [O, I]"""
    return unpack_bits(words.t(), bits, in_features)


def gptq_zeros(words: torch.Tensor, bits: int, out_features: int, added: int) -> torch.Tensor:
    """GPTQ's qzeros, int32 [G, O · bits / 32] → uint8 [O, G]. added: 1 for the format "gptq", which stores zero points minus 1"""
    stored = unpack_bits(words, bits, out_features)
    return ((stored + added) & ((1 << bits) - 1)).t().contiguous()


def packed_rows(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """compressed-tensors' weight_packed, int32 [O, I · bits / 32] → uint8 [O, count]"""
    return unpack_bits(words, bits, count)


def packed_columns(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """compressed-tensors' weight_zero_point, int32 [O · bits / 32, G] → uint8 [count, G]"""
    return unpack_bits(words.t(), bits, count).t().contiguous()


def transposed(scale: torch.Tensor) -> torch.Tensor:
    """[G, O] → [O, G]"""
    return scale.t().contiguous()


def low_nibble_first(packed_OH: torch.Tensor) -> torch.Tensor:
    """NVFP4 and MXFP4: two codes in a byte, the lower input in the lower bits. uint8 [O, I / 2] → [O, I]"""
    return torch.stack((packed_OH & 15, packed_OH >> 4), 2).flatten(1)


def high_nibble_first(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """bitsandbytes: two codes in a byte, the first in the higher bits. uint8 [O · I / 2, 1] → [O, I]"""
    return torch.stack((packed >> 4, packed & 15), 1).reshape(out_features, in_features)


def scaled_scales(scale_OG: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """ModelOpt's NVFP4: float8 scales and `weight_scale_2`, one value. → float32 [O, G] (float64 of float64)"""
    return _wide(scale_OG) * _wide(factor).reshape(1, 1)


def divided_scales(scale_OG: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """compressed-tensors' NVFP4: float8 scales and `weight_global_scale`, one value. → float32 [O, G] (float64 of float64)"""
    return _wide(scale_OG) / _wide(divisor).reshape(1, 1)


def powers_of_two(exponent_OG: torch.Tensor) -> torch.Tensor:
    """MXFP4's e8m0: 2^(exponent − 127). uint8 [O, G] → float32 [O, G]"""
    return torch.ldexp(torch.ones_like(exponent_OG, dtype=torch.float32), exponent_OG.to(torch.int32) - 127)


def block_maxima(absmax: torch.Tensor, out_features: int) -> torch.Tensor:
    """bitsandbytes' `absmax` of blocks of 64, float32 [O · G] → [O, G]"""
    return absmax.reshape(out_features, -1)


def nested_maxima(
    absmax: torch.Tensor, quant_map: torch.Tensor, nested_absmax: torch.Tensor, state: torch.Tensor, out_features: int
) -> torch.Tensor:
    """bitsandbytes' double quantization: quant_map[absmax] · nested_absmax + offset, with a nested scale for 256 blocks.

    absmax: uint8 [O · G]; quant_map: float32 [256]; nested_absmax: float32 [ceil(O · G / 256)]; state: uint8, the JSON text of the
    QuantState, which has the offset. → float32 [O, G] (float64 of float64)
    """
    is_real = type(state) is torch.Tensor  # not a tensor without data, of which only the shape is asked
    offset = read_state(state)["nested_offset"] if is_real else 0.0
    scale = nested_absmax.repeat_interleave(NESTED_BLOCK)[: absmax.numel()]
    return (quant_map[absmax.to(torch.int32)] * scale + offset).reshape(out_features, -1)


QUANT_STATE = ".quant_state.bitsandbytes__"  # in the names of such texts
NESTED_BLOCK = 256  # blocks that share a nested scale
STATE_BYTES = 1024  # the JSON text of a QuantState is padded to this length with spaces


def padded_state(text: bytes) -> torch.Tensor:
    """A JSON text, padded. → uint8 [STATE_BYTES]"""
    return torch.frombuffer(bytearray(text.ljust(STATE_BYTES)), dtype=torch.uint8)


def read_state(state: torch.Tensor) -> dict[str, float]:
    """The QuantState of a 4-bit weight. Raises `ValueError` if it is none, or if its offset is missing."""
    try:
        found = json.loads(bytes(state.cpu().tolist()))
        found["nested_offset"] = float(found["nested_offset"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"A quant_state of the checkpoint has no nested_offset ({type(error).__name__}: {error}): use the complete weights, or "
            "bnb_4bit_use_double_quant as they were quantized."
        ) from None
    return found


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.float() if values.dtype == torch.float8_e4m3fn else values.to(torch.promote_types(values.dtype, torch.float32))


def dequantize_packed_experts(
    words: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    in_features: int,
    group_size: int,
    zeros: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """compressed-tensors' packed codes of experts, one expert at a time. → `dtype` [X, O, I]

    words: int32 [X, O, I · bits / 32]. scale: [X, O, G], of groups of `group_size` inputs. zeros: int32 [X, O · bits / 32, G]; None: the
    zero point is 2^(bits − 1).
    """
    math_dtype = torch.promote_types(scale.dtype, torch.float32)
    out = torch.empty(*scale.shape[:2], in_features, dtype=math_dtype if math_dtype == torch.float64 else dtype, device=words.device)
    for expert in range(len(words)):
        codes_OI = packed_rows(words[expert], bits, in_features).to(math_dtype)
        zero = 1 << (bits - 1)
        zero_OG = torch.full_like(scale[expert], zero) if zeros is None else packed_columns(zeros[expert], bits, scale.shape[1])
        scale_OI, zero_OI = (one.to(math_dtype).repeat_interleave(group_size, 1)[:, :in_features] for one in (scale[expert], zero_OG))
        out[expert] = (codes_OI - zero_OI) * scale_OI
    return out
