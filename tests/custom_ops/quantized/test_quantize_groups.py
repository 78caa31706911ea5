"""Quantizing weights in groups: the error of a code, odd widths, and that it is done once only."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.quantized.group_layout import dequantize_groups
from compile_and_serve.custom_ops.quantized.quantize_groups import group_minima, group_scales, quantize_groups


def quantized(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = group_scales(weight, bits, size)
    offset = group_minima(weight, bits, size)
    return quantize_groups(weight, scale, offset, bits, size), scale, offset


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(7, 64), (3, 100), (2, 5, 96)])
def test_no_weight_is_further_than_half_a_code_from_its_value(bits: int, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, dtype=torch.float64) + torch.randn(shape[-2], 1)
    codes, scale, offset = quantized(weight, bits, 32)
    groups = -(-shape[-1] // 32)
    assert codes.shape == shape
    assert scale.shape == offset.shape == (*shape[:-1], groups)
    made = dequantize_groups(codes, scale, offset, bits, 32, torch.float64)
    steps = (made - weight).abs() / scale.double().repeat_interleave(32, -1)[..., : shape[-1]]
    assert steps.max() < 0.53  # float16 is rounded
    assert steps.mean() < 0.3


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_again_changes_nothing(bits: int) -> None:
    """With 8 bits after 4, too: the verifier compares the head with weights of 4 bits."""
    weight = torch.randn(500, 64, dtype=torch.float64) * torch.logspace(-4, 2, 500)[:, None]
    once = dequantize_groups(*quantized(weight, 4, 32), 4, 32, torch.float64)
    twice = dequantize_groups(*quantized(once, bits, 32), bits, 32, torch.float64)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_equal_weights_stay_equal() -> None:
    weight = torch.tensor([0.0, 0.5, -0.25])[:, None].expand(3, 50)
    made = dequantize_groups(*quantized(weight, 4, 32), 4, 32, torch.float32)
    assert torch.equal(made, weight)
