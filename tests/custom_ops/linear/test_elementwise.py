"""The row-wise ops on the CPU, kernels and references, against float64; their fakes; what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.linear.elementwise import add_rms_norm, elementwise_unsupported_reason, silu_mul
from tests.support.numbers import relative_error

LIMITS = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 6e-3}
SIZES = [(1, 1), (3, 17), (5, 48), (257, 96), (2, 1536), (0, 32)]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_cpu_kernels()  # where they cannot be built the references are tested


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_tokens, num_features", SIZES)
def test_add_rms_norm(num_tokens: int, num_features: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, num_features + 3).to(dtype)[:, :num_features]
    residual = (3 * torch.randn(num_tokens, num_features + 1)).to(dtype)[:, 1:]
    weight = torch.randn(num_features).to(dtype)
    total, normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert normed.shape == x.shape
    assert normed.dtype == dtype
    assert relative_error(normed, exact) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_tokens, num_features", SIZES)
def test_silu_mul(num_tokens: int, num_features: int, dtype: torch.dtype) -> None:
    x = (4 * torch.randn(num_tokens, 2 * num_features + 5)).to(dtype)[:, : 2 * num_features]
    out = silu_mul(x)
    gate, up = x.double().chunk(2, dim=-1)
    assert out.shape == (num_tokens, num_features)
    assert out.dtype == dtype
    assert relative_error(out, F.silu(gate) * up) < LIMITS[dtype]


def test_extreme_values_stay_finite() -> None:
    x = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0, 3e38] + [1.0] * 6])
    torch.testing.assert_close(silu_mul(x), F.silu(x[:, :6]), rtol=1e-6, atol=1e-30)
    total, normed = add_rms_norm(torch.zeros(2, 16), torch.zeros(2, 16), torch.ones(16), 1e-6)
    assert not total.any()
    assert not normed.any()


def test_fakes_have_the_shapes() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(7, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
        assert [(t.shape, t.dtype) for t in add_rms_norm(x, x, weight, 1e-6)] == [(x.shape, x.dtype)] * 2
        assert (silu_mul(x).shape, silu_mul(x).dtype) == ((7, 16), x.dtype)


def test_kernels_refuse_what_does_not_fit() -> None:
    if elementwise_unsupported_reason(device=torch.device("cpu"), dtype=torch.float32) is not None:
        pytest.skip("the references run here")
    with pytest.raises(ValueError, match="weight must be a contiguous vector of 8 elements"):
        add_rms_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="x and residual must be"):
        add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="contiguous rows"):
        silu_mul(torch.ones(8, 2).T)


def test_where_there_is_no_kernel_it_is_said() -> None:
    assert "float16" in (elementwise_unsupported_reason(device=torch.device("cpu"), dtype=torch.float16) or "")
    assert "cuda" in (elementwise_unsupported_reason(device=torch.device("cuda"), dtype=torch.float32) or "")
