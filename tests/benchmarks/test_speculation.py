"""What the benchmark of speculative decoding makes of device events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.speculation import DeviceTimes


def test_device_times_are_those_of_the_batch_with_and_without_drafts() -> None:
    now = 0.0

    class Event:
        def __init__(self) -> None:
            self.at = now

        def seconds_since(self, earlier: Event) -> float:
            return self.at - earlier.at

    class Work:
        """Takes 4 ms and 1 ms for each further token of a sequence."""

        def run(self, step: SimpleNamespace) -> None:
            nonlocal now
            now += 0.004 + 0.001 * (step.max_query_len - 1)

        def propose(self, last_tokens: object, wanted: dict[str, list[int]], *, is_ahead: bool = False) -> None:
            nonlocal now
            now += 0.0006

        def follow(self, target: SimpleNamespace, *, keeps_state_only: bool = False) -> None:
            nonlocal now
            now += 0.0002

    platform = SimpleNamespace(record_timed_event=Event, synchronize=lambda: None)
    steps, drafted, drafter = Work(), Work(), Work()
    runner = SimpleNamespace(steps=steps, plain_steps=steps, _drafted_steps=drafted, drafter=drafter, platform=platform)
    with DeviceTimes(SimpleNamespace(worker=SimpleNamespace(runner=runner)), batch=2, max_drafts=4) as times:
        for num_seqs, query_len in ((2, 128), (2, 1), (1, 3)):  # a prompt, a plain step, another batch
            steps.run(SimpleNamespace(num_seqs=num_seqs, max_query_len=query_len))
        step = SimpleNamespace(num_seqs=2, max_query_len=5)
        for wanted in (4, 2):
            drafter.propose({}, {"a": [-1] * wanted, "b": [-1] * wanted}, is_ahead=True)
            drafted.run(step)
            drafter.follow(SimpleNamespace(step=step), keeps_state_only=False)
    assert times.figures(is_drafting=False)["model_ms"] == pytest.approx(4.0)
    assert times.figures(is_drafting=True) == {"model_ms": pytest.approx(8.0), "draft_ms": pytest.approx(1.6 / 6, abs=1e-4)}
    before = now
    steps.run(step)
    assert now > before
    assert "run" not in vars(steps)
