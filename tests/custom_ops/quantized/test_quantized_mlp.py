"""`cas::quantized_mlp` is its two quantized linears."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.quantized.quantization import (
    block_scales,
    dequantize_weight,
    quantize_weight,
    row_scales,
)
from compile_and_serve.custom_ops.quantized.quantized_linear import pack_quantized_weight, quantized_linear
from compile_and_serve.custom_ops.quantized.quantized_mlp import exact_quantized_mlp, quantized_mlp


@pytest.mark.parametrize(
    ("activations", "scales"), [("dynamic", row_scales), ("dynamic", block_scales), ("static", row_scales)]
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_op(num_tokens: int, extras: bool, activations: str, scales) -> None:
    features, inner, out = 40, 24, 36
    weights = [torch.randn(2 * inner, features), torch.randn(out, inner)]
    scale, down_scale = (scales(weight, torch.int8) for weight in weights)
    quantized = [quantize_weight(w, s, torch.int8) for w, s in zip(weights, (scale, down_scale), strict=True)]
    gate_up, down = (
        pack_quantized_weight(q, s, activations) for q, s in zip(quantized, (scale, down_scale), strict=True)
    )  # type: ignore[arg-type]
    x = torch.randn(num_tokens, features + 3).bfloat16()[:, :features]
    norm, bias, down_bias, residual = (
        (torch.randn(size).bfloat16() for size in ((features,), (2 * inner,), (out,), (num_tokens, out)))
        if extras
        else [None] * 4
    )
    input_scale, down_input_scale = (
        (torch.tensor([0.02]), torch.tensor([0.2])) if activations == "static" else (None, None)
    )
    arguments = (
        x, gate_up, scale, inner, norm, 1e-5, bias, input_scale, down, down_scale, out, down_bias, residual, down_input_scale, activations,
    )  # fmt: skip
    result = quantized_mlp(*arguments)  # type: ignore[arg-type]
    middle = quantized_linear(x, gate_up, scale, 2 * inner, norm, 1e-5, bias, True, None, activations, input_scale)  # type: ignore[arg-type]
    options = (None, 1e-5, down_bias, False, residual, activations, down_input_scale)
    assert torch.equal(result, quantized_linear(middle, down, down_scale, out, *options))  # type: ignore[arg-type]
    assert (result.shape, result.dtype) == ((num_tokens, out), torch.bfloat16)
    fake = torch.ops.cas.quantized_mlp(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments))
    assert (fake.shape, fake.dtype, fake.stride()) == (result.shape, result.dtype, result.stride())
    widened = [t.double() if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 else t for t in arguments]
    exact = exact_quantized_mlp(*widened)
    y = widened[0] if norm is None else F.rms_norm(widened[0], (features,), norm.double(), 1e-5)
    y = F.linear(y, dequantize_weight(quantized[0], scale, torch.float64), widened[6])
    y = F.linear(
        F.silu(y[:, :inner]) * y[:, inner:], dequantize_weight(quantized[1], down_scale, torch.float64), widened[11]
    )
    torch.testing.assert_close(exact, y if residual is None else y + residual.double(), rtol=1e-9, atol=1e-9)
