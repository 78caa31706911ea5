"""Tensors of GGUF files under Hugging Face's names: renamed, split, joined, and with rows in Hugging Face's order.

Where only the order of rows changes, a function works on quantized blocks, too.

Shape legend: O rows (out features), I columns (in features), X experts, H heads, N and V sizes of a head's key and value, C of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.gguf_architectures import GLOBAL_NAMES, LAYER_NAMES, Architecture
from compile_and_serve.runtime.weights.gguf_file import GgufFile, TensorInfo, is_integer, short

EXPERT = "{expert}"  # in a name: the number of one of stacked matrices
_MXFP4_BYTES = 17  # of a block: the scale's exponent, then 16 bytes with two codes each


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Numbers of heads, of the file's metadata."""

    query: int
    key: int


def heads_of(file: GgufFile) -> Heads:
    """Raises `WeightError` if the file has no such numbers."""
    prefix = f"{file.metadata.get('general.architecture')}.attention.head_count"
    query = file.metadata.get(prefix, 1)
    key = file.metadata.get(f"{prefix}_kv", query)
    for name, value in ((prefix, query), (f"{prefix}_kv", key)):
        if not is_integer(value):
            raise WeightError(f"{file.path} sets {name} to {short(value)}: expected one number for all layers.")
    return Heads(query=query, key=key)


def names_of(name: str, row: Architecture) -> tuple[str, ...]:
    """Hugging Face's names of what a tensor holds: several of fused ones; with `{expert}` of stacked ones. An unknown name is unchanged."""
    stem, _, leaf = name.rpartition(".")
    common, prefix = {**GLOBAL_NAMES, **row.global_names}, ""
    if stem.startswith("blk."):
        block, _, stem = stem.removeprefix("blk.").partition(".")
        common, prefix = {**LAYER_NAMES, **row.names}, f"{row.layers}.{block}."
    if f"{stem}.{leaf}" in common:
        return (prefix + common[f"{stem}.{leaf}"],)
    if stem not in common:
        return (name,)
    return tuple(f"{prefix}{module}.{leaf}" for module in common[stem].split("|"))


def part_of(name: str) -> str:
    """The part of a layer that a tensor is: "attn_q" for "blk.0.attn_q.weight"."""
    stem = name.rpartition(".")[0]
    return stem.partition(".")[2].partition(".")[2] if stem.startswith("blk.") else stem


def raw_bytes(info: TensorInfo, first: int = 0, count: int = 1, of: int = 1) -> np.ndarray:
    """Bytes of `count` of `of` equal parts, from the part `first` on."""
    size = info.num_bytes // of
    return np.fromfile(info.path, dtype=np.uint8, count=count * size, offset=info.offset + first * size)


def dequantized(info: TensorInfo, first: int = 0, count: int = 1, of: int = 1) -> np.ndarray:
    """As `raw_bytes`, as float32 [rows of that part, columns]. Raises `WeightError` for a kind that the package gguf does not know."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = raw_bytes(info, first, count, of)
    kind = GGMLQuantizationType(info.kind)
    shape = info.shape if of == 1 else (info.shape[0] * count // of, *info.shape[1:])
    try:
        values = dequantize(raw.reshape(*shape[:-1], -1) if raw.size else raw, kind)
    except NotImplementedError:
        raise WeightError(
            f"{info.path} stores {info.name} as {kind.name}, which the package gguf cannot dequantize: use another format."
        ) from None
    return values.astype(np.float32, copy=False).reshape(shape)


def unpermute(w_OI: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head of E rows from interleaved rotary pairs (0, 1), (2, 3) … to halves (0, E/2), (1, E/2 + 1) …

    w_OI: a weight, or a bias [O].
    """
    return w_OI.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def groups_of_heads(w_OI: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Queries, keys, values → groups of query heads, each with its key and its value head (Falcon)."""
    size = len(w_OI) // (heads.query + 2 * heads.key)
    parts = w_OI.split([heads.query * size, heads.key * size, heads.key * size])
    return torch.cat([part.unflatten(0, (heads.key, -1)) for part in parts], 1).flatten(0, 1).contiguous()


# Functions of one tensor. Those that do more than to reorder rows work on dequantized ones only.
CHANGES: Mapping[str, Callable[[torch.Tensor, Heads], torch.Tensor]] = {
    "halves_of_query_heads": lambda tensor, heads: unpermute(tensor, heads.query),
    "halves_of_key_heads": lambda tensor, heads: unpermute(tensor, heads.key),
    "groups_of_heads": groups_of_heads,
    "less_one": lambda tensor, heads: tensor - 1.0,  # of norms that multiply by 1 + weight
    "one_row": lambda tensor, heads: tensor.reshape(1, -1),
}
# Heads by whose number the rows of a tensor must be divisible, twice: rotary pairs.
PAIRED_HEADS: Mapping[str, Callable[[Heads], int]] = {
    "halves_of_query_heads": lambda heads: heads.query,
    "halves_of_key_heads": lambda heads: heads.key,
}


def keys_and_values(k_HCN: torch.Tensor, v_HVC: torch.Tensor) -> torch.Tensor:
    """DeepSeek's two matrices of a head, as absorbed products take them, as one. → [H · (N + V), C]"""
    return torch.cat((k_HCN.transpose(1, 2), v_HVC), 1).flatten(0, 1).contiguous()


def _alternating(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rows of gate and up in turn. [X, O, …] each → [X, O · parts, …]"""
    return torch.stack(parts, 2).flatten(1, 2)


def _mxfp4_blocks(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[X, O, bytes] each → [X, O · parts, blocks, 17]"""
    return _alternating(parts).unflatten(-1, (-1, _MXFP4_BYTES))


def alternating_mxfp4_codes(*parts: torch.Tensor) -> torch.Tensor:
    """ggml's low nibbles are the first half of a block, Hugging Face's the even inputs. → uint8 [X, O · parts, blocks, 16]"""
    packed = _mxfp4_blocks(parts)[..., 1:]
    codes = torch.cat((packed & 15, packed >> 4), -1)
    return (codes[..., ::2] | (codes[..., 1::2] << 4)).contiguous()


# Functions of several tensors. Those of MXFP4 take blocks, the others dequantized tensors.
JOINS: Mapping[str, Callable[..., torch.Tensor]] = {
    "keys_and_values": keys_and_values,
    "alternating_rows": lambda *parts: _alternating(parts).contiguous(),
    "alternating_columns": lambda *parts: _alternating(parts).transpose(1, 2).contiguous(),
    "alternating_mxfp4_codes": alternating_mxfp4_codes,
    "alternating_mxfp4_scales": lambda *parts: _mxfp4_blocks(parts)[..., 0].contiguous(),
}
OF_BLOCKS = ("alternating_mxfp4_codes", "alternating_mxfp4_scales")


def joined_shape(function: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Of the result of a function of `JOINS`."""
    first: Any = shapes[0]
    if function == "keys_and_values":
        return (first[0] * (first[2] + shapes[1][1]), first[1])
    rows = sum(shape[1] for shape in shapes)
    return {
        "alternating_rows": (first[0], rows, *first[2:]),
        "alternating_columns": (first[0], first[-1], rows),
        "alternating_mxfp4_codes": (first[0], rows, first[-1] // 32, 16),
        "alternating_mxfp4_scales": (first[0], rows, first[-1] // 32),
    }[function]
