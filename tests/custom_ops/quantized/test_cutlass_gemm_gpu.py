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
from compile_and_serve.custom_ops.quantized.cutlass_gemm import BLOCKS, ROWS, gemm_library, run_gemm
from tests.support.cuda import random
from tests.support.numbers import relative_error


def reference(
    a_TI: torch.Tensor, b_OI: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, residual_TO: torch.Tensor | None = None
) -> torch.Tensor:
    """`run_gemm` in plain torch: sums in float32 and one rounding to bfloat16."""
    a, b = a_TI.float(), b_OI.float()
    residual = 0.0 if residual_TO is None else residual_TO.float()
    if b_scale.dim() == 2:
        a = a * a_scale.repeat_interleave(128, 1)[:, : a.shape[1]]
        b = b * b_scale.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
        return (a @ b.T + residual).to(torch.bfloat16)
    return (a_scale.reshape(-1, 1) * (b_scale.reshape(1, -1) * (a @ b.T)) + residual).to(torch.bfloat16)


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
    expected = reference(a, quantized, a_scale, scale).float()
    y = run_gemm(library, config, a, quantized, a_scale, scale).float()
    assert relative_error(y, expected) < 4e-3
    residual = (random(tokens, outputs + 8) * float(expected.std()))[:, :outputs]
    expected = reference(a, quantized, a_scale, scale, residual).float()
    y = run_gemm(library, config, a, quantized, a_scale, scale, residual).float()
    assert relative_error(y, expected) < 4e-3
    if not per_block:
        one = torch.tensor([0.25], device="cuda")
        for scales in ((one, scale), (a_scale, one), (one, one)):
            expected = reference(a, quantized, *scales).float()
            y = run_gemm(library, config, a, quantized, *scales).float()
            assert relative_error(y, expected) < 4e-3
