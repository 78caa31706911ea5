"""`cas::fused_linear` against a float64 reference, and the packed layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.linear.fused_linear import (
    fused_linear,
    pack_linear_weight,
    packed_linear_unsupported_reason,
    packed_shape,
    unpack_linear_weight,
)
from tests.support.kernels import require_cpu_kernels
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
# Rounding of the normalized row, and of the output, each 2^-9 at most; float32 sums one after another over up to 1536 products.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3}
SHAPES = [(960, 576), (64, 1536), (40, 33), (20, 64), (6, 7), (100, 16), (34, 2)]  # (O, I)


def reference(x, weight, norm_weight=None, eps=1e-6, bias=None, silu_mul=False, residual=None) -> torch.Tensor:
    dtype = x.dtype
    x = x.double()
    if norm_weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm_weight.double()
        x = x.to(dtype).double()
    y = x @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if silu_mul:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    require_cpu_kernels()
    assert packed_linear_unsupported_reason(device=CPU, dtype=torch.float32) is None


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_features, in_features", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 12, 13, 16, 17, 40, 150])
def test_product(num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out_features, in_features, dtype=dtype)
    x = torch.randn(num_tokens, in_features, dtype=dtype)
    y = fused_linear(x, pack_linear_weight(weight), out_features)
    assert y.shape == (num_tokens, out_features)
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert relative_error(y, reference(x, weight)) < TOLERANCE[dtype]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_features, in_features", SHAPES)
@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 33])
def test_fusions(num_tokens: int, silu_mul: bool, out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out_features, in_features, dtype=dtype) / in_features**0.5
    columns = out_features // 2 if silu_mul else out_features
    x = torch.randn(num_tokens, in_features + 3, dtype=dtype)[:, :in_features]
    residual = torch.randn(num_tokens, columns + 5, dtype=dtype)[:, :columns]
    norm_weight, bias = torch.randn(in_features, dtype=dtype), torch.randn(out_features, dtype=dtype)
    packed = pack_linear_weight(weight)
    for use in range(1, 8):
        options = {
            "norm_weight": norm_weight if use & 1 else None,
            "bias": bias if use & 2 else None,
            "residual": residual if use & 4 else None,
        }
        y = fused_linear(x, packed, out_features, options["norm_weight"], 1e-5, options["bias"], silu_mul, options["residual"])
        expected = reference(x, weight, eps=1e-5, silu_mul=silu_mul, **options)
        # A bfloat16 tie that falls the other way in the normalized row counts more when there are few outputs to average it.
        assert relative_error(y, expected) < TOLERANCE[dtype] * (3 if out_features * in_features < 1000 else 1), options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("in_features", [33, 7, 2, 40])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_product_of_nan_leaves_nothing_for_the_next(num_tokens: int, in_features: int, with_norm: bool, dtype: torch.dtype) -> None:
    """Rows are padded in memory that products share: NaN times a padded weight of 0 would be NaN."""
    wide, weight = torch.randn(48, 64, dtype=dtype), torch.randn(48, in_features, dtype=dtype)
    norms = (torch.ones(64, dtype=dtype), torch.ones(in_features, dtype=dtype)) if with_norm else (None, None)
    x = torch.randn(num_tokens, in_features, dtype=dtype)
    nan = torch.full((num_tokens, 64), torch.nan, dtype=dtype)
    narrow = pack_linear_weight(wide[:, :63])  # padded, so that it is copied
    assert fused_linear(nan[:, :63], narrow, 48).isnan().all()
    assert fused_linear(nan, pack_linear_weight(wide), 48, norms[0], 1e-6).isnan().all()
    y = fused_linear(x, pack_linear_weight(weight), 48, norms[1], 1e-6)
    assert y.isfinite().all()
    assert relative_error(y, reference(x, weight, norms[1])) < 3 * TOLERANCE[dtype]


def test_silu_of_large_values_stays_finite() -> None:
    weight = torch.eye(32)
    x = torch.cat([torch.tensor([-200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0]).repeat(1, 3)[:, :16], torch.ones(1, 16)], dim=1)
    y = fused_linear(x, pack_linear_weight(weight), 32, silu_mul=True)
    torch.testing.assert_close(y, F.silu(x[:, :16]), rtol=1e-6, atol=1e-30)


def test_gelu_in_place_of_silu() -> None:
    weight, x = torch.randn(64, 48), torch.randn(5, 48)
    y = fused_linear(x, pack_linear_weight(weight), 64, silu_mul=True, gelu=True)
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    torch.testing.assert_close(y, F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_features, in_features", SHAPES)
def test_pack_round_trip(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out_features, in_features, dtype=dtype)
    packed = pack_linear_weight(weight)
    assert packed.shape == packed_shape(out_features, in_features, device=CPU, dtype=dtype)
    assert packed.dtype == dtype
    assert packed.is_contiguous()
    assert torch.equal(unpack_linear_weight(packed, out_features, in_features), weight)


def test_a_row_does_not_depend_on_the_batch_it_is_in() -> None:
    weight, x = torch.randn(96, 64), torch.randn(50, 64)
    packed = pack_linear_weight(weight)
    together = fused_linear(x, packed, 96)
    alone = torch.cat([fused_linear(row[None], packed, 96) for row in x])
    assert torch.equal(together, alone)


def test_empty_input() -> None:
    y = fused_linear(torch.empty(0, 64), pack_linear_weight(torch.randn(32, 64)), 32)
    assert y.shape == (0, 32)


def test_other_dtypes_keep_the_plain_layout() -> None:
    weight, x = (torch.randn(size, dtype=torch.float64) for size in [(6, 8), (3, 8)])
    assert "float64" in str(packed_linear_unsupported_reason(device=CPU, dtype=torch.float64))
    assert pack_linear_weight(weight) is weight
    torch.testing.assert_close(fused_linear(x, weight, 6), x @ weight.T)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"packed": torch.randn(2, 32, 32)}, "pack_linear_weight"),
        ({"packed": torch.randn(2, 64, 16).bfloat16()}, "pack_linear_weight"),
        ({"bias_O": torch.randn(31)}, "bias must be"),
        ({"norm_weight_I": torch.randn(64).bfloat16()}, "norm_weight must be"),
        ({"residual_TO": torch.randn(3, 31)}, "residual must be"),
        ({"x_TI": torch.randn(64, 3).T}, "contiguous rows"),
    ],
)
def test_wrong_arguments_say_what_was_expected(change: dict[str, torch.Tensor], message: str) -> None:
    arguments = {"x_TI": torch.randn(3, 64), "packed": pack_linear_weight(torch.randn(32, 64)), "out_features": 32} | change
    with pytest.raises(ValueError, match=message):
        fused_linear(**arguments)


def test_schema_and_fake() -> None:
    x, packed = torch.randn(3, 64), pack_linear_weight(torch.randn(32, 64))
    arguments = (x, packed, 32, torch.randn(64), 1e-6, None, True, torch.randn(3, 16))
    torch.library.opcheck(torch.ops.cas.fused_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))
