"""Experts with float8 activations: every way of computing them, against float64 products of the same rounded values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cpu_kernels import quantized_cpu_kernel_library, quantized_cpu_kernels_status
from compile_and_serve.custom_ops.library import OPS
from compile_and_serve.custom_ops.moe import adapted_cuda_experts, cuda_experts, triton_experts, triton_gemv_experts
from compile_and_serve.custom_ops.moe.activation import activate
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.packed_experts import pack_8bit_experts
from compile_and_serve.custom_ops.quantization import (
    BLOCK,
    block_scales,
    dequantize_weight,
    quantize_activations,
    quantize_weight,
    row_scales,
)
from tests.custom_ops.moe.test_expert_adapters import SLOTS, adapters_of
from tests.custom_ops.moe.test_experts import relative_error, routing

X, K, LIMIT = 6, 2, 1.5
FLOAT8 = torch.float8_e4m3fn
# A value of h beside the middle of two float8 values is rounded differently where sums have another order: by at most 2^-3 of the value,
# for few values. Without float8 activations, the error is about 3 %.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def rounds_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter does not round every value to the nearest float8, so the kernels get activations that torch has rounded."""

    def quantize_rows(
        x_TI: torch.Tensor, dtype: torch.dtype, *, norm_weight_I: torch.Tensor | None, eps: float, per_group: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if norm_weight_I is not None:
            x_TI = F.rms_norm(x_TI, (x_TI.shape[1],), norm_weight_I, eps)
        values_TI, scale = quantize_activations(x_TI, dtype, per_group=per_group)
        return values_TI.contiguous(), scale

    monkeypatch.setattr(triton_experts, "quantize_rows", quantize_rows)


def rounded(x_TI: torch.Tensor, per_block: bool) -> torch.Tensor:
    """x after rounding it to float8, in float64."""
    values, scale = quantize_activations(x_TI, FLOAT8, per_group=per_block)
    scale = scale.repeat_interleave(BLOCK, 1)[:, : x_TI.shape[1]] if per_block else scale
    return values.double() * scale.double()


def case(
    num_tokens: int, kind: str, dtype: torch.dtype, per_block: bool, *, activation: str = "silu", sizes: tuple[int, int] | None = None
) -> tuple[triton_experts.Operands, torch.Tensor, list[torch.Tensor]]:
    """Operands with a norm, a residual and biases, the definition in float64, and the dequantized weights. Blocks are not full."""
    hidden, features = sizes or ((160, 136) if per_block else (48, 40))
    x, residual = torch.randn(num_tokens, hidden).to(dtype), torch.randn(num_tokens, hidden).to(dtype)
    ids, weights, norm = routing(kind, num_tokens, X, K), torch.rand(num_tokens, K), torch.randn(hidden).to(dtype)
    scales = block_scales if per_block else row_scales
    matrices = [torch.randn(X, 2 * features, hidden) * 0.2, torch.randn(X, hidden, features) * 0.2]
    quantized = [(quantize_weight(w, scales(w, FLOAT8), FLOAT8), scales(w, FLOAT8)) for w in matrices]
    plain = [dequantize_weight(*one, torch.float64) for one in quantized]
    biases = [torch.randn(X, 2 * features).to(dtype), torch.randn(X, hidden).to(dtype)]
    (gate_up, gate_up_scale), (down, down_scale) = quantized
    operands = triton_experts.Operands(
        x, ids, weights, gate_up, down, *biases, activation, LIMIT, residual, norm, 1e-5, gate_up_scale, down_scale, "dynamic"
    )
    x_TD = rounded(F.rms_norm(x, (hidden,), norm, 1e-5), per_block)
    expected = residual.double()
    for token in range(num_tokens):
        for slot in range(K):
            expert = int(ids[token, slot])
            gate, up = (plain[0][expert] @ x_TD[token] + biases[0][expert].double()).chunk(2)
            h_1F = rounded(activate(gate, up, activation, LIMIT).to(dtype)[None], per_block)
            expected[token] += weights[token, slot] * (plain[1][expert] @ h_1F[0] + biases[1][expert].double())
    return operands, expected, plain


def arguments(operands: triton_experts.Operands) -> list[Any]:
    return [getattr(operands, name) for name in operands.__slots__]


def up_to_activations(operands: triton_experts.Operands) -> list[Any]:
    """The arguments before `activations`."""
    return arguments(operands)[: operands.__slots__.index("activations")]


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", ["gemv", "grouped", "reference"])
@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "even"), (13, "even"), (13, "to_one")])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("per_block", [False, True])
# The interpreter does not round to the nearest bfloat16.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.pairwise
def test_methods_equal_the_definition(
    method: str, num_tokens: int, kind: str, activation: str, per_block: bool, dtype: torch.dtype
) -> None:
    if method == "gemv":
        num_tokens = min(num_tokens, 3)  # it loops over pairs, slowly in the interpreter
    operands, expected, _ = case(num_tokens, kind, dtype, per_block, activation=activation)
    if method == "gemv":
        out = triton_gemv_experts.run_gemv(operands, operands.gate_up)
    elif method == "grouped":
        out = triton_experts.run_grouped(triton_experts.Tiles(16, 16, 32, 32, 2, 4), operands, operands.gate_up)
    else:
        out = torch.ops.cas.experts(*arguments(operands))
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]


