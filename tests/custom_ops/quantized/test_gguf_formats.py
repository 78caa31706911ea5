"""Codes, scales and offsets of GGUF blocks, against the package gguf's dequantization of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from compile_and_serve.custom_ops.quantized.group_layout import dequantize_groups, with_factors
from compile_and_serve.models.quantization.gguf import GGUF_FORMATS

HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
          "IQ4_NL": (0,)}  # fmt: skip


def random_rows(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks whose scales are finite. → uint8 [rows, bytes]"""
    rng = np.random.default_rng(seed)
    form = GGUF_FORMATS[kind]
    blocks = rng.integers(0, 256, (rows, columns // form.block_inputs, form.block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[:, :, None].view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_dequantized_weights_equal_the_reference(kind: str) -> None:
    rows = random_rows(kind, 5, 768)
    form = GGUF_FORMATS[kind]
    blocks = form.blocks(torch.from_numpy(rows))
    codes = form.codes(blocks)
    assert codes.dtype == torch.uint8
    assert codes.shape == (5, 768)
    assert int(codes.max()) < 1 << form.bits
    offset = None if form.offset is None else form.offset(blocks)
    factors = tuple(one(blocks) for one in (form.scale_factor, form.offset_factor) if one is not None)
    scale, offset = with_factors(form.scale(blocks), offset, factors)
    out = dequantize_groups(codes, scale, offset, form.bits, form.group_size, torch.float32, table=form.table)
    expected = torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))
    assert torch.equal(out, expected)
