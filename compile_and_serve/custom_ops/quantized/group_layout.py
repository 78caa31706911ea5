"""Layouts of group-quantized weights for the kernels of `cas::group_linear`.

Shape legend: I input features, O output features, G groups of inputs.

- plain: codes uint8 [O, I], scales and offsets [O, G]. Every device can run the torch reference on it.
- Triton: codes int16 [ceil(O / 64), ceil(I / 128), 64, 32] with 4 bits, [ceil(O / 64), ceil(I / 64), 64, 32] with 8 bits. Element c of a
  block has the codes of columns c, c + 32, c + 64 and c + 96 (8 bits: c and c + 32), lowest bits first. So one shift gives codes of 32
  adjacent columns, and a tile of 64 outputs is contiguous in memory. Scales and offsets: [ceil(O / 64), G, 64].
- C++: codes uint8 [ceil(O / 16), ceil(I / 32), 64 · bits]: of 16 outputs, quads of 4 adjacent inputs each; with 4 bits the high nibbles
  are the next quad. With 5 and 6 bits (experts only), bytes follow that have the highest bits of 8 or 4 quads, lowest quad first. Scales
  and offsets: [ceil(O / 16), G, 16]; of groups of 16, G is even.

The layouts differ in the number of dimensions: 2, 4 and 3. Codes of 4 bits may be indices of a table (`TABLES`) instead of integers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.quantized.mxfp4 import E2M1_VALUES
from compile_and_serve.custom_ops.weight_functions import weight_function

TILE_OUTPUTS = 64  # outputs per tile of the Triton layout
TILE_WORDS = 32  # int16 elements per output of a tile
CPU_OUTPUTS = 16
CPU_INPUTS = 32  # inputs per block of the C++ layout
PADDED_GROUP = 32  # inputs per group where a rank's inputs of a group are not adjacent

# The number that each 4-bit code means, by the table's name; "" stands for integers.
# nf4: quantiles of the normal distribution (QLoRA, appendix E). fp4: bitsandbytes' own 4-bit float, unlike OCP's e2m1. iq4_nl: GGUF's.
TABLES: Mapping[str, tuple[float, ...]] = {
    "e2m1": E2M1_VALUES,
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "iq4_nl": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
    "fp4": tuple(sign * steps / 192 for sign in (1, -1) for steps in (0, 1, 128, 192, 64, 96, 32, 48)),
}


@weight_function("dequantize_groups")
def dequantize_groups(
    codes_OI: torch.Tensor,
    scale_OG: torch.Tensor,
    offset_OG: torch.Tensor | None,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    input_groups_I: torch.Tensor | None = None,
    table: str = "",
) -> torch.Tensor:
    """(code − zero point) · scale, or code · scale + minimum, in float32 (float64 for float64), rounded once to `dtype`. → [O, I]

    Stacked codes of experts [X, O, I] are alike.

    offset_OG: integers are zero points, floating-point numbers are minima; None: the zero point is 2^(bits − 1).
    table: a name of `TABLES`: the weight is table[code] · scale, without offsets.
    """
    if codes_OI.dim() == 3:  # one expert at a time: the products are in float32
        offsets = [None] * len(codes_OI) if offset_OG is None else offset_OG
        stacked = zip(codes_OI, scale_OG, offsets, strict=True)
        return torch.stack([dequantize_groups(*one, bits, group_size, dtype, table=table) for one in stacked])
    math_dtype = torch.promote_types(dtype, torch.float32)
    in_features = codes_OI.shape[1]

    def over_inputs(values_OG: torch.Tensor) -> torch.Tensor:
        values_OG = values_OG.to(math_dtype)
        if input_groups_I is not None:
            return values_OG[:, input_groups_I.long()]
        return values_OG.repeat_interleave(group_size, 1)[:, :in_features]

    scale = over_inputs(scale_OG)
    if table:
        values = torch.tensor(TABLES[table], dtype=math_dtype, device=codes_OI.device)
        return (values[codes_OI.to(torch.int32)] * scale).to(dtype)
    codes = codes_OI.to(math_dtype)
    if offset_OG is None:
        return ((codes - (1 << (bits - 1))) * scale).to(dtype)
    if offset_OG.is_floating_point():
        return (codes * scale + over_inputs(offset_OG)).to(dtype)
    return ((codes - over_inputs(offset_OG)) * scale).to(dtype)


def with_factors(
    scale: torch.Tensor, offset: torch.Tensor | None, factors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and offsets that need no factors. scale, offset: […, O, G]. factors: […, O, S] each. → float32 (float64 of float64)"""
    if not factors:
        return scale, offset
    groups = scale.shape[-1]

    def times(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(
            torch.promote_types(factor.dtype, torch.float32), values.dtype if values.dtype == torch.float64 else factor.dtype
        )
        return values.to(wide) * factor.to(wide).repeat_interleave(-(-groups // factor.shape[-1]), -1)[..., :groups]

    return times(scale, factors[0]), None if offset is None else -times(offset, factors[1])


@weight_function("times_factor")
def times_factor(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """values · factor of its groups. […, O, G], […, O, S] → float32 […, O, G] (float64 of float64)"""
    return with_factors(values, None, (factor,))[0]


@weight_function("minus_times_factor")
def minus_times_factor(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """−values · factor, as `times_factor`."""
    return -times_factor(values, factor)


@weight_function("iq4_nl_bytes")
def iq4_nl_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits as 8-bit integers with the zero point 128. uint8 → uint8"""
    values = torch.tensor([int(value) + 128 for value in TABLES["iq4_nl"]], dtype=torch.uint8, device=codes.device)
    return values[codes.long()]


def padded_width(in_features: int, groups: int) -> int:
    """Columns that `padded_order` needs at most."""
    return (in_features + min(groups, in_features) * (PADDED_GROUP - 1)) // PADDED_GROUP * PADDED_GROUP


@weight_function("padded_order")
def padded_order(input_groups_I: torch.Tensor, groups: int, width: int) -> torch.Tensor:
    """The inputs in the order of their groups, each group filled up to a multiple of `PADDED_GROUP` with the index I.

    input_groups_I: int [I], the group of each input, of which a rank may have any number. width: `padded_width`. → int64 [width]
    """
    in_features, device = input_groups_I.shape[0], input_groups_I.device
    input_groups_I = input_groups_I.long()
    counts_G = (input_groups_I[None] == torch.arange(groups, device=device)[:, None]).sum(1)
    padded_G = (counts_G + PADDED_GROUP - 1) // PADDED_GROUP * PADDED_GROUP
    shift_G = (padded_G.cumsum(0) - padded_G) - (counts_G.cumsum(0) - counts_G)
    order_I = torch.argsort(input_groups_I, stable=True)
    positions_I = torch.arange(in_features, device=device) + shift_G[input_groups_I[order_I]]
    return torch.full((width,), in_features, device=device).scatter(0, positions_I, order_I)


@weight_function("padded_columns")
def padded_columns(codes_OI: torch.Tensor, order_P: torch.Tensor) -> torch.Tensor:
    """Columns in a `padded_order`; of padding, zeros. [O, I] → [O, P]"""
    return F.pad(codes_OI, (0, 1))[:, order_P]


@weight_function("real_columns")
def real_columns(order_P: torch.Tensor, in_features: int) -> torch.Tensor:
    """A `padded_order` without indices past the last input."""
    return order_P.clamp_max(in_features - 1)


@weight_function("is_column")
def is_column(order_P: torch.Tensor, in_features: int) -> torch.Tensor:
    """False for the padding of a `padded_order`. → bool [P]"""
    return order_P < in_features


@weight_function("padded_scales")
def padded_scales(scale_OG: torch.Tensor, input_groups_I: torch.Tensor, order_P: torch.Tensor) -> torch.Tensor:
    """Scales or offsets of the groups of a `padded_order`. [O, G] → [O, P / PADDED_GROUP]"""
    groups = F.pad(input_groups_I.long(), (0, 1))[order_P[::PADDED_GROUP]]
    return scale_OG[:, groups]


def tile_columns(bits: int) -> int:
    """Inputs per tile of the Triton layout."""
    return TILE_WORDS * 16 // bits


def pack_codes_triton(codes_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [O, I] → int16 [ceil(O / 64), ceil(I / columns), 64, 32]"""
    out_features, in_features = codes_OI.shape
    columns = tile_columns(bits)
    tiles, blocks = -(-out_features // TILE_OUTPUTS), -(-in_features // columns)
    padded = F.pad(codes_OI, (0, blocks * columns - in_features, 0, tiles * TILE_OUTPUTS - out_features))
    parts = padded.view(tiles, TILE_OUTPUTS, blocks, 16 // bits, TILE_WORDS).to(torch.int16)
    words = parts[:, :, :, 0].clone()
    for part in range(1, 16 // bits):
        words |= parts[:, :, :, part] << (bits * part)
    return words.transpose(1, 2).contiguous()


def pack_scales_triton(scale_OG: torch.Tensor) -> torch.Tensor:
    """[O, G] → [ceil(O / 64), G, 64]"""
    return _blocked_rows(scale_OG, TILE_OUTPUTS)


def pack_codes_cpu(codes_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [O, I] → uint8 [ceil(O / 16), ceil(I / 32), 64 · bits]"""
    out_features, in_features = codes_OI.shape
    blocks, groups = -(-out_features // CPU_OUTPUTS), -(-in_features // CPU_INPUTS)
    padded = F.pad(codes_OI, (0, groups * CPU_INPUTS - in_features, 0, blocks * CPU_OUTPUTS - out_features))
    # [block, output, group, quad, input] → [block, group, quad, output, input]
    quads = padded.view(blocks, CPU_OUTPUTS, groups, CPU_INPUTS // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 8:
        return quads.reshape(blocks, groups, CPU_INPUTS * CPU_OUTPUTS)
    low = quads & 15
    packed = (low[:, :, 0::2] | (low[:, :, 1::2] << 4)).reshape(blocks, groups, CPU_INPUTS * CPU_OUTPUTS // 2)
    if bits == 4:
        return packed
    width = bits - 4
    high = (quads >> 4).unflatten(2, (-1, 8 // width))
    bytes_ = high[:, :, :, 0].clone()
    for quad in range(1, 8 // width):
        bytes_ |= high[:, :, :, quad] << (width * quad)
    return torch.cat((packed, bytes_.reshape(blocks, groups, -1)), 2)


def pack_scales_cpu(scale_OG: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """[O, G] → [ceil(O / 16), G, 16], of groups of 16 [ceil(O / 16), ceil(I / 32) · 2, 16]"""
    if group_size < CPU_INPUTS:
        scale_OG = F.pad(scale_OG, (0, -(-in_features // CPU_INPUTS) * (CPU_INPUTS // group_size) - scale_OG.shape[1]))
    return _blocked_rows(scale_OG, CPU_OUTPUTS)


def unpack_codes(packed: torch.Tensor, bits: int, out_features: int, in_features: int) -> torch.Tensor:
    """The codes of any layout. → uint8 [out_features, in_features]"""
    if packed.dim() == 2:
        return packed
    if packed.dim() == 4:
        parts = [(packed >> (bits * part)) & ((1 << bits) - 1) for part in range(16 // bits)]
        padded = torch.stack(parts, 3).to(torch.uint8).transpose(1, 2)  # [tile, output, block, part, word]
        return padded.reshape(packed.shape[0] * TILE_OUTPUTS, -1)[:out_features, :in_features]
    blocks, groups, _ = packed.shape
    if bits == 8:
        quads = packed.view(blocks, groups, CPU_INPUTS // 4, CPU_OUTPUTS, 4)
    else:
        pairs = packed[:, :, :256].view(blocks, groups, CPU_INPUTS // 8, CPU_OUTPUTS, 4)
        quads = torch.stack((pairs & 15, pairs >> 4), 3).flatten(2, 3)
        if bits > 4:
            width = bits - 4
            high = packed[:, :, 256:].view(blocks, groups, -1, CPU_OUTPUTS, 4)
            parts = [(high >> (width * quad)) & ((1 << width) - 1) for quad in range(8 // width)]
            quads = quads | (torch.stack(parts, 3).flatten(2, 3) << 4)
    padded = quads.permute(0, 3, 1, 2, 4).reshape(blocks * CPU_OUTPUTS, -1)
    return padded[:out_features, :in_features]


def unpack_scales(packed: torch.Tensor, out_features: int) -> torch.Tensor:
    """The scales or offsets of any layout. → [out_features, groups]"""
    if packed.dim() == 2:
        return packed
    return packed.transpose(1, 2).flatten(0, 1)[:out_features]


def _blocked_rows(values_OG: torch.Tensor, rows: int) -> torch.Tensor:
    """[O, G] → [ceil(O / rows), G, rows], padded with zeros."""
    out_features, groups = values_OG.shape
    blocks = -(-out_features // rows)
    padded = F.pad(values_OG, (0, 0, 0, blocks * rows - out_features))
    return padded.view(blocks, rows, groups).transpose(1, 2).contiguous()