# Whole tiles; gate and up share a block, and the last one is not full.
@pytest.mark.parametrize("sizes", [(256, 128), (144, 272)])
def test_blocks_of_scales_fill_tiles(sizes: tuple[int, int]) -> None:
    operands, expected, _ = case(21, "even", torch.float32, True, sizes=sizes)
    out = triton_experts.run_grouped(triton_experts.Tiles(16, 64, 128, 128, 2, 4), operands, operands.gate_up)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_activations_are_rounded() -> None:
    """The tolerance of these tests tells rounded activations from others."""
    operands, expected, _ = case(13, "even", torch.float32, False)
    exact_form = OPS["cas::experts"].exact
    assert exact_form is not None
    exact = exact_form(*arguments(operands))
    assert 5 * TOLERANCE[torch.float32] < relative_error(exact, expected) < 0.1
    weight_only = torch.ops.cas.experts(*up_to_activations(operands))
    assert torch.equal(exact, weight_only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_plain_and_packed_layouts_equal_the_definition(dtype: torch.dtype, activation: str) -> None:
    quantized_cpu_kernel_library()
    assert quantized_cpu_kernels_status() is None
    operands, expected, _ = case(13, "even", dtype, False, activation=activation, sizes=(52, 36))
    args = arguments(operands)
    assert relative_error(torch.ops.cas.experts(*args), expected) < TOLERANCE[dtype]
    args[3], args[4] = pack_8bit_experts(operands.gate_up), pack_8bit_experts(operands.down)
    assert relative_error(torch.ops.cas.experts(*args), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", [1, 260])
def test_adapters_see_activations_that_are_not_rounded(num_tokens: int) -> None:
    operands, _, plain = case(num_tokens, "even", torch.float32, False)
    index = torch.randint(1, SLOTS + 1, (num_tokens,), dtype=torch.int32)
    adapters, deltas = adapters_of(index, torch.float32)
    x = F.rms_norm(operands.x_TD, (48,), operands.norm_weight_D, 1e-5)
    x_TD = rounded(x, False)
    assert operands.residual_TD is not None
    expected = operands.residual_TD.double()
    assert operands.gate_up_bias is not None
    assert operands.down_bias is not None
    for token in range(num_tokens):
        for slot in range(K):
            expert, (gate_up, down) = int(operands.ids_TK[token, slot]), deltas[int(index[token]) - 1]
            y = plain[0][expert] @ x_TD[token] + gate_up[expert].double() @ x[token].double()
            gate, up = (y + operands.gate_up_bias[expert].double()).chunk(2)
            h = activate(gate, up, "silu", LIMIT)
            y = plain[1][expert] @ rounded(h.float()[None], False)[0] + down[expert].double() @ h
            expected[token] += operands.weights_TK[token, slot] * (y + operands.down_bias[expert].double())
    out = experts(
        operands.x_TD, operands.ids_TK, operands.weights_TK, operands.gate_up, operands.down, operands.gate_up_bias, operands.down_bias,
        limit=LIMIT, residual_TD=operands.residual_TD, norm_weight_D=operands.norm_weight_D, eps=1e-5,
        gate_up_scale=operands.gate_up_scale, down_scale=operands.down_scale, activations="dynamic", adapters=adapters,
    )  # fmt: skip
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    out = adapted_cuda_experts.experts_by_linear(operands, adapters)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize(("num_tokens", "first"), [(1, "gemv"), (40, "grouped 32x"), (400, "grouped 128x")])
def test_methods_by_number_of_tokens(num_tokens: int, first: str, per_block: bool) -> None:
    """Weights are never expanded, and every method has whole blocks of scales."""
    hidden, features = (160, 136) if per_block else (48, 40)
    scale = torch.ones(X, 3, 2) if per_block else torch.ones(X, 2 * features)
    operands = triton_experts.Operands(
        torch.randn(num_tokens, hidden),
        routing("even", num_tokens, X, K),
        torch.rand(num_tokens, K),
        torch.zeros(X, 2 * features, hidden, dtype=FLOAT8),
        torch.zeros(X, hidden, features, dtype=FLOAT8),
        gate_up_scale=scale,
        down_scale=scale,
        activations="dynamic",
    )
    names = list(cuda_experts.methods(operands))
    assert names[0].startswith(first)
    assert not any(name.startswith("expanded") for name in names)
    assert not per_block or not any("x256/" in name for name in names)


def test_other_activations_are_refused() -> None:
    operands, _, _ = case(2, "even", torch.float32, False)
    args = arguments(operands)
    with pytest.raises(ValueError, match="must be 'none' or 'dynamic', not 'static'"):
        torch.ops.cas.experts(*up_to_activations(operands), "static")
    args[3] = torch.zeros_like(operands.gate_up, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"over float8 weights with scales only, not over torch\.int8"):
        torch.ops.cas.experts(*args)
