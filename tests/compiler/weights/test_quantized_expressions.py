"""Quantized expressions: a merged or sharded weight has the values that its parts would have separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_and_serve.compiler.weights.quantized_expressions import CannotQuantizeError, grouped_parts, quantized_parts, stored_parts
from compile_and_serve.compiler.weights.transforms import WeightTable, WeightTransform
from compile_and_serve.custom_ops.quantization import block_scales, dequantize_weight, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.group_layout import dequantize_groups
from compile_and_serve.custom_ops.quantized.quantize_groups import group_minima, group_scales, quantize_groups
from compile_and_serve.custom_ops.stored_weight import QuantizedWeight, ScaledParts, scaled_weight
from compile_and_serve.custom_ops.weight_functions import Expression, TensorSpec, weight_function

SPEC = TensorSpec(shape=(256, 384), dtype=torch.bfloat16)
DTYPES = [torch.float8_e4m3fn, torch.int8]


@weight_function("test_first_rows", selects="rows")
def _first_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: tensor.shape[0] // 2]


@weight_function("test_last_columns", selects="columns")
def _last_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, tensor.shape[1] * 2 // 3 :]


@weight_function("test_doubled")
def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def value(expression: Expression, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    transform = WeightTransform(expression=expression, target="", spec=SPEC)
    return transform.fn(*(tensors[source] for source in transform.sources))


MERGED_AND_SHARDED = [
    "a",
    ("cat", "a", "b"),
    ("test_first_rows", "a"),
    ("test_last_columns", "b"),
    ("cat", ("test_first_rows", "a"), ("test_first_rows", "b")),
    ("test_last_columns", ("cat", "b", ("test_first_rows", "a"))),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("expression", MERGED_AND_SHARDED)
def test_merged_and_sharded(expression: Expression, scales: str, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(SPEC.shape).bfloat16() * (1 + torch.arange(256)[:, None]) for name in "ab"}
    made = quantized_parts(expression, WeightTable({"a": SPEC, "b": SPEC}), dtype, scales)  # type: ignore[arg-type]
    values, scale = value(made.values, tensors), value(made.scale, tensors)
    make_scales = row_scales if scales == "row" else block_scales
    rounded = {}
    for name, tensor in tensors.items():
        whole = make_scales(tensor, dtype)
        rounded[name] = dequantize_weight(quantize_weight(tensor, whole, dtype), whole, torch.float32)
    assert torch.equal(dequantize_weight(values, scale, torch.float32), value(expression, rounded))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("expression", MERGED_AND_SHARDED)
def test_merged_and_sharded_in_groups(expression: Expression, bits: int) -> None:
    tensors = {name: torch.randn(SPEC.shape).bfloat16() for name in "ab"}
    made = grouped_parts(expression, WeightTable({"a": SPEC, "b": SPEC}), bits, 32)
    codes, scale, offset = (value(part, tensors) for part in (made.codes, made.scale, made.offset))
    rounded = {}
    for name, tensor in tensors.items():
        whole = group_scales(tensor, bits, 32)
        minima = group_minima(tensor, bits, 32)
        of_whole = quantize_groups(tensor, whole, minima, bits, 32)
        rounded[name] = dequantize_groups(of_whole, whole, minima, bits, 32, torch.float32)
    assert torch.equal(dequantize_groups(codes, scale, offset, bits, 32, torch.float32), value(expression, rounded))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_quantized_tensors_of_the_checkpoint_are_not_changed(kind: str, dtype: torch.dtype) -> None:
    shape = {"tensor": (1,), "row": (256, 1), "block": (2, 3)}[kind]
    quantized = {
        name: scaled_weight(
            name,
            SPEC.shape,
            dtype,
            scale=f"{name}_scale",
            scale_of=kind,  # type: ignore[arg-type]
            activations="static",
            input_scale=f"{name}_input",
        )
        for name in "ab"
    }
    weights = WeightTable({"a": SPEC, "b": SPEC, "c": SPEC}, stored=quantized)
    sources = weights.sources
    assert sources["a"] == TensorSpec(shape=SPEC.shape, dtype=dtype)
    assert sources["b_scale"] == TensorSpec(shape=shape, dtype=torch.float32)
    assert sources["c"] == SPEC
    plain = {name: weights[name].expression for name in "abc"}
    assert plain["c"] == "c"
    tensors = {name: (torch.randn(256, 384) * 20).to(dtype) for name in "ab"}
    tensors |= {f"{name}_scale": torch.rand(shape) + 0.1 for name in "ab"}
    tensors |= {"a_input": torch.tensor([0.5]), "b_input": torch.tensor([0.75])}
    spread = tensors["a_scale"]
    if kind == "block":
        spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (tensors["a"].float() * spread).bfloat16()
    assert torch.equal(value(plain["a"], tensors), expected)

    merged = ("cat", plain["a"], plain["b"])
    assert weights.parameters(merged) == ["a", "b"]
    made = stored_parts(merged, weights)
    assert isinstance(made, ScaledParts)
    assert (made.dtype, made.activations) == (dtype, "static")
    assert made.values == ("cat", "a", "b")
    back = dequantize_weight(value(made.values, tensors), value(made.scale, tensors), torch.bfloat16)
    assert torch.equal(back, value(merged, tensors))
    assert made.input_scale is not None
    assert value(made.input_scale, tensors).tolist() == [0.75]


def test_expressions_that_cannot_be_quantized() -> None:
    stored = scaled_weight("a", SPEC.shape, torch.int8, scale="a_scale", scale_of="tensor", activations="dynamic")
    other = scaled_weight("b", SPEC.shape, torch.float8_e4m3fn, scale="b_scale", scale_of="tensor", activations="dynamic")
    cases: list[tuple[dict[str, QuantizedWeight], tuple[Any, ...], torch.dtype | None, str]] = [
        ({}, ("test_doubled", "a"), torch.int8, "computed by test_doubled"),
        ({"a": stored}, ("cat", "a", "c"), None, "only a part of the merged weight is quantized"),
        ({"a": stored, "b": other}, ("cat", "a", "b"), None, "different formats"),
        ({}, ("test_last_columns", ("test_last_columns", "a")), torch.int8, "a part of the weight has 43 columns"),
    ]
    for quantized, expression, dtype, reason in cases:
        weights = WeightTable({"a": SPEC, "b": SPEC, "c": SPEC}, stored=quantized)
        here: Expression = tuple(weights.expressions.get(part, part) if isinstance(part, str) else part for part in expression)
        with pytest.raises(CannotQuantizeError, match=reason):
            stored_parts(here, weights) if dtype is None else quantized_parts(here, weights, dtype, "block")
