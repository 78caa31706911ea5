"""`gguf`: blocks of a .gguf file, whose config the loader derives from its tensors. Embeddings are quantized, too, and experts.

Blocks are decoded to codes, scales and offsets per group of inputs, exactly.

Shape legend: O rows (out features), B bytes of a row, I columns (in features), G groups of 32 columns (Q6_K: 16).

ggml's ggml-common.h and ggml-quants.c define the blocks. The scales of K kinds are products of two stored numbers, which float32 holds
exactly: small integers, and factors of a whole block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.stored_weight import GroupedParts, QuantizedWeight, StoredTensor, random_bits
from compile_and_serve.custom_ops.weight_functions import Expression, Text, weight_function
from compile_and_serve.models.quantization.checkpoint_format import register_checkpoint_format
from compile_and_serve.models.quantization.expert_stacks import matrices_of
from compile_and_serve.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFormat:
    """A kind of block. bits: of the codes. Without offsets, the zero point is 2^(bits − 1), or codes are of a table.

    codes, scale, offset, scale_factor, offset_factor: bytes of blocks, uint8 [O, blocks, block_bytes] → [O, I], [O, G] or [O, blocks].
    The fields are as in `GroupedParts`.
    """

    block_inputs: int
    block_bytes: int
    bits: int
    codes: Callable[[torch.Tensor], torch.Tensor]
    scale: Callable[[torch.Tensor], torch.Tensor]
    offset: Callable[[torch.Tensor], torch.Tensor] | None = None
    scale_factor: Callable[[torch.Tensor], torch.Tensor] | None = None
    offset_factor: Callable[[torch.Tensor], torch.Tensor] | None = None
    group_size: int = 32
    table: str = ""

    def blocks(self, rows_OB: torch.Tensor) -> torch.Tensor:
        """The rows' bytes, one block after the other."""
        return rows_OB.unflatten(1, (-1, self.block_bytes))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block. → [O, blocks]"""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low nibbles, then high nibbles. [O, blocks, N] → [O, blocks, 2 · N]"""
    return torch.cat((packed & 15, packed >> 4), 2)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """16 where a bit of the 32 at a byte is set. → [O, blocks, 32]"""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, :, at : at + 4, None] >> shifts) & 1).flatten(2) << 4


def _q5(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return _nibbles(blocks[:, :, at + 4 :]) | _fifth_bits(blocks, at)


def _k_scale(blocks: torch.Tensor) -> torch.Tensor:
    """The eight 6-bit scales of a Q4_K or Q5_K block. → uint8 [O, blocks · 8]"""
    packed = blocks[:, :, 4:16]
    first, third = packed[:, :, 0:4], packed[:, :, 8:12]
    return torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 2).flatten(1)


def _k_minimum(blocks: torch.Tensor) -> torch.Tensor:
    """The eight 6-bit minima, which are subtracted."""
    packed = blocks[:, :, 4:16]
    second, third = packed[:, :, 4:8], packed[:, :, 8:12]
    return torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 2).flatten(1)


def _q4_k(blocks: torch.Tensor, at: int = 16) -> torch.Tensor:
    """32 bytes hold 64 codes: low nibbles, then high nibbles."""
    packed = blocks[:, :, at : at + 128].unflatten(2, (4, 32))
    return torch.stack((packed & 15, packed >> 4), 3).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (((blocks[:, :, None, 16:48] >> shifts[:, None]) & 1) << 4).flatten(1)
    return _q4_k(blocks, 48) | fifth


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :, 0:128].unflatten(2, (2, 1, 2, 32))  # [half, –, 32 or 64, l]
    low = torch.cat((low & 15, low >> 4), 3).flatten(2)  # four runs of 32 per half
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, :, 128:192].unflatten(2, (2, 1, 32)) >> shifts[:, None]) & 3) << 4
    return (low | high.flatten(2)).flatten(1)


def _q6_k_scale(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)


def _scale_first(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0)


def _minimum_second(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 2)


def _k_format(*, block_bytes: int, bits: int, codes: Callable[[torch.Tensor], torch.Tensor]) -> GgufFormat:
    return GgufFormat(
        block_inputs=256,
        block_bytes=block_bytes,
        bits=bits,
        codes=codes,
        scale=_k_scale,
        offset=_k_minimum,
        scale_factor=_scale_first,
        offset_factor=_minimum_second,
    )


