"""The fastest candidate is measured once for each problem and kept; where nothing may be measured, the first is the choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.tuning.store import stored_files
from compile_and_serve.custom_ops.tuning.token_ranges import token_range, token_ranges
from compile_and_serve.custom_ops.tuning.tuner import Measurement, Problem, Tuner, device_name, tuner_of, unmeasured_token_counts


def problem(name: str, num_tokens: int | None) -> Problem:
    return Problem(kind="linear", name=name, num_tokens=num_tokens)


def times(asked: list[float]) -> Callable[[float], float]:
    """Candidates are their own times; a negative one does not run."""

    def time(candidate: float) -> float:
        asked.append(candidate)
        if candidate < 0:
            raise RuntimeError("not for this size")
        return candidate

    return time


def test_the_fastest_is_chosen_once_and_kept(tmp_path: Path) -> None:
    asked: list[float] = []
    candidates, time = {"a": 3.0, "b": 2.0, "c": -1.0}, times(asked)
    tuner = Tuner("a device", [tmp_path / "cache"])
    assert tuner.fastest(problem("x", 5), candidates, None) == "a"  # nothing may be measured
    assert tuner.fastest(problem("x", 5), candidates, time) == "b"
    assert tuner.fastest(problem("x", 16), candidates, time) == "b"
    assert asked == [3.0, 2.0, -1.0]
    assert tuner.fastest(problem("x", 17), candidates, time) == "b"
    assert len(asked) == 6  # another range
    later = Tuner("a device", [tmp_path / "cache"])
    assert later.fastest(problem("x", 5), candidates, None) == "b"
    assert later.fastest(problem("x", 5), {"a": 3.0, "c": -1.0}, None) == "a"  # the kept one is not among them
    assert Tuner("another device", [tmp_path / "cache"]).fastest(problem("x", 5), candidates, None) == "a"
    assert tuner.fastest(problem("y", 5), {"c": -1.0}, time) == "c"
    assert len(asked) == 6  # there is no other
    assert tuner.fastest(problem("z", 5), {"c": -1.0, "d": -2.0}, time) == "c"  # none runs
    assert len(asked) == 8
    assert tuner.fastest(problem("z", 6), {"c": -1.0, "d": -2.0}, time) == "c"
    assert len(asked) == 8  # not tried again
    [file] = stored_files(tmp_path / "cache")
    assert (file.kind, file.device, file.num_problems, file.is_current) == ("linear", "a device", 3, True)


def test_a_candidate_without_memory_may_run_at_the_next_start(tmp_path: Path) -> None:
    def time(candidate: float) -> float:
        if candidate == 1.0:
            raise torch.OutOfMemoryError("out of memory")
        return candidate

    tuner = Tuner("a device", [tmp_path])
    assert tuner.fastest(problem("x", 5), {"a": 1.0, "b": 2.0}, time) == "b"
    assert tuner.fastest(problem("x", 5), {"a": 1.0, "b": 2.0}, None) == "b"
    assert Tuner("a device", [tmp_path]).kept(problem("x", 5)) is None


def test_all_folders_are_read_and_the_last_is_written(tmp_path: Path) -> None:
    candidates, time = {"a": 2.0, "b": 1.0}, times([])
    Tuner("a device", [tmp_path / "first"]).fastest(problem("x", 1), candidates, time)
    both = Tuner("a device", [tmp_path / "first", tmp_path / "last"])
    assert both.fastest(problem("x", 1), candidates, None) == "b"
    assert both.fastest(problem("y", 1), candidates, time) == "b"
    assert [file.num_problems for name in ("first", "last") for file in stored_files(tmp_path / name)] == [1, 1]
    nothing_kept = Tuner("a device")
    assert nothing_kept.fastest(problem("x", 1), candidates, time) == "b"
    assert nothing_kept.fastest(problem("x", 1), candidates, None) == "b"


def test_times_of_several_sizes_come_back_as_they_were_measured(tmp_path: Path) -> None:
    measured = Measurement(seconds={"a": (1.0, 9.0), "b": (2.0, 2.0), "c": (0.1, math.inf)})
    assert measured.fastest == "b"
    tuner = Tuner("a device", [tmp_path])
    assert tuner.measure(problem("x", None), ("a", "b", "c"), lambda: measured) == measured
    kept = Tuner("a device", [tmp_path]).kept(problem("x", None))
    assert kept is not None
    assert {name: tuple(seconds) for name, seconds in kept.seconds.items()} == measured.seconds


def test_ranks_agree_on_what_one_has_kept(tmp_path: Path) -> None:
    of_rank_0 = Measurement(seconds={"a": (2.0,), "b": (1.0,)})
    tuner = Tuner("a device", [tmp_path])
    mine = tuner.measure(problem("x", None), ("a", "b"), lambda: Measurement(seconds={"a": (1.0,), "b": (2.0,)}))
    assert mine is not None
    assert mine.fastest == "a"
    agreed = tuner.measure(problem("x", None), ("a", "b"), None, agree=lambda kept: of_rank_0)
    assert agreed is of_rank_0


def test_token_counts_to_measure_before_serving() -> None:
    tuner, time, both = Tuner("a device"), times([]), {"a": 1.0, "b": 2.0}
    assert tuner.unmeasured_token_counts(100) == ()  # nothing was asked for
    tuner.fastest(problem("x", 1), {"a": 1.0}, time)
    tuner.fastest(problem("x", 40), both, time)
    assert tuner.unmeasured_token_counts(100) == (16, 32)  # it was not asked for with more
    tuner.fastest(problem("x", 100), both, None)
    assert tuner.unmeasured_token_counts(100) == (16, 32, 100)
    assert tuner.unmeasured_token_counts(1) == ()
    tuner.fastest(problem("y", 40), both, None)
    assert tuner.unmeasured_token_counts(64) == (1, 16, 32, 64)
    for count in (1, 16, 32, 64):
        for name in ("x", "y"):
            tuner.fastest(problem(name, count), both, time)
    assert tuner.unmeasured_token_counts(64) == ()
    tuner.fastest(problem("x", 100), both, time)
    tuner.fastest(problem("large", 300), both, None, min_tokens=65)
    tuner.fastest(problem("large", 100), both, time, min_tokens=65)
    assert tuner.unmeasured_token_counts(64) == ()
    assert tuner.unmeasured_token_counts(300) == (192, 256, 300)
    # A chunk; longer ones may come.
    tuner.fastest(problem("in chunks", 1024), both, None, min_tokens=512, max_tokens=1100)
    assert tuner.unmeasured_token_counts(2048)[-3:] == (960, 1024, 1152)


def test_ranges_of_token_counts() -> None:
    assert [token_range(n) for n in (0, 1, 2, 16, 17, 64, 65, 4096)] == [1, 1, 16, 16, 32, 64, 128, 4096]
    ends = token_ranges(16384)
    assert ends[:10] == [1, 16, 32, 64, 128, 192, 256, 320, 384, 448]
    assert ends[-7:] == [4096, 6144, 8192, 10240, 12288, 14336, 16384]
    assert max(b / a for a, b in pairwise(ends) if 512 <= a < 4096) <= 1.125
    assert all(token_range(end) == end for end in ends)
    assert all(token_range(n) == next(end for end in ends if end >= n) for n in range(1, 16385, 7))


def test_a_cpu_is_named_by_its_model_and_threads() -> None:
    name = device_name(torch.device("cpu"))
    assert f"{torch.get_num_threads()} threads" in name
    assert unmeasured_token_counts(torch.device("cpu"), 100) == ()


def test_a_device_has_one_tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    device = torch.device("cuda", 63)
    tuner = tuner_of(device)
    assert tuner_of(device) is tuner
    tuner.fastest(problem("x", 1), {"a": 2.0, "b": 1.0}, times([]))
    assert [file.device for file in stored_files(tmp_path / "compile-and-serve" / "tuning")] == ["a device"]
