"""A rank as a process of its own: a `Worker` between two sockets that carry the messages of `rank_messages.py`.

Every rank receives all commands and runs them in the same order, of a step the part of its data group. The group's answering rank answers
for it. On the CPU a step has run when it is launched. On other devices a thread waits for its end, so that the next step can be launched
meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec
import zmq

from compile_and_serve.custom_ops.mesh import DATA
from compile_and_serve.custom_ops.platforms.cuda_context import start_cuda
from compile_and_serve.garbage import no_garbage_collection
from compile_and_serve.runtime.child_process import (
    EXIT_FAILURE,
    LINGER_MS,
    boot_code,
    describe_error,
    exit_at_once,
    freeze_heap,
    read_bootstrap,
    set_up_child,
)
from compile_and_serve.runtime.config import EngineConfig, Rank
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
from compile_and_serve.runtime.distributed.socket_keys import RankKeys
from compile_and_serve.runtime.logs import LogFormat

if TYPE_CHECKING:
    from compile_and_serve.custom_ops.platforms.protocol import Platform
    from compile_and_serve.runtime.runner.pending_step import PendingStep
    from compile_and_serve.runtime.scheduler.step_messages import WorkerStats

logger = logging.getLogger(__name__)

BOOT_CODE = boot_code("compile_and_serve.runtime.distributed.rank_process")
MAX_STEPS_IN_FLIGHT = 2  # as many as the model runner supports
_POLL_MS = 200


def rank_environment() -> dict[str, str]:
    """Default environment variables of a rank's process. A variable that the user has set takes precedence."""
    # NVLink multicast needs permission from a fabric manager. Without it NCCL fails instead of doing without multicast.
    return {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        # torch warns of sends that run one after another within a group. Those between two stages shall: each direction is a group.
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBootstrap:
    """What a rank needs to start.

    commands, answers: ZMQ addresses. log_level: of the logger `compile_and_serve`. log_format: of the engine's
    process. folder: where the sockets lie; None if the engine is on another host.
    is_staged: wait for `JoinRanks` before joining the other ranks. device_is_taken: a rank of before holds the device until then.
    report_seconds: interval between progress reports while steps run. keys: of the sockets, if they are encrypted.
    """

    config: EngineConfig
    rank: Rank
    commands: str
    answers: str
    log_level: int
    folder: str | None = None
    report_seconds: float = 10.0
    keys: RankKeys | None = None
    log_format: LogFormat = "text"
    is_staged: bool = False
    device_is_taken: bool = False


class RankProcess:
    """Call `run`, which returns when the rank is told to stop, then `close`."""

    def __init__(self, bootstrap: RankBootstrap) -> None:
        self._bootstrap = bootstrap
        self._rank, self._answers_for_group = bootstrap.rank.index, bootstrap.rank.answers
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._answers = self._context.socket(zmq.PUSH)
        for socket, address in ((self._commands, bootstrap.commands), (self._answers, bootstrap.answers)):
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.set_hwm(0)
            if bootstrap.keys is not None:
                bootstrap.keys.protect(socket)
            socket.connect(address)
        self._commands.setsockopt(zmq.RCVTIMEO, _POLL_MS)
        self._decoder = msgspec.msgpack.Decoder(ToRank)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()
        self._steps_begun = self._steps_done = 0
        self._closing = threading.Event()

    def run(self) -> int:
        """Build the worker and run steps until told to stop. Returns the process's exit status."""
        try:
            is_started = self._start()
        except Exception as error:
            return self._fail("could not start", error, is_user_error=isinstance(error, ValueError))
        try:
            if is_started:
                self._serve()
                self._worker.close()
        except Exception as error:
            return self._fail("failed while it computed a step", error, is_user_error=False)
        return 0

    def close(self) -> None:
        """Close the sockets. Queued messages have LINGER_MS to be sent."""
        self._commands.close()
        self._closing.set()
        with self._sending:  # another thread may be sending
            self._answers.close()
        self._context.term()

    def _start(self) -> bool:
        """Load the model and warm up; False if the engine stopped the rank before that."""
        bootstrap = self._bootstrap
        if not bootstrap.device_is_taken:  # by a rank of before, whose memory this one must not need yet
            start_cuda(bootstrap.config.device, bootstrap.rank.device_index)
        with no_garbage_collection(stays=True):
            from compile_and_serve.runtime.runner.worker import Worker

        before_join = self._wait_to_join if bootstrap.is_staged else None
        try:
            self._worker = Worker(
                bootstrap.config, bootstrap.rank, self._report_stage, before_join=before_join, device_is_taken=bootstrap.device_is_taken
            )
        except _StoppedError:
            return False
        platform = self._worker.platform
        self._results: _Results = (
            _ThreadedResults(self._report_step, platform) if platform.is_asynchronous else _ImmediateResults(self._report_step)
        )
        self._send(RankLoaded(self._rank, self._worker.info))
        command = self._receive()
        if not isinstance(command, StartRank):
            return False
        self._worker.start(command.num_blocks)
        freeze_heap()
        self._send(RankReady(self._rank))
        return True

    def _wait_to_join(self) -> None:
        self._send(RankStaged(self._rank))
        while True:
            with suppress(zmq.Again):
                command = self._decoder.decode(self._commands.recv())
                if isinstance(command, JoinRanks):
                    return
                raise _StoppedError

    def _serve(self) -> None:
        worker, results = self._worker, self._results
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()
        while not isinstance(command := self._receive(), StopRank):
            if isinstance(command, RunStep):
                results.wait_for_room()
                self._steps_begun += 1
                results.put(worker.launch(command.scheduled), worker.stats())
            elif isinstance(command, CompileGrammar):
                worker.compile_grammar(command.grammar, command.tenant)
            elif isinstance(command, LoadAdapter):
                worker.adapters.load(command.adapter).add_done_callback(partial(self._report_adapter, command.adapter.lora_int_id))
            elif isinstance(command, DropAdapter):
                worker.adapters.drop(command.adapter_id)
            elif isinstance(command, (SleepRank, WakeRank, ProfileRank)):
                results.wait_for_all()
                if isinstance(command, SleepRank):
                    worker.sleep(command.level)
                elif isinstance(command, ProfileRank):
                    with suppress(ValueError):  # the engine has refused what comes out of turn
                        worker.profile(command.folder)
                else:
                    worker.wake_up(weights=command.weights, kv_cache=command.kv_cache)
                self._send(SleepChanged(self._rank, worker.stats()))
            elif isinstance(command, RunIdleTask):
                results.wait_for_all()  # no other thread may wait for the device while a graph is captured
                did_work = worker.idle(requests_wait=command.requests_wait)
                if self._rank == self._bootstrap.rank.mesh.answering_rank:
                    self._send(IdleTaskDone(did_work, worker.stats()))

    def _receive(self) -> ToRank:
        while True:
            try:
                return self._decoder.decode(self._commands.recv())
            except zmq.Again:
                self._results.check()

    def _report_step(self, step: PendingStep, stats: WorkerStats) -> None:
        output = step.result()
        self._steps_done += 1
        if output.transfers is not None:
            self._send(TransfersEnded(self._rank, output.transfers))
            output.transfers = None
        if self._answers_for_group:
            self._send(StepDone(output, stats, self._bootstrap.rank.coordinates[DATA]))

    def _report_adapter(self, adapter_id: int, reading: Future[Any]) -> None:
        error = reading.exception()
        self._send(AdapterRead(self._rank, adapter_id, None if error is None else str(error)))

    def _report_progress(self) -> None:
        """Let the engine tell a long step from a hung one, and find the rank that the others wait for."""
        from compile_and_serve.custom_ops.collectives.collectives import collectives_entered

        last = None
        while not self._closing.wait(self._bootstrap.report_seconds):
            report = ProgressReport(self._rank, self._steps_begun, self._steps_done, collectives_entered())
            if report == last and self._steps_begun == self._steps_done:
                continue  # the rank is idle
            last = report
            with self._sending:
                if not self._closing.is_set():
                    self._answers.send(self._encoder.encode(report))

    def _report_stage(self, stage: str, seconds: float, detail: str) -> None:
        self._send(RankStage(self._rank, stage, seconds, detail))

    def _send(self, message: FromRank) -> None:
        data = self._encoder.encode(message)
        with self._sending:
            self._answers.send(data)

    def _fail(self, what: str, error: Exception, *, is_user_error: bool) -> int:
        reason = str(error) if is_user_error else f"{what}: {describe_error(error)}"
        logger.log(logging.DEBUG if is_user_error else logging.ERROR, "Rank %d %s.", self._rank, what, exc_info=error)
        self._send(RankFailed(self._rank, reason, is_user_error))
        return EXIT_FAILURE


class _StoppedError(Exception):
    """The engine does not need the rank any more."""


Report = Callable[["PendingStep", "WorkerStats"], None]


class _Results(Protocol):
    """Reports launched steps in order as they finish."""

    def wait_for_room(self) -> None:
        """Wait until one more step may be launched."""
        ...

    def wait_for_all(self) -> None:
        """Wait until every launched step has finished."""
        ...

    def put(self, step: PendingStep, stats: WorkerStats) -> None:
        """Report the step once it has finished."""
        ...

    def check(self) -> None:
        """Raise the error with which a step failed, if there was one."""
        ...


class _ImmediateResults:
    def __init__(self, report: Report) -> None:
        self.put = report

    def wait_for_room(self) -> None: ...

    def wait_for_all(self) -> None: ...

    def check(self) -> None: ...


class _ThreadedResults:
    def __init__(self, report: Report, platform: Platform) -> None:
        self._report = report
        self._platform = platform
        self._room = threading.Semaphore(MAX_STEPS_IN_FLIGHT)
        self._steps: SimpleQueue[tuple[PendingStep, WorkerStats]] = SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="step-results", daemon=True).start()

    def wait_for_room(self) -> None:
        while not self._room.acquire(timeout=_POLL_MS / 1000):
            self.check()
        self.check()

    def wait_for_all(self) -> None:
        for _ in range(MAX_STEPS_IN_FLIGHT):
            self.wait_for_room()
        self._room.release(MAX_STEPS_IN_FLIGHT)

    def put(self, step: PendingStep, stats: WorkerStats) -> None:
        self._steps.put((step, stats))

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None:
            try:
                step = self._steps.get()
                self._platform.make_current()  # a new thread's device is 0, and waiting there would create a context
                self._report(*step)
            except Exception as error:
                self._error = error
            self._room.release()


def main() -> NoReturn:
    """Entry point of a rank on the engine's host."""
    bootstrap: RankBootstrap = read_bootstrap()
    parallel = bootstrap.config.parallel
    replica = f"replica {parallel.data_parallel_rank} " if parallel.data_parallel_size > 1 else ""
    set_up_child(
        who=f"{replica}rank {bootstrap.rank.index}", log_level=bootstrap.log_level, folder=bootstrap.folder, log_format=bootstrap.log_format
    )
    process = RankProcess(bootstrap)
    status = process.run()
    process.close()
    exit_at_once(status)