GGUF_FORMATS: Mapping[str, GgufFormat] = {
    "Q4_0": GgufFormat(block_inputs=32, block_bytes=18, bits=4, codes=lambda b: _nibbles(b[:, :, 2:]).flatten(1), scale=_scale_first),
    "Q4_1": GgufFormat(
        block_inputs=32,
        block_bytes=20,
        bits=4,
        codes=lambda b: _nibbles(b[:, :, 4:]).flatten(1),
        scale=_scale_first,
        offset=_minimum_second,
    ),
    "Q5_0": GgufFormat(block_inputs=32, block_bytes=22, bits=5, codes=lambda b: _q5(b, 2).flatten(1), scale=_scale_first),
    "Q5_1": GgufFormat(
        block_inputs=32, block_bytes=24, bits=5, codes=lambda b: _q5(b, 4).flatten(1), scale=_scale_first, offset=_minimum_second
    ),
    "Q8_0": GgufFormat(block_inputs=32, block_bytes=34, bits=8, codes=lambda b: b[:, :, 2:].flatten(1) ^ 128, scale=_scale_first),
    "Q4_K": _k_format(block_bytes=144, bits=4, codes=_q4_k),
    "Q5_K": _k_format(block_bytes=176, bits=5, codes=_q5_k),
    "Q6_K": GgufFormat(
        block_inputs=256, block_bytes=210, bits=6, codes=_q6_k, scale=_q6_k_scale, scale_factor=lambda b: _half(b, 208), group_size=16
    ),
    "IQ4_NL": GgufFormat(
        block_inputs=32, block_bytes=18, bits=4, codes=lambda b: _nibbles(b[:, :, 2:]).flatten(1), scale=_scale_first, table="iq4_nl"
    ),
}


@register_checkpoint_format("gguf", may_be_requantized=True)
def read(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Parameter name → its blocks, for the linears, embeddings and experts of a .gguf file.

    `tensors` of the config: name → kind; all experts of a layer have one entry, with `{expert}` in place of the number.
    """
    kinds: Mapping[str, str] = config.get("tensors") or {}
    owners = [child for child in spec.module.modules() if isinstance(child, nn.Linear | nn.Embedding)]
    parameters = {id(owner.weight) for owner in owners}
    found: dict[str, QuantizedWeight] = {}
    for name, parameter in spec.module.named_parameters():
        if id(parameter) in parameters and _has_whole_blocks(kinds.get(name), parameter):
            found[name] = _weight(name, parameter, kinds[name])
    return found | _experts(kinds, spec)


def _experts(kinds: Mapping[str, str], spec: ModelSpec) -> dict[str, QuantizedWeight]:
    """Name of an expert's matrix → its blocks. Where gate and up are of different kinds, both are dequantized."""
    matrices = matrices_of(spec)
    stacks: dict[str, dict[str, str | None]] = {}  # stacked parameter → matrix → kind
    for name, part in spec.parts.items():
        of_all = ".{expert}.".join(name.rsplit(f".{part.index}.", 1))
        stacks.setdefault(part.parameter, {})[name] = kinds.get(of_all)
    found: dict[str, QuantizedWeight] = {}
    for names in stacks.values():
        (kind, *others) = set(names.values())
        linears = {name: linear for name in names if (linear := matrices.get(name.removesuffix(".weight"))) is not None}
        if kind is None or others or len(linears) < len(names):
            continue
        if all(_has_whole_blocks(kind, linear.weight) for linear in linears.values()):
            found |= {name: _weight(name, linear.weight, kind) for name, linear in linears.items()}
    return found


def _has_whole_blocks(kind: str | None, weight_OI: torch.Tensor) -> bool:
    return kind is not None and weight_OI.shape[1] % GGUF_FORMATS[kind].block_inputs == 0


def _weight(name: str, weight_OI: torch.Tensor, kind_name: str) -> QuantizedWeight:
    form = GGUF_FORMATS[kind_name]

    def part(field: str) -> Expression:
        return None if getattr(form, field) is None else ("gguf_part", name, Text(kind_name), Text(field))

    parts = GroupedParts(
        bits=form.bits,
        group_size=form.group_size,
        codes=part("codes"),
        scale=part("scale"),
        offset=part("offset"),
        scale_factor=part("scale_factor"),
        offset_factor=part("offset_factor"),
        table=form.table,
    )
    out_features, in_features = weight_OI.shape
    num_bytes = in_features // form.block_inputs * form.block_bytes
    # The blocks have float16 scales among their bytes, which stay finite and small.
    blocks = StoredTensor(name=name, shape=(out_features, num_bytes), dtype=torch.uint8, fill=random_bits(0x30))
    return QuantizedWeight(parts=parts, tensors=(blocks,))


@weight_function("gguf_part")
def _part(rows_OB: torch.Tensor, kind: str, part: str) -> torch.Tensor:
    """A field of `GgufFormat` of blocks."""
    form = GGUF_FORMATS[kind]
    decoded: torch.Tensor = getattr(form, part)(form.blocks(rows_OB))
    return decoded.contiguous()
