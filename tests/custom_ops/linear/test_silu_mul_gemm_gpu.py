# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""CUTLASS' products with SiLU-mul against float64: every configuration, sizes that no tile divides, and the choice among them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.linear import silu_mul_gemm
from compile_and_serve.custom_ops.linear.silu_mul_gemm import (
    KERNELS,
    SCALED,
    SEPARATE,
    load_silu_mul_gemms,
    run_silu_mul_gemm,
    silu_mul_library,
    silu_mul_linear,
    unsupported_reason,
)
from compile_and_serve.custom_ops.tuning import fastest_kernel
from compile_and_serve.custom_ops.tuning.store import stored_files
from compile_and_serve.custom_ops.tuning.tuner import Tuner
from tests.support.numbers import relative_error

CUDA = torch.device("cuda", 0)
PADDING = 64  # elements of a known value after every result


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    try:
        silu_mul_library().build()
    except BuildError as error:
        pytest.skip(str(error))
    built = load_silu_mul_gemms(CUDA)
    assert built is not None
    return built


def operands(num_tokens: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, inner + 8, device=CUDA).bfloat16()[:, :inner]
    return x, (torch.randn(2 * hidden, inner, device=CUDA) * 2 * inner**-0.5).bfloat16()


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Results are made of NaN, between guards; → the guards."""
    guards: list[torch.Tensor] = []

    def empty(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        whole = torch.full((rows * columns + 2 * PADDING,), float("nan"), dtype=dtype, device=device)
        whole[:PADDING] = 7.0
        whole[-PADDING:] = 7.0
        guards.extend((whole[:PADDING], whole[-PADDING:]))
        return whole[PADDING:-PADDING].view(rows, columns)

    with monkeypatch.context() as patched:
        patched.setattr("compile_and_serve.custom_ops.linear.silu_mul_gemm.torch.empty", empty)
        yield guards


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (136, 72), (1536, 576), (3072, 1024), (1000, 4096)])
@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 513, 2048])
def test_like_float64(library: ctypes.CDLL, poisoned: list[torch.Tensor], num_tokens: int, hidden: int, inner: int, kernel: str) -> None:
    x, weight = operands(num_tokens, hidden, inner)
    assert unsupported_reason(x, weight) is None
    result = run_silu_mul_gemm(library, kernel, x, weight)
    reference = expected(x, weight)
    # Sums are float32's, and one rounding to bfloat16 is at most 2⁻⁹ of a value.
    torch.testing.assert_close(result.double(), reference, rtol=2**-8, atol=1e-5 * inner**0.5)
    assert relative_error(result, reference) < 2.5e-3
    assert poisoned
    assert all((guard == 7.0).all() for guard in poisoned)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 16), (136, 144), (1536, 576), (1000, 4096)])
@pytest.mark.parametrize("num_tokens", [1, 127, 129, 513])
def test_float8_like_float64(
    library: ctypes.CDLL, poisoned: list[torch.Tensor], num_tokens: int, hidden: int, inner: int, per_row: bool
) -> None:
    x, weight = (t.to(torch.float8_e4m3fn) for t in (torch.randn(n, inner, device=CUDA) for n in (num_tokens, 2 * hidden)))
    scales = tuple((torch.rand(n if per_row else 1, device=CUDA) + 0.5) * inner**-0.25 for n in (num_tokens, 2 * hidden))
    assert unsupported_reason(x, weight, torch.float8_e4m3fn) is None
    result = run_silu_mul_gemm(library, SCALED, x, weight, scales=scales)
    reference = expected(*(t.double() * scale.double()[:, None] for t, scale in zip((x, weight), scales, strict=True)))
    assert relative_error(result, reference) < 4e-3  # tensor cores add up float8 with fewer bits
    assert poisoned
    assert all((guard == 7.0).all() for guard in poisoned)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_configuration_and_twice_the_same_bits(library: ctypes.CDLL, kernel: str) -> None:
    x, weight = operands(1111, 2568, 520)
    result = run_silu_mul_gemm(library, kernel, x, weight)
    torch.testing.assert_close(result.double(), expected(x, weight), rtol=2**-8, atol=1e-3)
    for _ in range(3):
        assert torch.equal(run_silu_mul_gemm(library, kernel, x, weight), result)


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_values(library: ctypes.CDLL, kernel: str) -> None:
    """A NaN of a row of x or W spoils its row or column alone; large gates of either sign do not overflow."""
    x, weight = operands(300, 264, 128)
    reference = expected(x, weight)
    x[17, 5] = float("nan")
    weight[40, 3] = float("nan")  # a gate
    weight[264 + 200, 9] = float("nan")  # an up-projection
    is_nan = torch.zeros(300, 264, dtype=torch.bool, device=CUDA)
    is_nan[17], is_nan[:, 40], is_nan[:, 200] = True, True, True
    result = run_silu_mul_gemm(library, kernel, x, weight)
    assert torch.equal(result.isnan(), is_nan)
    torch.testing.assert_close(result[~is_nan].double(), reference[~is_nan], rtol=2**-8, atol=1e-3)

    x = torch.ones(3, 64, device=CUDA).bfloat16() * torch.tensor([[1.0], [-1.0], [0.0]], device=CUDA).bfloat16()
    weight = torch.full((16, 64), 100.0, device=CUDA).bfloat16()  # gates and ups of ±6400 and 0
    torch.testing.assert_close(run_silu_mul_gemm(library, kernel, x, weight).double(), expected(x, weight), rtol=2**-8, atol=1e-6)


def test_the_choice(library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Tuner("a device", [tmp_path])
    monkeypatch.setattr(fastest_kernel, "tuner_of", lambda device: tuner)
    for num_tokens in (512, 460):  # one range
        x, weight = operands(num_tokens, 1024, 256)
        result = silu_mul_linear(x, weight)
        torch.testing.assert_close(result.double(), expected(x, weight), rtol=2**-6, atol=1e-2)
    [file] = stored_files(tmp_path)
    assert (file.kind, file.num_problems) == ("silu_mul_linear", 1)
    not_taken = x[:, :252], weight[:, :252]
    torch.testing.assert_close(silu_mul_linear(*not_taken).double(), expected(*not_taken), rtol=2**-6, atol=1e-2)


@pytest.mark.parametrize("kernel", [SEPARATE, *KERNELS])
def test_chunks_of_a_long_prompt(library: ctypes.CDLL, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silu_mul_gemm, "fastest_kernel", lambda *_, **__: kernel)
    x, weight = operands(2 * 2048 + 1000, 256, 128)
    result, reference = silu_mul_linear(x, weight), expected(x, weight)
    assert relative_error(result, reference) < 5e-3
