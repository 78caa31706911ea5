"""`cas::quantized_linear`'s torch reference against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.quantization import block_scales, dequantize_weight, quantize_activations, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.quantized_linear import pack_quantized_weight, quantized_linear
from tests.support.numbers import relative_error

DTYPES = [torch.float8_e4m3fn, torch.int8]
# Rounding of the output, 2^-8 at most, and float32 sums; the quantized activations are the reference's own.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
KINDS = [("none", row_scales), ("dynamic", row_scales), ("static", row_scales), ("none", block_scales), ("dynamic", block_scales)]


def reference(
    x, weight, scale, activations, input_scale, norm_weight=None, eps=1e-6, bias=None, silu_mul=False, residual=None
) -> torch.Tensor:
    """In float64 over the dequantized weight; activations are quantized first, as the op does."""
    if norm_weight is not None:
        normed = F.rms_norm(x.double(), (x.shape[1],), norm_weight.double(), eps)
        x = F.rms_norm(x, (x.shape[1],), norm_weight, eps)
        assert relative_error(x, normed) < 5e-3
    if activations != "none":
        x, x_scale = quantize_activations(x, weight.dtype, per_group=scale.dim() == 2, input_scale=input_scale)
        x = x.double() * (x_scale.double().repeat_interleave(128, 1)[:, : x.shape[1]] if scale.dim() == 2 else x_scale)
    y = F.linear(x.double(), dequantize_weight(weight, scale, torch.float64), None if bias is None else bias.double())
    if silu_mul:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("activations", "scales"), KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(40, 33), (260, 300), (6, 7)])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_op(num_tokens, out_features, in_features, scales, activations, dtype, weight_dtype) -> None:
    weight = torch.randn(out_features, in_features)
    scale = scales(weight, weight_dtype)
    quantized = quantize_weight(weight, scale, weight_dtype)
    packed = pack_quantized_weight(quantized, scale)
    input_scale = torch.tensor([0.02]) if activations == "static" else None
    x = torch.randn(num_tokens, in_features + 3, dtype=dtype)[:, :in_features]
    for use in (0, 7, 9, 15):
        silu_mul = bool(use & 8)
        columns = out_features // 2 if silu_mul else out_features
        options = {
            "norm_weight": torch.randn(in_features, dtype=dtype) if use & 1 else None,
            "bias": torch.randn(out_features, dtype=dtype) if use & 2 else None,
            "residual": torch.randn(num_tokens, columns + 5, dtype=dtype)[:, :columns] if use & 4 else None,
        }
        y = quantized_linear(
            x, packed, scale, out_features, options["norm_weight"], 1e-5, options["bias"], silu_mul, options["residual"],
            activations, input_scale,
        )  # fmt: skip
        assert y.shape == (num_tokens, columns)
        assert y.dtype == dtype
        if num_tokens:
            expected = reference(x, quantized, scale, activations, input_scale, eps=1e-5, silu_mul=silu_mul, **options)
            assert relative_error(y, expected) < TOLERANCE[dtype], options


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(("activations", "scales"), [kind for kind in KINDS if kind[0] != "none"])
def test_x_may_be_quantized_already(scales, activations, weight_dtype) -> None:
    """The same result, and x itself is not read for it."""
    weight, x, norm = torch.randn(40, 300), torch.randn(9, 300).bfloat16(), torch.randn(300).bfloat16()
    scale = scales(weight, weight_dtype)
    packed = pack_quantized_weight(quantize_weight(weight, scale, weight_dtype), scale)
    input_scale = torch.tensor([0.02]) if activations == "static" else None
    normed = F.rms_norm(x, (300,), norm, 1e-5)
    quantized = quantize_activations(normed, weight_dtype, per_group=scale.dim() == 2, input_scale=input_scale)
    options = (packed, scale, 40, norm, 1e-5, None, False, None, activations, input_scale)
    expected = torch.ops.cas.quantized_linear_reference(x, *options)
    assert torch.equal(quantized_linear(torch.zeros_like(x), *options, quantized=quantized), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": torch.zeros(8, 8)}, "float8_e4m3fn and int8 weights"),
        ({"activations": "some"}, "one of none, dynamic, static"),
        ({"activations": "static"}, "needs an input_scale"),
        ({"input_scale": torch.ones(1)}, "needs an input_scale"),
        ({"activations": "static", "input_scale": torch.ones(1), "scale": torch.ones(1, 1)}, "no static activations"),
        ({"quantized": (torch.zeros(1, 8).to(torch.int8), torch.ones(1, 1))}, "where it would quantize them"),
        ({"activations": "dynamic", "quantized": (torch.zeros(1, 8), torch.ones(1, 1))}, "in the weight's dtype"),
        ({"activations": "dynamic", "quantized": (torch.zeros(1, 8), None)}, "and their scales together"),
    ],
)
def test_wrong_arguments_say_what_was_expected(change, message: str) -> None:
    arguments = {"x_TI": torch.zeros(2, 8), "packed": torch.zeros(8, 8, dtype=torch.int8), "scale": torch.ones(8), "out_features": 8}
    with pytest.raises(ValueError, match=message):
        quantized_linear(**(arguments | change))
