"""Quantized experts in the CPU's layouts: the C++ kernels against products with the dequantized weights in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import quantized_cpu_kernel_library, quantized_cpu_kernels_status
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.packed_experts import (
    is_packed,
    pack_8bit_experts,
    pack_mxfp4_codes_cpu,
    pack_mxfp4_scales_cpu,
    packed_8bit_unsupported_reason,
    packed_inputs,
)
from compile_and_serve.custom_ops.quantization import dequantize_weight, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.mxfp4 import dequantize_mxfp4
from tests.custom_ops.moe.test_experts import TOLERANCE, by_loops, relative_error, routing
from tests.custom_ops.moe.test_mxfp4_experts import bits

X, K = 5, 2
FORMATS = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "mxfp4": None}
CPU = torch.device("cpu")


def packed_weight(outputs: int, inputs: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random packed values, their scales, and the dequantized weight in float64. dtype: None is MXFP4."""
    if dtype is None:
        codes, scales = bits(outputs, inputs)
        plain = dequantize_mxfp4(codes, scales, torch.float64)
        return pack_mxfp4_codes_cpu(codes), pack_mxfp4_scales_cpu(scales), plain
    weight = torch.randn(X, outputs, inputs) * 0.2
    scale = row_scales(weight, dtype)
    values = quantize_weight(weight, scale, dtype)
    return pack_8bit_experts(values), scale, dequantize_weight(values, scale, torch.float64)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "even"), (13, "even"), (13, "to_one")])
@pytest.mark.parametrize(("activation", "has_biases"), [("silu", False), ("silu", True), ("clamped_swiglu", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.pairwise
def test_kernels_equal_the_definition(form: str, num_tokens: int, kind: str, activation: str, has_biases: bool, dtype: torch.dtype) -> None:
    quantized_cpu_kernel_library()
    assert quantized_cpu_kernels_status() is None
    hidden, features = (160, 96) if form == "mxfp4" else (52, 36)  # blocks of 16 outputs are not full
    gate_up, gate_up_scale, plain_gate_up = packed_weight(2 * features, hidden, FORMATS[form])
    down, down_scale, plain_down = packed_weight(hidden, features, FORMATS[form])
    assert is_packed(gate_up, gate_up_scale)
    assert (packed_inputs(gate_up), packed_inputs(down)) == (hidden, features)
    x, ids, weights = (torch.randn(num_tokens, hidden).to(dtype), routing(kind, num_tokens, X, K), torch.rand(num_tokens, K))
    biases: list[Any] = [torch.randn(X, 2 * features).to(dtype), torch.randn(X, hidden).to(dtype)] if has_biases else [None] * 2
    expected = by_loops([x, ids, weights, plain_gate_up, plain_down, *biases], activation, 1.5)
    out = experts(
        x, ids, weights, gate_up, down, *biases, activation=activation, limit=1.5, gate_up_scale=gate_up_scale, down_scale=down_scale
    )
    # The kernels of MXFP4 round activations to steps of max |x| / 32512 for 32 inputs, a standard error of 2^-15 · rms(x) where
    # max |x| is at most 3.4 · rms(x). Three rounded factors meet: of gate, of up, and their product.
    # The reference runs in float64, as in the verification of passes.
    tolerance = (TOLERANCE | {torch.float64: 1e-12})[dtype]
    if form == "mxfp4" and dtype == torch.float32:
        tolerance = 3 * 2**-15
    assert relative_error(out, expected) < tolerance


def test_formats_without_a_kernel() -> None:
    def reason(per_block: bool, in_features: int) -> str | None:
        return packed_8bit_unsupported_reason(
            device=CPU, dtype=torch.bfloat16, weight_dtype=torch.float8_e4m3fn, per_block=per_block, in_features=in_features
        )

    assert reason(False, 36) is None
    assert reason(True, 36) == "the CPU kernels take a scale per output, not per block"
    assert reason(False, 30) == "the CPU kernels take experts with a multiple of 4 inputs, not 30"
