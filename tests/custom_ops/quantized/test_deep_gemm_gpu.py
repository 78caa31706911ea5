# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""DeepGEMM's float8 products on a GPU, every configuration against the reference."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.quantization import block_scales, dequantize_weight, quantize_activations, quantize_weight
from compile_and_serve.custom_ops.quantized import scaled_gemm
from compile_and_serve.custom_ops.quantized.cuda_linear import QuantizedLinear
from compile_and_serve.custom_ops.quantized.deep_gemm import DEEP, deep_gemm_library, run_deep_gemm
from compile_and_serve.custom_ops.quantized.quantized_linear import quantized_linear_reference
from compile_and_serve.custom_ops.triton_quantize import quantize_rows
from tests.support.cuda import CUDA, LIMIT
from tests.support.numbers import relative_error

FP8 = torch.float8_e4m3fn


@functools.cache
def library() -> ctypes.CDLL:
    """Built at its first use here, which takes 10 to 20 seconds."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    try:
        return ctypes.CDLL(str(deep_gemm_library(torch.cuda.get_device_properties(CUDA).multi_processor_count).build()))
    except BuildError as error:
        pytest.skip(str(error))


def weight_of(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(outputs, inputs, device=CUDA) * inputs**-0.5
    weight *= torch.rand(outputs, 1, device=CUDA) + 0.5  # so that blocks have different scales
    scale = block_scales(weight, FP8)
    return quantize_weight(weight, scale, FP8), scale


# Few tokens, sizes between multiples of the tiles, one column of tiles, an odd number of tiles for clusters of two, and many tiles.
@pytest.mark.parametrize("config", DEEP)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 1024, 512), (77, 4096, 1088), (300, 1040, 72), (257, 18432, 328), (3001, 2048, 6144)]
)
def test_every_configuration(config: str, tokens: int, inputs: int, outputs: int) -> None:
    weight, scale = weight_of(outputs, inputs)
    x = torch.randn(tokens, inputs, device=CUDA) * (torch.rand(tokens, 1, device=CUDA) + 0.5)
    a, a_scale = quantize_activations(x, FP8, per_group=True)
    expected = (a.double() * a_scale.double().repeat_interleave(128, 1)[:, :inputs]) @ dequantize_weight(weight, scale, torch.float64).T
    y = run_deep_gemm(library(), config, a, weight, a_scale, scale)
    assert relative_error(y, expected) < 4e-3
    worst = (y.double() - expected).norm(dim=1) / expected.norm(dim=1)  # a wrong tile must not hide among many
    assert worst.max() < 1e-2


@pytest.mark.parametrize("config", DEEP)
def test_it_is_captured_and_replayed(config: str) -> None:
    weight, scale = weight_of(1024, 2048)
    x = torch.randn(200, 2048, device=CUDA).bfloat16()

    def run() -> torch.Tensor:
        a, a_scale = quantize_rows(x, FP8, per_group=True, group_major=True)
        return run_deep_gemm(library(), config, a, weight, a_scale, scale)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    x.copy_(torch.randn(200, 2048, device=CUDA))
    graph.replay()
    assert torch.equal(y, run())


@pytest.mark.parametrize("num_tokens", [300, 2500])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_it_is_a_kernel_of_the_linear(silu_mul: bool, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a norm before it, and SiLU-mul or a residual behind it."""
    built = library()
    monkeypatch.setattr(scaled_gemm, "load_deep_gemms", lambda device: built)
    out, inner = 1536, 2064
    weight, scale = weight_of(out, inner)
    stored = out // 2 if silu_mul else out
    linear = QuantizedLinear(
        x_TI=torch.randn(num_tokens, inner, device=CUDA).bfloat16(),
        weight_OI=weight,
        scale=scale,
        norm_weight_I=torch.rand(inner, device=CUDA).bfloat16() + 0.5,
        silu_mul=silu_mul,
        residual_TO=None if silu_mul else torch.randn(num_tokens, stored, device=CUDA).bfloat16(),
        activations="dynamic",
    )
    expected = quantized_linear_reference(
        linear.x_TI, weight, scale, out, linear.norm_weight_I, silu_mul=silu_mul, residual_TO=linear.residual_TO, activations="dynamic"
    )
    assert set(DEEP) <= set(linear.kernels())
    for kernel in DEEP:
        assert relative_error(linear.run(kernel), expected) < LIMIT, kernel
