"""The Triton kernels of linears and of what surrounds them, in Triton's interpreter, against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

from compile_and_serve.custom_ops.linear import silu_mul_gemm, triton_linear
from compile_and_serve.custom_ops.linear.token_chunks import bfloat16_chunk_tokens, token_chunks
from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm, rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.linear.triton_linear import fused_linear, takes_few_outputs
from compile_and_serve.custom_ops.linear.triton_linear_configs import SmallBatchConfig
from tests.support.numbers import relative_error

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def random(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size).to(dtype)


def arguments(
    num_tokens: int, out: int, inner: int, silu_mul: bool, extras: bool, dtype: torch.dtype, gelu: bool = False
) -> dict[str, object]:
    rows = out // 2 if silu_mul else out
    return {
        "x_TI": random(num_tokens, inner + 8, dtype=dtype)[:, :inner],
        "weight_OI": (torch.randn(out, inner) * inner**-0.5).to(dtype),
        "out_features": out,
        "norm_weight_I": random(inner, dtype=dtype) if extras else None,
        "eps": 1e-5,
        "bias_O": random(out, dtype=dtype) if extras else None,
        "silu_mul": silu_mul,
        "residual_TO": random(num_tokens, rows + 4, dtype=dtype)[:, :rows] if extras else None,
        "gelu": gelu,
    }


def reference(a: dict[str, object]) -> torch.Tensor:
    x, weight, norm, bias, residual = (
        None if a[name] is None else a[name].double()  # type: ignore[attr-defined]
        for name in ("x_TI", "weight_OI", "norm_weight_I", "bias_O", "residual_TO")
    )
    assert x is not None
    if norm is not None:
        x = F.rms_norm(x, (x.shape[1],), norm, a["eps"])  # type: ignore[arg-type]
    y = F.linear(x, weight, bias)
    if a["silu_mul"]:
        gate, up = y.chunk(2, dim=-1)
        y = (F.gelu(gate, approximate="tanh") if a["gelu"] else F.silu(gate)) * up
    return y if residual is None else y + residual


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(("out", "inner", "silu_mul"), [(10, 96, False), (64, 2080, False), (30, 520, True), (1, 33, False)])
def test_one_token(out: int, inner: int, silu_mul: bool, extras: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(out + inner)
    a = arguments(1, out, inner, silu_mul, extras, dtype)
    assert relative_error(fused_linear(**a), reference(a)) < LIMITS[dtype]  # type: ignore[arg-type]


@pytest.mark.pairwise
# bfloat16 products of matrices are not what the interpreter computes: it multiplies the bits.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [2, 7, 16])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("out", "inner", "silu_mul"), [(20, 96, False), (24, 200, True)])
def test_few_tokens(num_tokens: int, out: int, inner: int, silu_mul: bool, splits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    a = arguments(num_tokens, out, inner, silu_mul, True, dtype)
    result = triton_linear.small_batch(*a.values(), config=SmallBatchConfig(16, 32, splits, 2, 4))  # type: ignore[arg-type]
    assert relative_error(result, reference(a)) < LIMITS[dtype]


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_tokens", [17, 33, 65])
@pytest.mark.parametrize(("out", "inner"), [(1, 520), (37, 99), (128, 2080)])
def test_few_outputs(num_tokens: int, out: int, inner: int) -> None:
    torch.manual_seed(num_tokens)
    for extras in (False, True):
        a = arguments(num_tokens, out, inner, False, extras, torch.float16)
        assert takes_few_outputs(a["x_TI"], a["weight_OI"], False)  # type: ignore[arg-type]
        assert relative_error(fused_linear(**a), reference(a)) < LIMITS[torch.float16]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 70])
def test_gelu_in_place_of_silu(num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    for extras in (False, True):
        a = arguments(num_tokens, 24, 48, True, extras, torch.float16, gelu=True)
        assert relative_error(fused_linear(**a), reference(a)) < LIMITS[torch.float16]  # type: ignore[arg-type]
    if num_tokens == 1:
        a["norm_weight_I"] = a["norm_weight_I"].float() + 1.0  # type: ignore[attr-defined]
        assert relative_error(fused_linear(**a), reference(a)) < LIMITS[torch.float16]  # type: ignore[arg-type]


def test_splits_count_from_zero_again() -> None:
    torch.manual_seed(0)
    a = arguments(3, 40, 160, False, False, torch.float32)
    first, second = (triton_linear.small_batch(*a.values(), config=SmallBatchConfig(16, 32, 5, 2, 4)) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first, second)


@pytest.mark.parametrize("num_tokens", [0, 3, 17, 40, 70])
def test_any_number_of_tokens(num_tokens: int) -> None:
    for dtype in (torch.float32, torch.float16):
        a = arguments(num_tokens, 24, 48, True, True, dtype)
        out = fused_linear(**a)  # type: ignore[arg-type]
        assert out.shape == (num_tokens, 12)
        if num_tokens:
            assert relative_error(out, reference(a)) < LIMITS[dtype]


def test_norms_and_activation() -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(5, 80)[:, :72], torch.randn(5, 72), torch.randn(72)
    expected = F.rms_norm(x.double(), (72,), weight.double(), 1e-6)
    assert relative_error(rms_norm(x, weight, 1e-6), expected) < 1e-6
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert relative_error(normed, F.rms_norm((x + residual).double(), (72,), weight.double(), 1e-6)) < 1e-6
    gate, up = x.double().chunk(2, dim=-1)
    assert relative_error(silu_mul_rows(x), F.silu(gate) * up) < 1e-6


@pytest.mark.parametrize("num_tokens", [0, 1, 2047, 2048, 2049, 4096, 6145, 14337, 16384, 16385])
@pytest.mark.parametrize("most", [2048, 8192])
def test_chunks_hold_every_token_once(num_tokens: int, most: int) -> None:
    chunks = token_chunks(num_tokens, most)
    assert [token for at in chunks for token in range(num_tokens)[at]] == list(range(num_tokens))
    assert len(chunks) == -(-num_tokens // most)
    assert all(at.stop - at.start <= most for at in chunks)
    assert all(at.start % 256 == 0 for at in chunks)
    assert all(at.stop - at.start >= min(num_tokens, 769) for at in chunks)  # four units, of the last of which one token


@pytest.mark.parametrize(("inputs", "outputs", "most"), [(4096, 28672, 2048), (4096, 14336, 2048), (2560, 19456, 8192), (1024, 6144, 8192)])
def test_small_products_run_in_larger_chunks(inputs: int, outputs: int, most: int) -> None:
    assert bfloat16_chunk_tokens(inputs * outputs) == most


@pytest.mark.parametrize("num_tokens", [0, 70, 150])
def test_silu_mul_of_a_long_prompt_in_chunks(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silu_mul_gemm, "bfloat16_chunk_tokens", lambda num_values: 64)
    x, weight, residual = torch.randn(num_tokens, 40)[:, :32], torch.randn(48, 32), torch.randn(num_tokens, 24)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
    y = fused_linear(x, weight, 48, silu_mul=True, residual_TO=residual)
    assert y.shape == (num_tokens, 24)
    torch.testing.assert_close(y.double(), F.silu(gate) * up + residual, rtol=1e-5, atol=1e-5)
