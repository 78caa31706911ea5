"""The fastest way is measured once a problem and kept; where nothing may be measured, the first is taken."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.tuning.tuner import (
    Choices,
    fastest,
    no_measuring,
    token_range,
    token_ranges,
    unmeasured_token_counts,
)


def times(asked: list[str], seconds: dict[str, float]) -> Callable[[str], float]:
    def measure(name: str) -> float:
        asked.append(name)
        if seconds[name] < 0:
            raise RuntimeError("not for this size")
        return seconds[name]

    return measure


def test_the_fastest_is_chosen_once_and_kept(tmp_path: Path) -> None:
    asked: list[str] = []
    names, seconds = ("a", "b", "c"), times(asked, {"a": 3.0, "b": 2.0, "c": -1.0})
    file = tmp_path / "cache" / "choices.json"
    choices = Choices(file)
    assert choices.get("x", 5, names, None) == "a"  # inside a capture nothing is measured
    assert choices.get("x", 5, names, seconds) == "b"
    assert choices.get("x", 16, names, seconds) == "b"
    assert asked == ["a", "b", "c"]
    assert choices.get("x", 17, names, seconds) == "b"
    assert len(asked) == 6  # another range
    assert Choices(file).get("x", 5, names, None) == "b"
    assert Choices(file).get("x", 5, ("a", "c"), None) == "a"  # what was kept is not among them
    assert choices.get("y", 5, ("c",), seconds) == "c"
    assert len(asked) == 6  # there is no other
    assert choices.get("z", 5, ("c", "c"), seconds) == "c"  # all fail
    count = len(asked)
    assert choices.get("z", 6, ("c", "c"), seconds) == "c"
    assert len(asked) == count  # once is enough
    assert json.loads(file.read_text()) == {"x T<=16": "b", "x T<=32": "b", "y T<=16": "c"}


def test_a_file_that_several_write_or_nobody_can(tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    one, another, seconds = Choices(file), Choices(file), times([], {"a": 1.0, "b": 2.0})
    assert one.get("one", 1, ("a", "b"), seconds) == another.get("another", 1, ("b", "a"), seconds) == "a"
    assert json.loads(file.read_text()) == {"one T<=1": "a", "another T<=1": "a"}
    file.write_text("{ damaged")
    assert Choices(file).get("one", 2, ("b", "a"), seconds) == "a"
    assert json.loads(file.read_text()) == {"one T<=16": "a"}
    (tmp_path / "file").write_text("")
    assert (
        Choices(tmp_path / "file" / "choices.json").get("one", 1, ("b", "a"), seconds) == "a"
    )  # not kept, which is logged


def test_token_counts_to_measure_before_serving(tmp_path: Path) -> None:
    choices, seconds = Choices(tmp_path / "choices.json"), times([], {"a": 1.0, "b": 2.0})
    assert choices.unmeasured(100) == ()  # nobody asked for anything
    choices.get("x", 1, ("a",), seconds)
    choices.get("x", 40, ("a", "b"), seconds)
    assert choices.unmeasured(100) == (16, 32)  # nobody asked for it with more
    choices.get("x", 100, ("a", "b"), None)
    assert choices.unmeasured(100) == (16, 32, 100)
    assert choices.unmeasured(1) == ()
    choices.get("y", 40, ("a", "b"), None)  # inside a capture
    assert choices.unmeasured(64) == (1, 16, 32, 64)
    for count in (1, 16, 32, 64):
        for family in ("x", "y"):
            choices.get(family, count, ("a", "b"), seconds)
    assert choices.unmeasured(64) == ()
    choices.get("x", 100, ("a", "b"), seconds)
    choices.get("large", 300, ("a", "b"), None, first=65)
    choices.get("large", 100, ("a", "b"), seconds, first=65)  # nobody asks for it with fewer
    assert choices.known("large", 100, first=65) == "a"
    assert choices.unmeasured(64) == ()
    assert choices.unmeasured(300) == (192, 256, 300)
    choices.get("in chunks", 1024, ("a", "b"), None, first=512, most=1100)  # a chunk; longer ones may come
    assert choices.unmeasured(2048)[-3:] == (960, 1024, 1152)


def test_ranges_of_token_counts() -> None:
    assert [token_range(n) for n in (0, 1, 2, 16, 17, 64, 65, 4096)] == [1, 1, 16, 16, 32, 64, 128, 4096]
    ends = token_ranges(16384)
    assert ends[:10] == [1, 16, 32, 64, 128, 192, 256, 320, 384, 448]
    assert ends[-7:] == [4096, 6144, 8192, 10240, 12288, 14336, 16384]
    assert max(b / a for a, b in pairwise(ends) if 512 <= a < 4096) <= 1.125
    assert all(token_range(end) == end for end in ends)
    assert all(token_range(n) == next(end for end in ends if end >= n) for n in range(1, 16385, 7))


def test_nobody_waits_for_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake device: a request's step takes what is known, a step before serving measures."""
    choices, asked = Choices(tmp_path / "choices.json"), list[str]()
    monkeypatch.setattr("compile_and_serve.custom_ops.tuning.tuner.choices_of", lambda device: choices)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)

    class Timer:
        def __init__(self, weight: object, *, is_cold: bool) -> None: ...

        def seconds(self, run: Callable[[torch.Tensor], object]) -> float:
            asked.append("measured")
            return float(len(asked) == 1)

        def clear(self) -> None: ...

    monkeypatch.setattr("compile_and_serve.custom_ops.tuning.tuner._Timer", Timer)
    weight = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    runs: dict[str, Callable[[torch.Tensor], object]] = {"a": lambda weight: weight, "b": lambda weight: weight}
    with no_measuring():
        assert fastest("x", 100, runs, weight) == "a"  # type: ignore[arg-type]
    assert not asked
    assert fastest("x", 100, runs, weight) == "b"  # type: ignore[arg-type]
    with no_measuring():
        assert fastest("x", 100, runs, weight) == "b"  # type: ignore[arg-type]
    assert len(asked) == 2


def test_ahead_all_that_will_be_measured_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fake device: what runs is compiled, and nothing is chosen by it."""
    choices, ran = Choices(tmp_path / "choices.json"), list[str]()
    monkeypatch.setattr("compile_and_serve.custom_ops.tuning.tuner.choices_of", lambda device: choices)
    monkeypatch.setattr("compile_and_serve.custom_ops.tuning.tuner.is_compiling_ahead", lambda: True)

    def fails(weight: object) -> None:
        ran.append("b")
        raise RuntimeError("too much shared memory")

    weight = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    runs: dict[str, Callable[[torch.Tensor], object]] = {"a": lambda weight: ran.append("a"), "b": fails}
    with no_measuring():
        assert fastest("x", 100, runs, weight) == "a"  # type: ignore[arg-type]
    assert not ran
    assert fastest("x", 100, runs, weight) == "a"  # type: ignore[arg-type]
    assert ran == ["a", "b"]
    assert choices.known("x", 100) is None
    choices.get("x", 100, ("a", "b"), lambda name: float(name == "a"))
    assert fastest("x", 100, runs, weight) == "b"  # type: ignore[arg-type]
    assert ran == ["a", "b"]


def test_without_a_gpu_nothing_is_measured() -> None:
    runs = {"a": lambda weight: weight, "b": lambda weight: weight}
    assert fastest("x", 100, runs, torch.zeros(4)) == "a"
    assert unmeasured_token_counts(torch.device("cpu"), 100) == ()
