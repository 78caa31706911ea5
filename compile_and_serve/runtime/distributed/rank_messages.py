"""What travels between an engine and its ranks (ZMQ, msgspec's msgpack)."""

from __future__ import annotations

import msgspec

from compile_and_serve.runtime.scheduler.step_messages import (
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerInfo,
    WorkerStats,
)


class StartRank(msgspec.Struct, tag="start"):
    """Once all ranks are loaded: allocate the cache of so many blocks, warm up, then take steps."""

    num_blocks: int


class RunStep(msgspec.Struct, tag="step"):
    scheduled: SchedulerOutput


class RunIdleTask(msgspec.Struct, tag="idle"):
    """Do one piece of work that can wait."""


class StopRank(msgspec.Struct, tag="stop"):
    pass


ToRank = StartRank | RunStep | RunIdleTask | StopRank


class RankStage(msgspec.Struct, tag="stage"):
    """Progress of start-up."""

    rank: int
    stage: str
    seconds: float
    detail: str


class RankLoaded(msgspec.Struct, tag="loaded"):
    rank: int
    info: WorkerInfo


class RankReady(msgspec.Struct, tag="ready"):
    rank: int


class StepDone(msgspec.Struct, tag="done"):
    """From rank 0 alone: all ranks sample the same tokens."""

    output: ModelRunnerOutput
    stats: WorkerStats


class IdleTaskDone(msgspec.Struct, tag="idle"):
    """From rank 0 alone. worked: whether there was something to do."""

    worked: bool
    stats: WorkerStats


class RankBusy(msgspec.Struct, tag="busy"):
    """From time to time, while there are steps: how many of them the rank has begun and how many are over, and how many collectives
    it has entered (on the CPU).
    """

    rank: int
    begun: int
    over: int
    collectives: int


class RankFailed(msgspec.Struct, tag="failed"):
    """Last words. reason: one sentence, no stack. is_mistake: it is the user's, about options or files."""

    rank: int
    reason: str
    is_mistake: bool


FromRank = RankStage | RankLoaded | RankReady | StepDone | IdleTaskDone | RankBusy | RankFailed
