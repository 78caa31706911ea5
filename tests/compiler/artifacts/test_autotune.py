"""Measured choices: what wins is used, what loses is left to Inductor with its reason, and nothing is measured twice."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_and_serve.compiler.artifacts import autotune
from compile_and_serve.compiler.artifacts.autotune import Autotuner
from compile_and_serve.compiler.compat import fake_mode_with_symbols
from compile_and_serve.compiler.inductor import start_inductor
from compile_and_serve.compiler.passes.fuse_silu_mul import FuseSiluMul
from compile_and_serve.compiler.rewrite.fusion_choice import TOKENS, FusionChoice

CPU = torch.device("cpu")


def activations() -> torch.Tensor:
    mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
    with mode:
        return torch.empty(symbols["tokens"], 48, device="meta")


def quick(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, ...]:
    return (x * factor,)


def slow(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, ...]:
    for _ in range(50):
        x = x + factor
    return (x,)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run as they are written."""
    run = SimpleNamespace
    monkeypatch.setattr(autotune, "compile_piece", lambda gm, device, folder: run(run=lambda arguments: gm(*arguments)))


@pytest.mark.exhaustive
def test_inductors_code_is_what_is_measured_against(tmp_path: Path) -> None:
    with start_inductor(CPU, tmp_path) as wait:
        tuner = Autotuner(CPU, [], before_measuring=wait)
        choice = tuner.choose("fuse_silu_mul", FuseSiluMul.ours, FuseSiluMul.plain, [activations()])
    assert len(choice.ours) == len(choice.inductor) == len(TOKENS)
    assert all(seconds > 0 for seconds in (*choice.ours, *choice.inductor))


@pytest.mark.usefixtures("uncompiled")
def test_the_faster_one_is_chosen_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = Autotuner(CPU, [tmp_path])
    better = tuner.choose("better", quick, slow, [activations()], 2.0)
    worse = tuner.choose("worse", slow, quick, [activations()], 2.0)
    assert better.use_ours
    assert not worse.use_ours
    assert "faster than Inductor's code" in better.sentence()
    assert "slower than Inductor's code" in worse.sentence()
    assert worse.sentence().endswith("left to Inductor")
    assert len(better.ours) == len(better.inductor) == len(TOKENS)

    def not_again(*args: object) -> None:
        raise AssertionError("it was measured again")

    monkeypatch.setattr(autotune, "compile_piece", not_again)
    assert tuner.choose("better", quick, slow, [activations()], 2.0) == better
    assert Autotuner(CPU, [tmp_path]).choose("better", quick, slow, [activations()], 2.0) == better
    another = Autotuner(CPU, [tmp_path]).choose("better", quick, slow, [activations()], 3.0)  # another constant is another site
    assert another.failure == "AssertionError: it was measured again"


def test_a_forced_pass_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "compile_piece", None)
    choice = Autotuner(CPU, [], frozenset({"worse"})).choose("worse", slow, quick, [activations()], 2.0)
    assert choice == FusionChoice(use_ours=True)
    assert choice.sentence() == "fused without measuring"


def test_what_cannot_be_measured_is_left_to_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("out of memory\nwith many lines")

    monkeypatch.setattr(autotune, "compile_piece", out_of_memory)
    choice = Autotuner(CPU, [tmp_path]).choose("any", quick, quick, [activations()], 1.0)
    assert not choice.use_ours
    assert choice.sentence() == "it could not be measured (OutOfMemoryError: out of memory): left to Inductor"
    assert list(tmp_path.iterdir()) == []  # it is tried again


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("ours", "use_ours", "words"),
    [(0.5, True, "100% faster"), (0.99, False, "only 1% faster than Inductor's code"), (2.0, False, "100% slower")],
)
def test_a_fusion_has_to_earn_its_place(ours: float, use_ours: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "call_seconds", lambda calls, device, **options: [[2e-6, 1e-6], [ours * 1e-6, 1.0]])
    choice = Autotuner(CPU, []).choose("any", quick, quick, [activations()], 1.0)
    assert choice.use_ours is use_ours
    assert words in choice.sentence()
