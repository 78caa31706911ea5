"""`Canaries`: what `--verify-state` looks at, in the order of an engine's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compile_and_serve.runtime.messages import EngineStats, RequestOutput
from compile_and_serve.runtime.scheduler.canary import Canary
from compile_and_serve.runtime.scheduler.recomputation import Recomputation, without_own
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, StateGroupInfo


class Canaries:
    """Iterates over the canaries, one for each of the schedulers. computes: whether blocks are computed again, of one scheduler alone."""

    def __init__(self, schedulers: Sequence[Scheduler], groups: list[StateGroupInfo], *, steps_in_flight: int, computes: bool) -> None:
        self._canaries = [Canary(one.manager.pool, groups, one.requests, steps_in_flight=steps_in_flight) for one in schedulers]
        self.recomputation = Recomputation(schedulers[0], steps_in_flight=steps_in_flight) if computes else None

    def __iter__(self) -> Iterator[Canary]:
        return iter(self._canaries)

    def begin(self) -> None:
        """Before steps are scheduled."""
        if self.recomputation is not None:
            self.recomputation.begin()

    def plan(self, scheduled: SchedulerOutput) -> None:
        """Let a step look before it runs."""
        for canary, part in zip(self._canaries, scheduled.groups or [scheduled], strict=True):
            canary.plan(part)
        if self.recomputation is not None:
            self.recomputation.plan(scheduled)

    def take(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take what the step saw."""
        if self.recomputation is not None and (found := self.recomputation.take(scheduled, result)) is not None:
            self._canaries[0].end_holders(*found)
        for canary, part, own in zip(self._canaries, scheduled.groups or [scheduled], result.groups or [result], strict=True):
            canary.take(part, own)

    def without_own(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of clients' requests."""
        return outputs if self.recomputation is None else without_own(outputs)

    def add_to(self, stats: EngineStats) -> None:
        """Say what was checked and found."""
        for canary in self._canaries:
            canary.add_to(stats)
        if self.recomputation is not None:
            stats.canary_recomputed_blocks = self.recomputation.num_checked
