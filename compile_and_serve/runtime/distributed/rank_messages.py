"""Messages between an engine and its ranks (sent over ZMQ, encoded by msgspec as msgpack)."""

from __future__ import annotations

import msgspec

from compile_and_serve.runtime.connector.messages import FinishedTransfers
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, WorkerInfo, WorkerStats


class StartRank(msgspec.Struct, tag="start"):
    """All ranks are loaded: allocate a cache of `num_blocks` blocks, warm up, then run steps."""

    num_blocks: int


class JoinRanks(msgspec.Struct, tag="join"):
    """All ranks are staged, and those of before are gone: load what is not loaded, and join the others."""


class RunStep(msgspec.Struct, tag="step"):
    """Run one step."""

    scheduled: SchedulerOutput


class CompileGrammar(msgspec.Struct, tag="grammar"):
    """Compile a checked grammar of structured output in a thread: a request that needs it will come."""

    grammar: str
    tenant: str = ""  # the API key whose request it is


class LoadAdapter(msgspec.Struct, tag="load adapter"):
    """Read a LoRA adapter into host memory, in a thread, and answer with `AdapterRead`."""

    adapter: LoRARequest


class DropAdapter(msgspec.Struct, tag="drop adapter"):
    """Free an adapter's host memory."""

    adapter_id: int


class RunIdleTask(msgspec.Struct, tag="idle"):
    """Run one deferrable task, such as capturing a CUDA graph. requests_wait: see `Worker.idle`."""

    requests_wait: bool = False


class SleepRank(msgspec.Struct, tag="sleep"):
    """Free memory: see `Worker.sleep`."""

    level: int


class WakeRank(msgspec.Struct, tag="wake"):
    """Bring memory back: see `Worker.wake_up`."""

    weights: bool
    kv_cache: bool


class ProfileRank(msgspec.Struct, tag="profile"):
    """Begin a trace, or write it: see `Worker.profile`."""

    folder: str


class StopRank(msgspec.Struct, tag="stop"):
    """End the process."""


ToRank = (
    StartRank
    | JoinRanks
    | RunStep
    | CompileGrammar
    | LoadAdapter
    | DropAdapter
    | RunIdleTask
    | SleepRank
    | WakeRank
    | ProfileRank
    | StopRank
)


class RankStage(msgspec.Struct, tag="stage"):
    """A stage of the start-up has ended."""

    rank: int
    stage: str
    seconds: float
    detail: str


class RankStaged(msgspec.Struct, tag="staged"):
    """The rank has done what it can beside the ranks of before, and waits for `JoinRanks`."""

    rank: int


class RankLoaded(msgspec.Struct, tag="loaded"):
    """The rank holds its weights and waits for `StartRank`."""

    rank: int
    info: WorkerInfo


class RankReady(msgspec.Struct, tag="ready"):
    """The rank has warmed up and runs steps."""

    rank: int


class StepDone(msgspec.Struct, tag="done"):
    """The result of a step. Only the answering rank of each data group sends it: all ranks of its last stage sample the same tokens."""

    output: ModelRunnerOutput
    stats: WorkerStats
    group: int = 0


class TransfersEnded(msgspec.Struct, tag="transfers"):
    """A rank is through with transfers of a connector. Sent before the result of the step at whose end it was found out."""

    rank: int
    transfers: FinishedTransfers


class AdapterRead(msgspec.Struct, tag="adapter read"):
    """A rank has read an adapter, or could not: then error is one sentence."""

    rank: int
    adapter_id: int
    error: str | None


class IdleTaskDone(msgspec.Struct, tag="idle"):
    """The end of an idle task. Only the answering rank sends it. did_work: False if there was nothing to do."""

    did_work: bool
    stats: WorkerStats


class SleepChanged(msgspec.Struct, tag="sleep changed"):
    """The end of `SleepRank`, `WakeRank` or `ProfileRank`. Every rank sends it."""

    rank: int
    stats: WorkerStats


class ProgressReport(msgspec.Struct, tag="progress"):
    """How far a rank is, sent at intervals while steps run: steps begun, steps finished, and collectives entered (CPU only)."""

    rank: int
    steps_begun: int
    steps_done: int
    collectives: int


class RankFailed(msgspec.Struct, tag="failed"):
    """The rank's last message. reason: one sentence without a stack trace. is_user_error: wrong options or files."""

    rank: int
    reason: str
    is_user_error: bool


FromRank = (
    RankStage
    | RankStaged
    | RankLoaded
    | RankReady
    | StepDone
    | TransfersEnded
    | AdapterRead
    | IdleTaskDone
    | SleepChanged
    | ProgressReport
    | RankFailed
)
