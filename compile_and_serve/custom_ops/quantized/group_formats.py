"""Decodes the packed tensors of group-quantized checkpoints: AWQ, GPTQ, compressed-tensors.

Shape legend: I input features, O output features, G groups of inputs.

Sources: AutoAWQ's `awq/utils/packing_utils.py` (order of nibbles), AutoGPTQ's `qlinear_cuda_old.py` (bit stream, zero points minus 1),
compressed-tensors' `pack_to_int32` (values + 2^(bits − 1)).
"""

from __future__ import annotations

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
