"""Which linears keep the plain weight for oneDNN's product: what pays, what is said about it, and that nothing is measured twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.compiler.artifacts import library_tuner
from compile_and_serve.compiler.artifacts.library_tuner import CpuLibraryTuner
from compile_and_serve.compiler.rewrite.library_choice import SIZES, LibraryChoice, LinearShape, copies_sentence

CPU = torch.device("cpu")
SHAPE = LinearShape(
    out_features=512, in_features=512, dtype=torch.bfloat16, has_norm=True, silu_mul=True, has_bias=True, has_residual=True
)  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "min_tokens"),
    [
        ((0.8, 1.5, 3.0), 128),
        ((1.3, 1.4, 3.0), 32),
        ((1.1, 1.1, 1.2), None),  # faster, but not by what a second copy costs
        ((3.0, 1.0, 1.1), None),
        ((3.0, 1.0, 2.0), 512),
    ],
)
def test_the_library_takes_the_sizes_from_which_on_a_copy_pays(
    gains: tuple[float, ...], min_tokens: int | None
) -> None:
    choice = LibraryChoice(shape=SHAPE, ours=gains, library=(1.0,) * len(SIZES))
    assert choice.min_tokens == min_tokens
    sentence = choice.sentence()
    assert sentence.startswith("bfloat16 [512, 512] with norm, bias, SiLU-mul, residual: ")
    assert "/".join(f"{gain:.2f}" for gain in gains) in sentence
    assert "0.5 MiB for a second copy" in sentence
    assert (f"from {min_tokens} tokens on" if min_tokens else "our kernel at all sizes") in sentence
    assert copies_sentence([SHAPE, SHAPE]) == "second copies of 2 weights take 1.0 MiB"


@pytest.mark.parametrize(
    ("rounds", "least", "min_tokens"),
    [([[5.0, 1.0, 5.0], [4.0, 4.0, 0.9]], (1.0, 0.9), None), ([[3.0, 5.0, 5.0], [9.0, 1.0, 9.0]], (3.0, 1.0), 32)],
)
def test_other_work_on_the_machine_does_not_decide(
    rounds: list[list[float]], least: tuple[float, float], min_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_tuner, "call_seconds", lambda *_arguments, **_options: rounds)
    choice = CpuLibraryTuner(CPU, []).choose(SHAPE)
    assert choice is not None
    assert (choice.ours, choice.library, choice.min_tokens) == ((least[0],) * 3, (least[1],) * 3, min_tokens)


def test_a_choice_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_tuner, "ROUNDS", 1)
    monkeypatch.setattr(library_tuner, "MAX_OUTPUTS", 64)
    first = CpuLibraryTuner(CPU, [tmp_path]).choose(SHAPE)
    assert first is not None
    assert first.failure == ""
    assert len(first.ours) == len(first.library) == len(SIZES)
    assert min(*first.ours, *first.library) > 0

    def not_again(*args: object, **options: object) -> None:
        raise AssertionError("it was measured again")

    monkeypatch.setattr(library_tuner, "call_seconds", not_again)
    tuner = CpuLibraryTuner(CPU, [tmp_path])
    assert tuner.choose(SHAPE) == first
    other = LinearShape(out_features=512, in_features=512, dtype=torch.bfloat16)
    failed = tuner.choose(other)
    assert failed is not None
    assert failed.min_tokens is None
    assert "could not be measured (AssertionError: it was measured again)" in failed.sentence()
    small = LinearShape(out_features=64, in_features=64, dtype=torch.bfloat16)
    assert tuner.choose(small) is None
