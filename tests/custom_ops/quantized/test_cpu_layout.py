"""`cas::quantized_linear`'s CPU kernel against float64 over the dequantized weights, and its packed layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.linear.fused_linear import pack_linear_weight
from compile_and_serve.custom_ops.quantization import quantize_activations, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.cpu_layout import pack_weight_cpu
from compile_and_serve.custom_ops.quantized.quantized_linear import (
    pack_quantized_weight,
    quantized_linear,
    quantized_linear_unsupported_reason,
    unpack_quantized_weight,
)
from tests.support.kernels import require_cpu_kernels
from tests.support.numbers import relative_error

WEIGHT_DTYPES = [torch.int8, torch.float8_e4m3fn]
DTYPES = [torch.float32, torch.bfloat16]
# Rounding of the output, 2^-8 at most; in float32, sums over up to 1536 products (float8), activations of 24 bits (int8).
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
SHAPES = [(960, 576), (64, 1536), (40, 33), (6, 7), (100, 18)]  # (O, I)
ACTIVATIONS = ["none", "dynamic", "static"]


def make_weight(out_features: int, in_features: int, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """→ `dtype` [O, I] and its scale [O], rows of different sizes."""
    weight = torch.randn(out_features, in_features) * torch.rand(out_features, 1).exp2() / in_features**0.5
    scale = row_scales(weight, dtype)
    return quantize_weight(weight, scale, dtype), scale


def reference(
    x, weight, scale, activations="none", input_scale=None, norm_weight=None, bias=None, silu_mul=False, residual=None
) -> torch.Tensor:
    if norm_weight is not None:
        x = F.rms_norm(x.double(), (x.shape[1],), norm_weight.double(), 1e-5).to(x.dtype)
    if activations == "none":
        x = x.double()
    else:
        x, x_scale = quantize_activations(x, weight.dtype, input_scale=input_scale)
        x = x.double() * x_scale
    y = F.linear(x, weight.double() * scale[:, None], None if bias is None else bias.double())
    if silu_mul:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


def unsupported_reason(dtype=torch.bfloat16, weight_dtype=torch.int8, per_block=False) -> str | None:
    return quantized_linear_unsupported_reason(device=torch.device("cpu"), dtype=dtype, weight_dtype=weight_dtype, per_block=per_block)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    require_cpu_kernels(quantized=True)
    assert unsupported_reason() is None


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 12, 13, 64, 257])
def test_product(num_tokens, out_features, in_features, activations, dtype, weight_dtype) -> None:
    weight, scale = make_weight(out_features, in_features, weight_dtype)
    x = torch.randn(num_tokens, in_features, dtype=dtype) * torch.logspace(-3, 3, num_tokens, dtype=dtype)[:, None]
    input_scale = torch.tensor([0.03]) if activations == "static" else None
    y = quantized_linear(x, pack_weight_cpu(weight), scale, out_features, activations=activations, input_scale=input_scale)
    assert y.shape == (num_tokens, out_features)
    assert y.dtype == dtype
    assert y.is_contiguous()
    expected = reference(x, weight, scale, activations, input_scale)
    errors = (y.double() - expected).norm(dim=1)  # each row has a size of its own
    assert (errors <= TOLERANCE[dtype] * expected.norm(dim=1)).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_fusions(num_tokens, out_features, in_features, activations, dtype, weight_dtype) -> None:
    weight, scale = make_weight(out_features, in_features, weight_dtype)
    packed = pack_weight_cpu(weight)
    input_scale = torch.tensor([0.03]) if activations == "static" else None
    x = torch.randn(num_tokens, in_features + 3, dtype=dtype)[:, :in_features]
    for use in range(1, 16):
        silu_mul = bool(use & 8)
        columns = out_features // 2 if silu_mul else out_features
        norm_weight = torch.randn(in_features, dtype=dtype) if use & 1 else None
        bias = torch.randn(out_features, dtype=dtype) if use & 2 else None
        residual = torch.randn(num_tokens, columns + 5, dtype=dtype)[:, :columns] if use & 4 else None
        y = quantized_linear(x, packed, scale, out_features, norm_weight, 1e-5, bias, silu_mul, residual, activations, input_scale)
        expected = reference(x, weight, scale, activations, input_scale, norm_weight, bias, silu_mul, residual)
        # A tie that falls the other way in the normalized row is a whole step of int8, or of bfloat16 with few to average it.
        tie = (8e-3 if activations != "none" else 3e-3 * (dtype == torch.bfloat16)) if norm_weight is not None else 0
        assert relative_error(y, expected) < TOLERANCE[dtype] + tie, use


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_row_does_not_depend_on_the_batch_it_is_in(activations, dtype, weight_dtype) -> None:
    weight, scale = make_weight(192, 576, weight_dtype)
    packed, norm_weight = pack_weight_cpu(weight), torch.randn(576, dtype=dtype)
    x = torch.randn(50, 576, dtype=dtype)
    input_scale = torch.tensor([0.03]) if activations == "static" else None
    arguments = (packed, scale, 192, norm_weight, 1e-6, None, True, None, activations, input_scale)
    together = quantized_linear(x, *arguments)
    assert torch.equal(together, torch.cat([quantized_linear(row[None], *arguments) for row in x]))
    assert torch.equal(together[20:33], quantized_linear(x[20:33], *arguments))


def test_one_large_activation_leaves_the_others_their_precision() -> None:
    weight, scale = make_weight(96, 1536)
    weight[:, 7] = 0  # what is left is the product of the small ones
    x = torch.randn(3, 1536).bfloat16()
    x[:, 7] = 500
    y = quantized_linear(x, pack_weight_cpu(weight), scale, 96)
    assert relative_error(y, reference(x, weight, scale)) < 6e-3


@pytest.mark.parametrize("activations", ["none", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_and_of_no_number(dtype: torch.dtype, activations: str) -> None:
    weight, scale = make_weight(32, 40)
    x = torch.randn(4, 40, dtype=dtype)
    x[0] = 0
    x[1, 39], x[2, 3] = float("nan"), float("-inf")
    y = quantized_linear(x, pack_weight_cpu(weight), scale, 32, activations=activations)
    assert (y[0] == 0).all()
    assert y[1:3].isnan().all()
    assert relative_error(y[3], reference(x, weight, scale, activations)[3]) < TOLERANCE[dtype]


@pytest.mark.parametrize(("out_features", "in_features"), [(3, 65536), (5, 4099)])
def test_extreme_weights_do_not_overflow(out_features: int, in_features: int) -> None:
    weight = torch.full((out_features, in_features), 127, dtype=torch.int8)
    weight[1] = -128
    scale = torch.ones(out_features)
    x = torch.full((2, in_features), 3.0)
    x[1, ::2] = -3
    y = quantized_linear(x, pack_weight_cpu(weight), scale, out_features)
    torch.testing.assert_close(y.double(), reference(x, weight, scale), rtol=1e-6, atol=0.01)


@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_packed_int8_layout(out_features: int, in_features: int) -> None:
    weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    packed = pack_weight_cpu(weight)
    assert packed.shape == (-(-out_features // 16), -(-in_features // 4), 64)
    assert packed.dtype == torch.int8
    assert packed.is_contiguous()
    assert torch.equal(unpack_quantized_weight(packed, out_features, in_features), weight)
    for _ in range(20):
        o, i = int(torch.randint(out_features, ())), int(torch.randint(in_features, ()))
        assert packed.view(torch.uint8)[o // 16, i // 4, o % 16 * 4 + i % 4] == int(weight[o, i]) + 128


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float8_value(dtype: torch.dtype) -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    packed = pack_weight_cpu(weight)
    y = quantized_linear(torch.ones(1, 1, dtype=dtype), packed, torch.ones(256), 256)
    torch.testing.assert_close(y[0], weight[:, 0].to(dtype), rtol=0, atol=0, equal_nan=True)
    back = unpack_quantized_weight(packed, 256, 1)
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


def test_activations_are_quantized_to_float8_as_by_torch() -> None:
    """With the identity as weight, the output is the quantized activations."""
    x = (torch.randn(50, 64) * torch.logspace(-4, 3, 64)).clamp(-448, 448)
    x[0] = torch.arange(64) * 2**-10  # ties between subnormals, and up to the smallest normals
    x[1] = torch.arange(64) * 1.03125 + 16.5  # ties between normals
    identity = torch.eye(64).to(torch.float8_e4m3fn)
    y = quantized_linear(x, pack_weight_cpu(identity), torch.ones(64), 64, activations="static", input_scale=torch.ones(1))
    assert torch.equal(y, x.to(torch.float8_e4m3fn).float())


def test_empty_input() -> None:
    weight, scale = make_weight(32, 64)
    assert quantized_linear(torch.empty(0, 64), pack_weight_cpu(weight), scale, 32).shape == (0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed": pack_linear_weight(torch.randn(32, 64))}, "pack_quantized_weight"),
        ({"scale": torch.ones(31)}, "scale must be"),
        ({"scale": torch.ones(32).double()}, "scale must be"),
        ({"bias_O": torch.randn(31)}, "bias must be"),
        ({"residual_TO": torch.randn(3, 31)}, "residual must be"),
        ({"activations": "some"}, "none, dynamic or static"),
        ({"activations": "static"}, "takes an input_scale if and only if"),
        ({"input_scale": torch.ones(1)}, "takes an input_scale if and only if"),
        ({"x_TI": torch.randn(64, 3).T}, "contiguous rows"),
    ],
)
def test_wrong_arguments_say_what_was_expected(change: dict, message: str) -> None:
    weight, scale = make_weight(32, 64)
    arguments = {"x_TI": torch.randn(3, 64), "packed": pack_weight_cpu(weight), "scale": scale, "out_features": 32}
    with pytest.raises(ValueError, match=message):
        quantized_linear(**(arguments | change))


def test_other_dtypes_and_plain_weights_go_to_the_reference() -> None:
    weight, scale = make_weight(32, 64)
    x = torch.randn(3, 64, dtype=torch.float64)
    expected = reference(x, weight, scale)
    torch.testing.assert_close(quantized_linear(x, pack_weight_cpu(weight), scale, 32), expected)
    assert relative_error(quantized_linear(x.float(), weight, scale, 32), expected) < 1e-6


def test_what_has_no_kernel_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert "float64" in str(unsupported_reason(dtype=torch.float64))
    assert "float8_e5m2" in str(unsupported_reason(weight_dtype=torch.float8_e5m2))
    assert "per block" in str(unsupported_reason(per_block=True))
    weight = torch.zeros(3, 70_000, dtype=torch.int8)
    assert pack_quantized_weight(weight, torch.ones(3)) is weight
    assert "at most 65536 inputs, not 70000" in caplog.text
    assert unsupported_reason() is None is unsupported_reason(weight_dtype=torch.float8_e4m3fn)


def test_schema_and_fake() -> None:
    weight, scale = make_weight(32, 64)
    x, residual = torch.randn(3, 64), torch.randn(3, 16)
    arguments = (x, pack_weight_cpu(weight), scale, 32, torch.randn(64), 1e-6, None, True, residual, "dynamic", None)
    torch.library.opcheck(torch.ops.cas.quantized_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
