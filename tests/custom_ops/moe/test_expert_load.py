"""Counts of the tokens of each expert: padding, synthetic steps, weights that move, and reads that do not wait."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.moe import expert_load
from compile_and_serve.custom_ops.moe.expert_load import ExpertLoad, count_call

IDS = torch.tensor([[0, 2], [2, 1], [3, 3]], dtype=torch.int32)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ExpertLoad:
    monkeypatch.setattr(expert_load, "READ_SECONDS", 0.0)
    return ExpertLoad(torch.device("cpu"))


def test_padding_and_synthetic_steps_do_not_count(load: ExpertLoad) -> None:
    first, second = torch.zeros(4, 3, 2), torch.zeros(4, 3, 2)
    assert load.read() == []
    for num_tokens in (0, 2, 1):
        load.begin_step(num_tokens)
        with load.counting():
            count_call(IDS, first)
            count_call(IDS.flip(0), second)
    count_call(IDS, first)  # counting is off
    assert load.read() == [[2, 1, 3, 0], [0, 1, 1, 4]]


def test_layers_keep_their_place_when_weights_move(load: ExpertLoad) -> None:
    load.begin_step(3)
    with load.counting():
        count_call(IDS, torch.zeros(4, 3, 2))
        load.forget_addresses()
        count_call(IDS, torch.zeros(4, 3, 2))
    assert load.read() == [[2, 2, 4, 4]]


def test_ids_are_not_read_while_kernels_are_compiled(load: ExpertLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "is_compiling_ahead", lambda: True)
    with load.counting():
        count_call(torch.full((1, 2), 1 << 30, dtype=torch.int32), torch.zeros(4, 3, 2))
    assert load.num_layers == 0


def test_a_read_does_not_wait(load: ExpertLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        is_done = False

        def query(self) -> bool:
            return self.is_done

    event = Event()
    monkeypatch.setattr(
        load, "_platform", type("Platform", (), {"download": staticmethod(torch.clone), "record_timed_event": staticmethod(lambda: event)})
    )
    load.begin_step(3)
    weights = torch.zeros(4, 3, 2)
    with load.counting():
        count_call(IDS, weights)
        assert load.read() == []
        count_call(IDS, weights)
    event.is_done = True
    assert load.read() == [[1, 1, 2, 2]]  # as it was when the read began
    monkeypatch.setattr(expert_load, "READ_SECONDS", 1e9)
    assert load.read() == []


def test_groups_count_their_own_tokens() -> None:
    """The tokens of two groups lie behind one another, padded to as many rows."""
    load = ExpertLoad(torch.device("cpu"), read_steps=1, num_groups=2)
    ids, down = torch.tensor([[0], [1], [2], [3], [3], [3]], dtype=torch.int32), torch.empty(4, 1)
    load.begin_step(1, 2)
    load.add(ids, down)
    load.begin_step(0, 0)
    load.add(ids, down)
    assert load.read() == [[1, 0, 0, 2]]
    load.begin_step(3, 0)
    load.add(ids, down)
    assert load.read() == [[2, 1, 1, 2]]
