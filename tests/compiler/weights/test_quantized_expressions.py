"""Quantized expressions: a merged or sharded weight has the values that its parts would have separately."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler.weights.quantized_expressions import (
    CannotQuantizeError,
    checkpoint_specs,
    leaves,
    parameter_of,
    plain_expressions,
    quantized_expression,
)
from compile_and_serve.compiler.weights.transforms import Expression, TensorSpec, WeightTransform, weight_function
from compile_and_serve.custom_ops.quantization import QuantizedWeight, block_scales, dequantize_weight, quantize_weight, row_scales

SPEC = TensorSpec(shape=(256, 384), dtype=torch.bfloat16)
DTYPES = [torch.float8_e4m3fn, torch.int8]


@weight_function("test_first_rows", selects=0)
def _first_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[: tensor.shape[0] // 2]


@weight_function("test_last_columns", selects=1)
def _last_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, tensor.shape[1] * 2 // 3 :]


@weight_function("test_doubled")
def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def value(expression: Expression, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    transform = WeightTransform(expression=expression, target="", spec=SPEC)
    return transform.fn(*(tensors[source] for source in transform.sources))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize(
    "expression",
    [
        "a",
        ("cat", "a", "b"),
        ("test_first_rows", "a"),
        ("test_last_columns", "b"),
        ("cat", ("test_first_rows", "a"), ("test_first_rows", "b")),
        ("test_last_columns", ("cat", "b", ("test_first_rows", "a"))),
    ],
)
def test_merged_and_sharded(expression: Expression, scales: str, dtype: torch.dtype) -> None:
    tensors = {name: torch.randn(SPEC.shape).bfloat16() * (1 + torch.arange(256)[:, None]) for name in "ab"}
    made = quantized_expression(expression, {"a": SPEC, "b": SPEC}, {}, dtype=dtype, scales=scales)  # type: ignore[arg-type]
    values, scale = value(made.values, tensors), value(made.scale, tensors)
    make_scales = row_scales if scales == "row" else block_scales
    rounded = {}
    for name, tensor in tensors.items():
        whole = make_scales(tensor, dtype)
        rounded[name] = dequantize_weight(quantize_weight(tensor, whole, dtype), whole, torch.float32)
    assert torch.equal(dequantize_weight(values, scale, torch.float32), value(expression, rounded))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_quantized_tensors_of_the_checkpoint_are_not_changed(kind: str, dtype: torch.dtype) -> None:
    shape = {"tensor": (1,), "row": (256, 1), "block": (2, 3)}[kind]
    quantized = {
        name: QuantizedWeight(
            dtype=dtype,
            scale=f"{name}_scale",
            scale_shape=shape,
            per_block=kind == "block",
            activations="static",
            input_scale=f"{name}_input",
        )
        for name in "ab"
    }
    specs = {"a": SPEC, "b": SPEC, "c": SPEC}
    sources = checkpoint_specs(specs, quantized)
    assert sources["a"] == TensorSpec(shape=SPEC.shape, dtype=dtype)
    assert sources["b_scale"] == TensorSpec(shape=shape, dtype=torch.float32)
    assert sources["c"] == SPEC
    plain = plain_expressions(specs, quantized)
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
    assert [parameter_of(leaf, quantized) for leaf in leaves(merged)] == ["a", "b"]
    made = quantized_expression(merged, sources, quantized)
    assert (made.dtype, made.activations) == (dtype, "static")
    assert made.values == ("cat", "a", "b")
    back = dequantize_weight(value(made.values, tensors), value(made.scale, tensors), torch.bfloat16)
    assert torch.equal(back, value(merged, tensors))
    assert made.input_scale is not None
    assert value(made.input_scale, tensors).tolist() == [0.75]


def test_expressions_that_cannot_be_quantized() -> None:
    stored = QuantizedWeight(dtype=torch.int8, scale="a_scale", scale_shape=(1,), activations="dynamic")
    other = QuantizedWeight(dtype=torch.float8_e4m3fn, scale="b_scale", scale_shape=(1,), activations="dynamic")
    specs = {"a": SPEC, "b": SPEC, "c": SPEC}
    for quantized, expression, dtype, reason in [
        ({}, ("test_doubled", "a"), torch.int8, "computed by test_doubled"),
        ({"a": stored}, ("cat", "a", "c"), None, "only a part of the merged weight is quantized"),
        ({"a": stored, "b": other}, ("cat", "a", "b"), None, "different formats"),
        ({}, ("test_last_columns", ("test_last_columns", "a")), torch.int8, "a part of the weight has 43 columns"),
    ]:
        sources = checkpoint_specs(specs, quantized)
        plain = plain_expressions(specs, quantized)
        here: Expression = tuple(plain.get(part, part) if isinstance(part, str) else part for part in expression)
        with pytest.raises(CannotQuantizeError, match=reason):
            quantized_expression(here, sources, quantized, dtype=dtype, scales="block")
