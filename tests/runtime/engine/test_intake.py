"""Requests that have come are added key by key, and no more of them in a turn than its time allows."""

from __future__ import annotations

import pytest

from compile_and_serve.runtime.engine.intake import ADD_SECONDS, Intake
from compile_and_serve.runtime.messages import AddRequest, EngineRequest, Sibling, Tenant
from compile_and_serve.runtime.sampling_params import SamplingParams


def request(name: str, *siblings: str) -> AddRequest:
    """Of the key that its first letter names; without a key, where that is "-"."""
    tenant = None if name[0] == "-" else Tenant(name[0])
    params = SamplingParams(max_tokens=1)
    one = EngineRequest(request_id=name, prompt_token_ids=[1], sampling_params=params, tenant=tenant)
    one.siblings = [Sibling(other) for other in siblings]
    return AddRequest(request=one)


class Door:
    """An intake whose requests take `seconds` each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.added: list[str] = []
        self.intake = Intake(self.add)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def add(self, client: bytes, message: AddRequest) -> None:
        self.added += message.request.request_ids
        self.now += self.seconds

    def put(self, *names: str, client: bytes = b"c") -> None:
        for name in names:
            self.intake.put(client, request(name))

    def turn(self, *unfinished: str) -> list[str]:
        self.added = []
        self.intake.take(unfinished)
        return self.added


def test_a_key_alone_is_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(monkeypatch, ADD_SECONDS)
    names = [f"a{number}" for number in range(50)]
    door.put(*names)
    assert door.turn() == names
    door.put(*names)
    assert door.turn("a") == names
    door.put("-1", "-2", "-3")
    assert door.turn("") == ["-1", "-2", "-3"], "without keys"
    assert not len(door.intake)


def test_beside_another_key_a_turn_adds_as_many_as_its_time_allows_one_of_each_key_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(monkeypatch, ADD_SECONDS * 0.4)
    door.put(*(f"a{number}" for number in range(6)), "b0", "b1")
    assert door.turn() == ["a0", "b0", "a1"]
    assert len(door.intake) == 5
    assert door.turn() == ["b1", "a2", "a3"]
    assert door.turn("b") == ["a4", "a5"]
    door.put("a6", "a7", "a8", "a9")
    assert door.turn("a", "b") == ["a6", "a7", "a8"]
    door.seconds = 10 * ADD_SECONDS
    assert door.turn("a", "b") == ["a9"], "one is always added"
    assert door.turn("a", "b") == []


def test_what_ends_before_it_is_added_never_is(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door(monkeypatch, ADD_SECONDS)
    door.put("a0", "a1", "a2")
    door.intake.put(b"c", request("a3", "a3.1"))
    door.intake.put(b"d", request("b0"))
    door.intake.drop(b"c", ["a1", "a3.1", "b0", "unknown"])
    assert door.added == ["a3", "a3.1"], "the engine ends one of them"
    door.added = []
    door.intake.take_all()
    assert door.added == ["a0", "b0", "a2"]
    door.intake.drop(b"c", ["a0"])
    assert not len(door.intake)
