# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""CUTLASS' float8 GEMMs on a GPU, every configuration against the reference."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.quantization import block_scales, quantize_activations, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.cutlass_gemm import BLOCKS, ROWS, gemm_library, run_gemm, scaled_gemm_reference
from tests.support.cuda import random


@pytest.mark.parametrize("config", [*ROWS, *BLOCKS])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1024, 512), (77, 4096, 1088), (300, 2048, 4096)])
def test_cutlass_scaled_gemm(config: str, tokens: int, inputs: int, outputs: int) -> None:
    """Builds the library at its first use here, which takes minutes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    library = ctypes.CDLL(str(gemm_library().build()))
    per_block = config in BLOCKS
    x, weight = torch.randn(tokens, inputs, device="cuda"), torch.randn(outputs, inputs, device="cuda")
    scale = (block_scales if per_block else row_scales)(weight, torch.float8_e4m3fn)
    quantized = quantize_weight(weight, scale, torch.float8_e4m3fn)
    a, a_scale = quantize_activations(x, torch.float8_e4m3fn, per_group=per_block)
    expected = scaled_gemm_reference(a, quantized, a_scale, scale).float()
    y = run_gemm(library, config, a, quantized, a_scale, scale).float()
    assert (y - expected).norm() / expected.norm() < 4e-3
    residual = (random(tokens, outputs + 8) * float(expected.std()))[:, :outputs]
    expected = scaled_gemm_reference(a, quantized, a_scale, scale, residual).float()
    y = run_gemm(library, config, a, quantized, a_scale, scale, residual).float()
    assert (y - expected).norm() / expected.norm() < 4e-3
    if not per_block:
        one = torch.tensor([0.25], device="cuda")
        for scales in ((one, scale), (a_scale, one), (one, one)):
            expected = scaled_gemm_reference(a, quantized, *scales).float()
            y = run_gemm(library, config, a, quantized, *scales).float()
            assert (y - expected).norm() / expected.norm() < 4e-3
