"""What a warm-up does in idle moments once libraries of kernels were built beside the running engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.tuning.token_ranges import token_ranges
from compile_and_serve.runtime.runner import warm_up
from compile_and_serve.runtime.runner.warm_up import WarmUp

MAX_TOKENS = 100


class Graphs:
    """In the place of `GraphRunners`: 2 graphs, which are captured again after `renew`."""

    encoder = None

    def __init__(self, done: list[Any]) -> None:
        self._done, self.num_to_capture = done, 2

    def capture_next(self) -> bool:
        if self.num_to_capture == 0:
            return False
        self.num_to_capture -= 1
        self._done.append("capture")
        return True

    def renew(self) -> None:
        self._done.append("renew")
        self.num_to_capture = 2

    def capture_pieces_up_to(self, max_tokens: int | None) -> None:
        pass

    def next_piecewise_size(self) -> int | None:
        return None


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """running, built: numbers of libraries. done: what the warm-up did."""
    state = SimpleNamespace(running=1, built=0, done=[])

    def use() -> list[str]:
        state.built = 0
        state.done.append("use")
        return ["products"]

    monkeypatch.setattr(warm_up, "num_running", lambda: state.running)
    monkeypatch.setattr(warm_up, "num_building", lambda: state.running)
    monkeypatch.setattr(warm_up, "num_built_libraries", lambda: state.built)
    monkeypatch.setattr(warm_up, "use_built_libraries", use)
    monkeypatch.setattr(WarmUp, "_measure", lambda self, count: state.done.append(count))
    return state


def make(state: SimpleNamespace, *, is_alone: bool = True) -> WarmUp:
    runner: Any = SimpleNamespace(max_num_tokens=MAX_TOKENS, encoder=None)
    graphs: Any = Graphs(state.done)
    return WarmUp(runner, graphs, torch.float32, is_alone=is_alone)


def run_idle(warm: WarmUp) -> None:
    while warm.idle():
        pass


def test_built_libraries_are_used_measured_and_captured_in_idle_moments(state: SimpleNamespace) -> None:
    warm = make(state)
    run_idle(warm)
    assert state.done == ["capture", "capture"]
    assert warm.pending_work() == {"captures": 0, "choices": 0, "builds": 1}
    state.running, state.built = 0, 1
    assert not warm.idle(requests_wait=True)
    assert warm.pending_work()["builds"] == 1  # not before there are no requests
    run_idle(warm)
    assert state.done[2:] == ["use", *token_ranges(MAX_TOKENS), "renew", "capture", "capture"]
    assert warm.pending_work() == {"captures": 0, "choices": 0, "builds": 0}


def test_graphs_wait_until_all_kernels_are_chosen_unless_requests_need_them(state: SimpleNamespace) -> None:
    state.running, state.built = 0, 1
    warm = make(state)
    assert warm.idle()
    assert state.done == ["use", 1]
    assert warm.idle(requests_wait=True)
    assert state.done == ["use", 1, "capture"]
    run_idle(warm)
    assert state.done[3:] == [*token_ranges(MAX_TOKENS)[1:], "renew", "capture", "capture"]


def test_ranks_wait_for_each_other(state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(1, 0)]
    monkeypatch.setattr(warm_up, "gather_objects", lambda own: [own, *others])
    state.running = 0
    warm = make(state, is_alone=False)
    run_idle(warm)
    assert state.done == ["capture", "capture"]
    others[0] = (0, 1)
    run_idle(warm)
    assert state.done[2:4] == ["use", 1]
    state.built = 1  # what is built later waits for the next start
    run_idle(warm)
    assert warm.pending_work()["builds"] == 0
    assert state.done.count("use") == 1


def test_without_builds_nothing_is_done_again(state: SimpleNamespace) -> None:
    state.running = 0
    warm = make(state)
    run_idle(warm)
    assert state.done == ["capture", "capture"]
