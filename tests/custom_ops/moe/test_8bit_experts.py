"""Experts with 8-bit weights: the reference and the Triton kernels, against products with the dequantized weights in float64."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.moe import cuda_experts, triton_expand_experts, triton_experts, triton_gemv_experts
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.quantization import block_scales, dequantize_weight, quantize_weight, row_scales
from tests.custom_ops.moe.test_experts import TOLERANCE, by_loops, relative_error, routing

X, K = 4, 2


def case(
    num_tokens: int, kind: str, dtype: torch.dtype, weight_dtype: torch.dtype, per_block: bool
) -> tuple[triton_experts.Operands, torch.Tensor]:
    """Operands, and the definition in float64. Blocks are not full, and gate and up share one."""
    hidden, features = (160, 136) if per_block else (48, 40)
    scales = block_scales if per_block else row_scales
    x, ids, weights = (torch.randn(num_tokens, hidden).to(dtype), routing(kind, num_tokens, X, K), torch.rand(num_tokens, K))
    matrices = [torch.randn(X, 2 * features, hidden) * 0.2, torch.randn(X, hidden, features) * 0.2]
    quantized = [(quantize_weight(w, scales(w, weight_dtype), weight_dtype), scales(w, weight_dtype)) for w in matrices]
    biases = [torch.randn(X, 2 * features).to(dtype), torch.randn(X, hidden).to(dtype)]
    plain = [dequantize_weight(*one, torch.float64) for one in quantized]
    expected = by_loops([x, ids, weights, *plain, *biases], "clamped_swiglu", 1.5)
    (gate_up, gate_up_scale), (down, down_scale) = quantized
    operands = triton_experts.Operands(
        x, ids, weights, gate_up, down, *biases, "clamped_swiglu", 1.5, gate_up_scale=gate_up_scale, down_scale=down_scale
    )
    return operands, expected


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", ["gemv", "grouped", "expanded", "reference"])
@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("kind", ["even", "to_one"])
@pytest.mark.parametrize(
    ("weight_dtype", "per_block", "dtype"),
    [(torch.float8_e4m3fn, False, torch.float16), (torch.float8_e4m3fn, True, torch.float32), (torch.int8, False, torch.float32)],
)
@pytest.mark.pairwise
def test_methods_equal_the_definition(
    method: str, num_tokens: int, kind: str, weight_dtype: torch.dtype, per_block: bool, dtype: torch.dtype
) -> None:
    if method == "gemv":
        num_tokens = min(num_tokens, 3)  # it loops over pairs, slowly in the interpreter
    operands, expected = case(num_tokens, kind, dtype, weight_dtype, per_block)
    tiles = triton_experts.Tiles(16, 16, 32, 32, 2, 4)
    if method == "gemv":
        out = triton_gemv_experts.run_gemv(operands, operands.gate_up)
    elif method == "grouped":
        out = triton_experts.run_grouped(tiles, operands, operands.gate_up)
    elif method == "expanded":
        plain = triton_experts.expanded(triton_expand_experts.dequantize, operands, operands.gate_up)
        out = triton_experts.run_grouped(tiles, plain, plain.gate_up)
    else:
        out = experts(
            operands.x_TD,
            operands.ids_TK,
            operands.weights_TK,
            operands.gate_up,
            operands.down,
            operands.gate_up_bias,
            operands.down_bias,
            activation="clamped_swiglu",
            limit=1.5,
            gate_up_scale=operands.gate_up_scale,
            down_scale=operands.down_scale,
        )
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_tokens", "first"), [(1, "gemv"), (40, "grouped"), (200, "expanded")])
@pytest.mark.parametrize("per_block", [False, True])
def test_default_method_by_number_of_tokens(num_tokens: int, first: str, per_block: bool) -> None:
    operands, _ = case(num_tokens, "even", torch.float32, torch.float8_e4m3fn, per_block)
    assert next(iter(cuda_experts.methods(operands))).startswith(first)
