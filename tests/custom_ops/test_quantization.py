"""Quantization in plain torch: bounds of its error, exact round trips, odd sizes."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.quantization import (
    LARGEST,
    block_scales,
    dequantize_weight,
    expand_scale,
    quantize_activations,
    quantize_weight,
    row_scales,
)

DTYPES = [torch.float8_e4m3fn, torch.int8]
# Half a step of the largest value: a float8 value has 4 significant bits; int8 has 127 steps up to the largest.
WORST = {torch.float8_e4m3fn: 2**-4, torch.int8: 0.5 / 127}


def largest_error(exact: torch.Tensor, rounded: torch.Tensor, largest: torch.Tensor) -> float:
    return ((exact.double() - rounded.double()).abs() / largest.double()).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 7), (128, 128), (130, 257), (1, 1000)])
@pytest.mark.parametrize("scales", [row_scales, block_scales])
def test_weights(scales, shape: tuple[int, int], source: torch.dtype, dtype: torch.dtype) -> None:
    weight = torch.randn(shape, dtype=source) * torch.logspace(-3, 3, shape[0])[:, None].to(source)
    scale = scales(weight, dtype)
    assert scale.dtype == torch.float32
    quantized = quantize_weight(weight, scale, dtype)
    assert quantized.dtype == dtype
    largest = expand_scale(scale, shape) * LARGEST[dtype]
    back = dequantize_weight(quantized, scale, torch.float32)
    assert largest_error(weight, back, largest) <= WORST[dtype] * (1 + 1e-4)
    # What is representable stays as it is: the largest of a row gives the same scale again.
    again = scales(back, dtype)
    torch.testing.assert_close(again, scale, rtol=1e-6, atol=0)
    assert torch.equal(quantize_weight(back.double(), scale, dtype).float(), quantized.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_and_block_has_its_own_scale(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 200)
    assert torch.equal(row_scales(weight, dtype)[7], weight[7].abs().max() / LARGEST[dtype])
    scale = block_scales(weight, dtype)
    assert scale.shape == (3, 2)
    assert torch.equal(scale[2, 1], weight[256:, 128:].abs().max() / LARGEST[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("features", [1, 128, 300])
def test_activations(features: int, per_group: bool, source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.randn(9, features, dtype=source)
    x[4] = 0
    quantized, scale = quantize_activations(x, dtype, per_group=per_group)
    assert scale.shape == ((9, -(-features // 128)) if per_group else (9, 1))
    spread = scale.repeat_interleave(128, 1)[:, :features] if per_group else scale
    assert largest_error(x, quantized.float() * spread, spread * LARGEST[dtype]) <= WORST[dtype] * (1 + 1e-4)
    assert torch.equal(quantized[4].float(), torch.zeros(features))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_static_scale_saturates(dtype: torch.dtype) -> None:
    quantized, scale = quantize_activations(torch.tensor([[-1e6, 0.5, 3e4]]), dtype, input_scale=torch.tensor([0.5]))
    assert quantized.float().tolist() == [[-LARGEST[dtype], 1.0, LARGEST[dtype]]]
    assert scale.tolist() == [[0.5]]
