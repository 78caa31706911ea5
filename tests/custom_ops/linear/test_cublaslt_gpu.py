# ruff: noqa: E402
"""Products by cuBLASLt's algorithms against float64: each that the heuristic offers, and the one that is chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.linear import cublaslt
from compile_and_serve.custom_ops.tuning import tuner as choices_module
from compile_and_serve.custom_ops.tuning.tuner import Choices

CUDA = torch.device("cuda")


def operands(num_tokens: int, out: int, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, inner + 8, device=CUDA).bfloat16()[:, :inner]
    weight = (torch.randn(out, inner, device=CUDA) * inner**-0.5).bfloat16()
    return x, weight, torch.randn(num_tokens, out + 16, device=CUDA).bfloat16()[:, :out]


def error(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> float:
    expected = x.double() @ weight.double().T + (0 if residual is None else residual.double())
    return ((result.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "out", "inner"), [(65, 576, 576), (100, 128, 1536), (300, 4096, 4096), (2048, 6144, 512)]
)
def test_every_algorithm(num_tokens: int, out: int, inner: int, has_residual: bool) -> None:
    x, weight, residual = operands(num_tokens, out, inner)
    product = cublaslt._product(
        x.device, num_tokens, out, inner, x.stride(0), residual.stride(0) if has_residual else 0
    )
    found = product.algorithms()
    assert found
    for name in found:
        assert product.takes(name)
        result = product.run(name, x, residual if has_residual else None, weight)
        assert error(result, x, weight, residual if has_residual else None) < 3e-3


@pytest.mark.parametrize("has_residual", [False, True])
def test_the_choice_is_kept_and_serves_its_whole_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_residual: bool
) -> None:
    kept = Choices(tmp_path / "choices.json")
    for module in (cublaslt, choices_module):
        monkeypatch.setattr(module, "choices_of", lambda device: kept)
    for num_tokens in (256, 193, 200):  # one range
        x, weight, residual = operands(num_tokens, 4096, 1024)
        result = cublaslt.linear(x, weight, residual if has_residual else None)
        assert error(result, x, weight, residual if has_residual else None) < 3e-3
    assert len((tmp_path / "choices.json").read_text().splitlines()) == 3


def test_what_it_does_not_take_is_torchs() -> None:
    x, weight, residual = operands(70, 576, 576)
    for given in (
        (x.float(), weight.float()),
        (x[:, 1:], weight[:, 1:]),
        (x[:0], weight),
        (x, weight[:37], residual[:, :37]),
    ):
        result = cublaslt.linear(*given)
        assert result.shape == (given[0].shape[0], given[1].shape[0])
        if result.numel():
            assert error(result, given[0], given[1], given[2] if len(given) > 2 else None) < 3e-3
