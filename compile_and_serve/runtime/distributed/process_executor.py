"""`DistributedExecutor`: every rank is a process, on this host or on others. A `RankHost` starts the processes.

A command is encoded once and sent to each rank over its own socket. All answers arrive at one socket. Start-up: every
rank loads its part of the model, the smallest number of KV blocks that any rank has room for becomes the number of all,
and every rank warms up. Whenever the engine waits for an answer, it also checks for ranks that have ended.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import zmq

from compile_and_serve.runtime.child_process import LINGER_MS
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.gather import GatheredTransfers
from compile_and_serve.runtime.distributed.data_groups import joined_outputs, joined_stats
from compile_and_serve.runtime.distributed.executor import STUCK_SECONDS, RankFailedError, StepHandle, report_shared_stages
from compile_and_serve.runtime.distributed.rank_messages import (
    AdapterRead,
    CompileGrammar,
    DropAdapter,
    FromRank,
    IdleTaskDone,
    JoinRanks,
    LoadAdapter,
    ProfileRank,
    ProgressReport,
    RankFailed,
    RankLoaded,
    RankReady,
    RankStage,
    RankStaged,
    RunIdleTask,
    RunStep,
    SleepChanged,
    SleepRank,
    StartRank,
    StepDone,
    StopRank,
    ToRank,
    TransfersEnded,
    WakeRank,
)
from compile_and_serve.runtime.distributed.rank_process import RankBootstrap
from compile_and_serve.runtime.distributed.socket_keys import EngineKeys
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, WorkerStats
from compile_and_serve.runtime.structured.compiler import GrammarCompiler
from compile_and_serve.runtime.text.load_tokenizer import load_model_tokenizer

logger = logging.getLogger(__name__)

_POLL_MS = 100
_STOP_SECONDS = 5.0
_REPORTS = 6  # progress reports of a rank within that time

Message = TypeVar("Message", RankStaged, RankLoaded, RankReady, StepDone, IdleTaskDone, SleepChanged)


class RankHost(Protocol):
    """Starts the rank processes and knows which of them have ended.

    rendezvous: where the ranks find each other, as torch.distributed's init_method. keys: of the sockets; None if only this user
    can reach them. cause_seconds: how long to wait for the true cause of a failure: one dead rank makes the others fail in their
    collectives.
    """

    rendezvous: str
    keys: EngineKeys | None
    cause_seconds: float

    def address(self, name: str) -> str:
        """ZMQ address to which the engine binds the socket `name`."""
        ...

    def device_index(self, rank: int) -> int:
        """Number of the rank's device among those that its process sees."""
        ...

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """Number of ranks, of all replicas, that share the cores and memory of this rank's host."""
        ...

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """Start the ranks without waiting for them."""
        ...

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, and how, e.g. "was ended by signal 9"."""
        ...

    def stop(self, seconds: float) -> None:
        """Wait `seconds` for the ranks to end, then kill the rest. May be called more than once."""
        ...


@dataclass(slots=True)
class _Launched:
    step: int
    parts: list[int] = field(default_factory=list)  # numbers of the data groups' own steps


@dataclass(slots=True)
class _Load:
    """Of an adapter, by all ranks. error: of the first that could not read it."""

    future: Future[Any]
    num_answers: int = 0
    error: str | None = None


@dataclass(slots=True)
class _RankProgress:
    """A rank's last report: (steps done, steps begun, collectives entered), and when it came by the executor's clock."""

    progress: tuple[int, int, int] = (0, 0, 0)
    reported_at: float = 0.0

    @property
    def steps_done(self) -> int:
        return self.progress[0]


class DistributedExecutor:
    """An `Executor` whose ranks run on a `RankHost`.

    on_stage: reports the start-up of rank 0. stuck_seconds: how long a step may go without any rank making progress.
    Construction raises `ValueError` (wrong options or files) or `RankFailedError`; the message names the rank.

    num_before: ranks of an engine that is to be replaced; they still run and hold the first devices. The ranks then do what they can beside
    these, and `join` does the rest, once these have ended. None: there is none, and `join` need not be called.
    """

    def __init__(
        self,
        config: EngineConfig,
        host: RankHost,
        on_stage: StageCallback,
        *,
        stuck_seconds: float = STUCK_SECONDS,
        num_before: int | None = None,
    ) -> None:
        self.mesh = config.mesh
        self._host = host
        self._stuck_seconds = stuck_seconds
        self._on_stage = [on_stage, *(report_shared_stages(on_stage, f"rank {rank}") for rank in range(1, self.mesh.size))]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._stats = [WorkerStats()] * self.mesh.data
        self._done: list[deque[StepDone]] = [deque() for _ in range(self.mesh.data)]  # results of each data group that came early
        self._has_failed = False
        self._progress = [_RankProgress() for _ in range(self.mesh.size)]
        self._num_launched = 0
        self._loads: dict[int, _Load] = {}
        self._transfers = GatheredTransfers(self.mesh.size)
        self._clock = 0.0  # seconds spent waiting for answers
        self._last_progress = 0.0  # by `_clock`
        self._last_poll = 0.0  # by the system's clock
        self._commands: list[zmq.Socket[bytes]] = []
        self._config = config
        try:
            host.launch(self._bootstraps(config, num_before))
            if num_before is not None:
                for _ in range(self.mesh.size):
                    self._receive(RankStaged)
            else:
                self._take_in()
        except BaseException:
            self._has_failed = True
            self.shutdown()
            raise

    def join(self) -> None:
        """Let staged ranks join and warm up. Raises as the construction does."""
        try:
            self._broadcast(JoinRanks())
            self._take_in()
        except BaseException:
            self._has_failed = True
            self.shutdown()
            raise

    def _take_in(self) -> None:
        """Agree on the number of KV blocks, and wait until every rank has warmed up."""
        loaded = [self._receive(RankLoaded) for _ in range(self.mesh.size)]
        num_blocks = min(message.info.num_blocks for message in loaded)
        if len(sizes := {message.info.block_size for message in loaded}) > 1:
            raise ValueError(
                f"Ranks take KV blocks of {' and '.join(map(str, sorted(sizes)))} tokens, as their hosts do not have the same kernels: "
                "give --block-size, or install the same packages on all hosts."
            )
        if any(message.info.groups != loaded[0].info.groups for message in loaded):
            raise ValueError("The stages of the model keep different state: each must have the same state groups as the others.")
        self._broadcast(StartRank(num_blocks))
        for _ in range(self.mesh.size):
            self._receive(RankReady)
        answering = next(message.info for message in loaded if message.rank == self.mesh.answering_rank)
        self.info = msgspec.structs.replace(answering, num_blocks=num_blocks)
        self._has_idle_tasks = answering.has_idle_tasks
        self._grammars = GrammarCompiler(lambda: load_model_tokenizer(self._config.model), answering.vocab_size)

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Send the step to every rank."""
        self._num_launched += 1
        if not scheduled.groups:
            self._broadcast(RunStep(scheduled))
            return _Launched(scheduled.step)
        per_group = self.mesh.size // self.mesh.data
        for group, part in enumerate(scheduled.groups):
            self._broadcast(RunStep(part), self._commands[group * per_group : (group + 1) * per_group])
        return _Launched(scheduled.step, [part.step for part in scheduled.groups])

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for the answering ranks. Raises `RankFailedError` if a rank failed or is gone."""
        assert isinstance(handle, _Launched)
        while not all(self._done):
            done = self._receive(StepDone)
            self._done[done.group].append(done)
        answers = [results.popleft() for results in self._done]
        self._stats = [done.stats for done in answers]
        parts = [done.output for done in answers]
        steps = handle.parts or [handle.step]
        assert [part.step for part in parts] == steps, ([part.step for part in parts], steps)
        output = joined_outputs(handle.step, parts) if handle.parts else parts[0]
        output.transfers = self._transfers.take()
        return output

    def compile_grammar(self, grammar: str, tenant: str = "") -> Future[Any]:
        """Compile a grammar of structured output here, to know whether it can be, and on every rank."""
        self._broadcast(CompileGrammar(grammar, tenant))
        return self._grammars.compile(grammar, tenant)

    def load_adapter(self, adapter: LoRARequest) -> Future[Any]:
        """Let every rank read an adapter in a thread. `poll`, and what waits for a step, end the future."""
        self._broadcast(LoadAdapter(adapter))
        loading: Future[Any] = Future()
        self._loads[adapter.lora_int_id] = _Load(loading)
        return loading

    def poll(self) -> None:
        """Take the answers to `load_adapter` that have arrived."""
        self._check_ended()
        while self._answers.poll(0):
            message = self._decoder.decode(self._answers.recv())
            if isinstance(message, RankFailed):
                self._raise_failure(message)
            is_report = self._is_report(message)
            assert is_report, message

    def drop_adapter(self, adapter_id: int) -> None:
        """Let every rank free an adapter's host memory."""
        self._broadcast(DropAdapter(adapter_id))

    def idle(self, *, requests_wait: bool = False) -> bool:
        """Run one deferrable task on every rank; False if there was none.

        Raises `RankFailedError` for a rank that is gone.
        """
        self._check_ended()
        if not self._has_idle_tasks:
            return False
        self._broadcast(RunIdleTask(requests_wait))
        done = self._receive(IdleTaskDone)
        self._stats[0] = done.stats
        if not requests_wait:  # otherwise other tasks may be left
            self._has_idle_tasks = done.did_work or "builds" in done.stats.pending_work
        return done.did_work

    def sleep(self, level: int) -> None:
        """Let every rank free its memory, and wait for that."""
        self._change_sleep(SleepRank(level))
        self._transfers = GatheredTransfers(self.mesh.size)  # the ranks have stopped all

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Let every rank bring parts of its memory back, and wait for that."""
        self._change_sleep(WakeRank(weights, kv_cache))
        self._has_idle_tasks = self.info.has_idle_tasks

    def _change_sleep(self, command: SleepRank | WakeRank | ProfileRank) -> None:
        self._broadcast(command)
        for _ in range(self.mesh.size):
            changed = self._receive(SleepChanged)
            if changed.rank == self.mesh.answering_rank:
                self._stats[0] = changed.stats

    def profile(self, folder: str) -> None:
        """Let every rank begin a trace, or write it, and wait for that."""
        self._change_sleep(ProfileRank(folder))

    def stats(self) -> WorkerStats:
        """The answering ranks' counters, as of their last answers."""
        return self._stats[0] if self.mesh.data == 1 else joined_stats(self._stats)

    def shutdown(self) -> None:
        """End the ranks. After a failure they are killed at once, since they may wait for each other forever."""
        if self._context.closed:
            return
        if not self._has_failed:
            for endpoint in self._commands:
                # The reason of a rank that died meanwhile no longer matters; the other ranks must still be told.
                with contextlib.suppress(ValueError, RankFailedError):
                    self._send(endpoint, self._encoder.encode(StopRank()))
        self._host.stop(0.0 if self._has_failed else _STOP_SECONDS)
        if self._host.keys is not None:
            self._host.keys.close()
        self._context.destroy(linger=0)

    def _bootstraps(self, config: EngineConfig, num_before: int | None) -> list[RankBootstrap]:
        """Bind one socket for each rank's commands and one for all answers."""
        host = self._host
        if host.keys is not None:
            host.keys.admit_ranks_only(self._context)
        self._answers, answers = self._bind(zmq.PULL, "answers")
        self._answers.setsockopt(zmq.RCVTIMEO, _POLL_MS)
        level = logging.getLogger("compile_and_serve").getEffectiveLevel()
        without_dump = replace(config, compile=replace(config.compile, dump_dir=None))
        bootstraps = []
        for index in range(self.mesh.size):
            endpoint, commands = self._bind(zmq.PUSH, f"rank-{index}")
            endpoint.setsockopt(zmq.SNDTIMEO, _POLL_MS)
            self._commands.append(endpoint)
            rank = Rank(
                index=index,
                mesh=self.mesh,
                device_index=host.device_index(index),
                rendezvous=host.rendezvous,
                num_sharing=host.num_sharing(index, config),
            )
            bootstraps.append(
                RankBootstrap(
                    config=config if index == 0 else without_dump,
                    rank=rank,
                    commands=commands,
                    answers=answers,
                    log_level=level,
                    report_seconds=self._stuck_seconds / _REPORTS,
                    keys=None if host.keys is None else host.keys.ranks,
                    log_format=current_format(),
                    is_staged=num_before is not None,
                    device_is_taken=index < (num_before or 0),
                )
            )
        return bootstraps

    def _bind(self, kind: int, name: str) -> tuple[zmq.Socket[bytes], str]:
        endpoint = self._context.socket(kind)
        endpoint.setsockopt(zmq.LINGER, LINGER_MS)
        endpoint.set_hwm(0)
        if self._host.keys is not None:
            self._host.keys.protect(endpoint)
        endpoint.bind(self._host.address(name))
        return endpoint, endpoint.getsockopt_string(zmq.LAST_ENDPOINT)

    def _broadcast(self, command: ToRank, endpoints: Sequence[zmq.Socket[bytes]] | None = None) -> None:
        data = self._encoder.encode(command)
        for endpoint in self._commands if endpoints is None else endpoints:
            self._send(endpoint, data)

    def _send(self, endpoint: zmq.Socket[bytes], data: bytes) -> None:
        while True:
            try:
                return endpoint.send(data)
            except zmq.Again:  # no peer: the rank has not connected yet, or it is gone
                self._check_ended()

    def _receive(self, kind: type[Message]) -> Message:
        self._last_progress, self._last_poll = self._clock, time.monotonic()
        while True:
            self._advance_clock()
            try:
                message = self._decoder.decode(self._answers.recv())
            except zmq.Again:
                self._check_ended()
                # A single rank waits for no other: its step may take long, and `_check_ended` sees its end.
                may_be_stuck = self.mesh.size > 1 and kind in (StepDone, IdleTaskDone)
                if may_be_stuck and self._clock > self._last_progress + self._stuck_seconds:
                    self._raise_stuck()
                continue
            if self._is_report(message):
                continue
            if isinstance(message, RankStage):
                self._on_stage[message.rank](message.stage, message.seconds, message.detail)
            elif isinstance(message, RankFailed):
                self._raise_failure(message)
            else:
                assert isinstance(message, kind), message
                return message

    def _advance_clock(self) -> None:
        """Count the time since the last poll. Time during which this process was suspended does not count."""
        now = time.monotonic()
        self._clock += min(now - self._last_poll, 2 * _POLL_MS / 1000)
        self._last_poll = now

    def _is_report(self, message: FromRank) -> bool:
        """Whether a message is one that may come at any time; then it is taken."""
        if isinstance(message, ProgressReport):
            self._record_progress(message)
        elif isinstance(message, AdapterRead):
            self._record_adapter(message)
        elif isinstance(message, TransfersEnded):
            self._transfers.add(message.transfers)
        else:
            return False
        return True

    def _record_adapter(self, read: AdapterRead) -> None:
        load = self._loads[read.adapter_id]
        load.num_answers += 1
        load.error = load.error or read.error
        if load.num_answers == self.mesh.size:
            del self._loads[read.adapter_id]
            if load.error is None:
                load.future.set_result(None)
            else:
                load.future.set_exception(AdapterError(load.error))

    def _record_progress(self, report: ProgressReport) -> None:
        rank = self._progress[report.rank]
        progress = (report.steps_done, report.steps_begun, report.collectives)
        if progress > rank.progress:
            self._last_progress = self._clock
        rank.progress, rank.reported_at = progress, self._clock

    def _raise_stuck(self) -> NoReturn:
        """Name the ranks that the others wait for: those that send no reports, else those that are furthest behind."""
        self._has_failed = True
        size = self.mesh.size
        busy = [i for i, rank in enumerate(self._progress) if rank.steps_done < self._num_launched]
        silent = [i for i in busy if self._clock > self._progress[i].reported_at + self._stuck_seconds / 2]
        least = min(rank.progress for rank in self._progress)
        behind = [i for i, rank in enumerate(self._progress) if rank.progress == least]
        duration = f"for {self._stuck_seconds:g} seconds"
        if 0 < len(silent) < size:
            raise RankFailedError(f"{_ranks(silent)} of {size} sent no sign of life {duration} while the others waited.")
        if len(behind) < size:
            raise RankFailedError(f"{_ranks(behind)} of {size} made no progress {duration} while the others waited.")
        task = "a step" if busy else "an idle task"
        raise RankFailedError(f"None of {size} ranks made progress {duration} during {task}.")

    def _check_ended(self) -> None:
        if self._host.ended():
            self._raise_failure()

    def _raise_failure(self, *received: RankFailed) -> NoReturn:
        """Raise the cause: the rank that ended without a message, else the first failure that a rank reported."""
        self._has_failed = True
        failures = list(received)
        deadline = time.monotonic() + self._host.cause_seconds
        while True:
            is_late = time.monotonic() > deadline  # before the last look: this process may be suspended in between
            ended = self._host.ended()
            try:
                message = self._decoder.decode(self._answers.recv())
                if isinstance(message, RankFailed):
                    failures.append(message)
                continue
            except zmq.Again:
                pass
            silent = ended.keys() - {failure.rank for failure in failures}
            if silent or is_late:
                break
        if silent:
            rank = min(silent)
            raise RankFailedError(f"Rank {rank} of {self.mesh.size} {ended[rank]}.", rank)
        first = failures[0]
        if first.is_user_error:
            raise ValueError(f"Rank {first.rank} of {self.mesh.size}: {first.reason}")
        raise RankFailedError(f"Rank {first.rank} of {self.mesh.size} {first.reason}", first.rank)


def _ranks(numbers: Sequence[int]) -> str:
    return f"Rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
