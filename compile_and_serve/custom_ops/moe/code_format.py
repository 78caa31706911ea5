"""How codes of experts become numbers, and their layout for the Triton kernels.

Shape legend: X experts, O output features, I input features, B blocks of inputs, W words of a row of a block, G groups of inputs, S parts
of the inputs that share a factor.

weight = (code − zero point) · scale, code · scale + minimum, or table[code] · scale, for groups of adjacent inputs (`group_layout.py`).
With factors, a scale is scale · factor[…, 0], and a minimum is −offset · factor[…, 1]: formats store small numbers with a floating-point
factor for several groups.

The Triton layout has codes int16 [X, B, O, W], which are given the shape [X, O, B · W]: a tile of rows is contiguous in each block. A block
is 128 inputs (8 bits: 64). Word c < 32 of a row has the lowest 4 bits of the codes of the inputs c, c + 32, c + 64, c + 96 (parts 0 to 3),
lowest first; with 8 bits the codes of c and c + 32. With 4 + H bits (H = 1, 2), 8 · H more words follow: word j of them has the highest H
bits of the inputs c of part p with c % 8H = j, at bit (c // 8H) · 4H + H · p. Scales and offsets: [X, G, O]. Factors: [X, S, 1 or 2, O].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.quantized.group_layout import TILE_WORDS, dequantize_groups, with_factors
from compile_and_serve.custom_ops.quantized.mxfp4 import BLOCK_COLUMNS, MX_BLOCK
from compile_and_serve.custom_ops.weight_functions import weight_function

CODE_BITS = (4, 5, 6, 8)  # of the layouts


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """The fields are as in `group_linear`."""

    bits: int
    group_size: int
    table: str = ""

    @property
    def name(self) -> str:
        return f"{self.bits},{self.group_size},{self.table}"

    @classmethod
    def of(cls, name: str) -> CodeFormat:
        """From its name; MXFP4 has the name ""."""
        if not name:
            return MXFP4
        bits, group_size, table = name.split(",")
        return cls(int(bits), int(group_size), table)

    @property
    def columns(self) -> int:
        """Inputs of a block of the Triton layout."""
        return BLOCK_COLUMNS if self.bits < 8 else BLOCK_COLUMNS // 2

    @property
    def words(self) -> int:
        """Words of a row of a block of the Triton layout."""
        return TILE_WORDS if self.bits == 8 else TILE_WORDS + 8 * (self.bits - 4)


MXFP4 = CodeFormat(4, MX_BLOCK, "e2m1")


def triton_codes_unsupported_reason(form: CodeFormat) -> str | None:
    """None when the Triton kernels take experts in this format, else the reason in one sentence."""
    size = form.group_size
    if size == TILE_WORDS // 2 or size % form.columns == 0 or (size % TILE_WORDS == 0 and form.columns % size == 0):
        return None
    return f"the GPU kernels take experts with groups of 16, 32, 64 or a multiple of 128 inputs, not of {size}"


@weight_function("pack_expert_codes")
def pack_expert_codes(codes_XOI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [X, O, I] → int16 [X, O, B · W], in memory [X, B, O, W]; padded with zeros"""
    packed = [_pack(codes_OI, bits) for codes_OI in codes_XOI]
    return torch.stack(packed).view(len(packed), codes_XOI.shape[1], -1)


def _pack(codes_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """→ int16 [B, O, W]"""
    form = CodeFormat(bits, TILE_WORDS)
    outputs, inputs = codes_OI.shape
    blocks = -(-inputs // form.columns)
    parts = F.pad(codes_OI, (0, blocks * form.columns - inputs)).view(outputs, blocks, -1, TILE_WORDS).to(torch.int32)
    step = min(bits, 4) if bits < 8 else 8
    low = parts & ((1 << step) - 1)
    words = sum((low[:, :, part] << (step * part) for part in range(1, 16 // step)), low[:, :, 0])
    if 4 < bits < 8:
        width = 8 * (bits - 4)
        high = (parts >> 4).unflatten(3, (-1, width))  # [O, B, part, run, word]
        runs = 4 // (bits - 4)
        shifted = [high[:, :, p, k] << (k * 4 + p) * (bits - 4) for p in range(4) for k in range(runs)]
        words = torch.cat((words, sum(shifted[1:], shifted[0])), 2)
    return words.to(torch.int16).transpose(0, 1).contiguous()


@weight_function("pack_expert_scales")
def pack_expert_scales(scale_XOG: torch.Tensor) -> torch.Tensor:
    """Scales or offsets [X, O, G] → [X, G, O]"""
    return scale_XOG.transpose(1, 2).contiguous()


@weight_function("plain_expert_factors")
def plain_expert_factors(*factors_XOS: torch.Tensor) -> torch.Tensor:
    """As `pack_expert_factors`, for the plain layout. → [X, 1 or 2, O, S]"""
    return torch.stack(factors_XOS, 1)


@weight_function("pack_expert_factors")
def pack_expert_factors(*factors_XOS: torch.Tensor) -> torch.Tensor:
    """Factors of scales, and of minima where the format has some, [X, O, S] each → [X, S, 1 or 2, O]"""
    return torch.stack([one.transpose(1, 2) for one in factors_XOS], 2)


def dequantize_codes(
    codes_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    offset_OG: torch.Tensor | None,
    form: CodeFormat,
    dtype: torch.dtype,
    factors: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:
    """The weight of one expert. factors: [O, S] each. → [O, I]"""
    return dequantize_groups(codes_OI, *with_factors(scale_OG, offset_OG, factors), form.bits, form.group_size, dtype, table=form.table)
