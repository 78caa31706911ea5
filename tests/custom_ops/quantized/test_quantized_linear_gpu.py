# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""Linears over 8-bit weights on a GPU, with each kernel, against the op's torch reference in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.quantization import block_scales, quantize_activations, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized import cuda_linear as quantized_linear_cuda
from compile_and_serve.custom_ops.quantized.cuda_linear import QuantizedLinear
from compile_and_serve.custom_ops.quantized.quantized_linear import quantized_linear
from tests.support.numbers import relative_error

CUDA = torch.device("cuda")
KINDS = [("none", row_scales), ("dynamic", row_scales), ("static", row_scales), ("none", block_scales), ("dynamic", block_scales)]


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops use the first kernel. (Choosing has its own tests.)"""
    monkeypatch.setattr(quantized_linear_cuda, "fastest_kernel", lambda problem, runs, *_, **__: next(iter(runs)))


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 33, 64, 100, 300])
@pytest.mark.parametrize(
    ("out", "inner", "silu_mul"), [(576, 576, False), (3072, 576, True), (130, 1536, False), (4096, 4096, False), (37, 72, False)]
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(("activations", "scales"), KINDS)
@pytest.mark.parametrize("weight_dtype", [torch.float8_e4m3fn, torch.int8])
def test_like_the_reference(weight_dtype, scales, activations, extras, out, inner, silu_mul, num_tokens) -> None:
    rows = out // 2 if silu_mul else out
    weight = torch.randn(out, inner, device=CUDA) * inner**-0.5
    scale = scales(weight, weight_dtype)
    x, *others = (torch.randn(size, device=CUDA).bfloat16() for size in [(num_tokens, inner + 8), inner, out, (num_tokens, rows)])
    norm, bias, residual = others if extras else (None,) * 3
    input_scale = torch.tensor([0.03], device=CUDA) if activations == "static" else None
    arguments = (
        x[:, :inner], quantize_weight(weight, scale, weight_dtype), scale, out, norm, 1e-5, bias, silu_mul, residual,
        activations, input_scale,
    )  # fmt: skip
    result = quantized_linear(*arguments)
    expected = torch.ops.cas.quantized_linear_reference(*arguments)
    # Where the norm's sum is added up in another order, the largest value may come out as the next bfloat16, and all others then round to
    # 8 bits on another scale: as far off as rounding is.
    tolerance = 3e-2 if extras and activations == "dynamic" else 1e-2
    assert relative_error(result, expected) < tolerance
    linear = QuantizedLinear(
        x_TI=x[:, :inner],
        weight_OI=arguments[1],
        scale=scale,
        norm_weight_I=norm,
        eps=1e-5,
        bias_O=bias,
        silu_mul=silu_mul,
        residual_TO=residual,
        activations=activations,
        input_scale=input_scale,
    )
    quantized_input = linear if activations == "none" else replace(linear, quantized=linear.operand())
    for kernel in linear.kernels():
        y = linear.run(kernel)
        assert relative_error(y, expected) < tolerance, kernel
        assert relative_error(quantized_input.run(kernel), y) < 1e-3, kernel


@pytest.mark.parametrize("num_tokens", [1, 33, 300])
@pytest.mark.parametrize("scales", [row_scales, block_scales])
@pytest.mark.parametrize("padding", [8, 3])  # rows of the residual begin at multiples of 16 bytes, or between
def test_a_residual_alone(padding, scales, num_tokens) -> None:
    """CUTLASS' products add it by themselves."""
    out, inner = 1088, 512
    weight = torch.randn(out, inner, device=CUDA) * inner**-0.5
    scale = scales(weight, torch.float8_e4m3fn)
    linear = QuantizedLinear(
        x_TI=torch.randn(num_tokens, inner, device=CUDA).bfloat16(),
        weight_OI=quantize_weight(weight, scale, torch.float8_e4m3fn),
        scale=scale,
        residual_TO=torch.randn(num_tokens, out + padding, device=CUDA).bfloat16()[:, :out],
        activations="dynamic",
    )
    expected = torch.ops.cas.quantized_linear_reference(
        linear.x_TI, linear.weight_OI, scale, out, residual=linear.residual_TO, activations="dynamic"
    )
    for kernel in linear.kernels():
        assert relative_error(linear.run(kernel), expected) < 1e-2, kernel


@pytest.mark.parametrize("activations", ["none", "dynamic"])
@pytest.mark.parametrize("weight_dtype", [torch.float8_e4m3fn, torch.int8])
def test_silu_mul_of_a_long_prompt(weight_dtype, activations) -> None:
    """In two chunks."""
    features, inner, num_tokens = 576, 1536, 2048 + 300
    weight = torch.randn(2 * inner, features, device=CUDA) * features**-0.5
    scale = row_scales(weight, weight_dtype)
    x, norm = torch.randn(num_tokens, features, device=CUDA).bfloat16(), torch.randn(features, device=CUDA).bfloat16()
    arguments = (x, quantize_weight(weight, scale, weight_dtype), scale, 2 * inner, norm, 1e-5, None, True, None)
    expected = torch.ops.cas.quantized_linear_reference(*arguments, activations)
    assert relative_error(quantized_linear(*arguments, activations), expected) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    """To the bit: with a largest value of 3.5 many values lie right between two of 8 bits, and the scale's last bit decides."""
    x = torch.randn(300, 640).bfloat16().clamp(-3.5, 3.5)
    x[::3, ::128] = 3.5
    for scale in (row_scales, block_scales):
        assert torch.equal(scale(x.to(CUDA), dtype).cpu(), scale(x, dtype))
    for per_group in (False, True):
        on_gpu, on_cpu = (quantize_activations(y, dtype, per_group=per_group) for y in (x.to(CUDA), x))
        assert all(torch.equal(a.cpu().float(), b.float()) for a, b in zip(on_gpu, on_cpu, strict=True))
