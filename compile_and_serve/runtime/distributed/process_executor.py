"""`DistributedExecutor`: every rank is a process of its own, on this host or on others (whoever starts them knows).

A command is encoded once and sent to each rank over a socket of its own; all answers come in over one. Start-up:
every rank loads its part → the smallest number of KV blocks that a rank has room for is everybody's → every rank
warms up. Whenever the engine waits for an answer it also looks for ranks that have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import msgspec
import zmq

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.distributed.child_process import (
    LINGER_MS,
    boot_input,
    describe_exit,
    one_device,
    private_folder,
)
from compile_and_serve.runtime.distributed.executor import RankFailedError, StepHandle, report_shared_stages
from compile_and_serve.runtime.distributed.rank_messages import (
    FromRank,
    IdleTaskDone,
    RankBusy,
    RankFailed,
    RankLoaded,
    RankReady,
    RankStage,
    RunIdleTask,
    RunStep,
    StartRank,
    StepDone,
    StopRank,
    ToRank,
)
from compile_and_serve.runtime.distributed.rank_process import BOOT_CODE, RankBootstrap
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, WorkerStats

logger = logging.getLogger(__name__)

_POLL_MS = 100
_STOP_SECONDS = 5.0
# Ranks that wait for each other in a step, none of which moves, are given up after so long; each says how far it is more often.
STUCK_SECONDS = 120.0
_REPORTS = 6
# How long the true cause of a failure may take to show up: a rank that is gone makes the others fail in their collectives.
_CAUSE_SECONDS = 0.5

Message = TypeVar("Message", RankLoaded, RankReady, StepDone, IdleTaskDone)


class RankHost(Protocol):
    """Starts ranks somewhere, and knows how they are."""

    rendezvous: str

    def address(self, name: str) -> str:
        """Where the engine binds a socket for its ranks."""
        ...

    def device_index(self, rank: int) -> int:
        """Number of a rank's CUDA device, among those that its process sees."""
        ...

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """How many ranks, of all replicas, share its host's cores and memory."""
        ...

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """Start the ranks, without waiting for them."""
        ...

    def ended(self) -> dict[int, str]:
        """Ranks that have ended, and how ("was ended by signal 9")."""
        ...

    def stop(self, seconds: float) -> None:
        """Give the ranks so long to end by themselves, then end them. May be called more than once."""
        ...


@dataclass(slots=True)
class _Launched:
    step: int


@dataclass(slots=True)
class _RankProgress:
    """What a rank has said of itself: steps that are over, steps begun, collectives entered; and when, by the executor's clock."""

    progress: tuple[int, int, int] = (0, 0, 0)
    heard: float = 0.0


class DistributedExecutor:
    """Ranks on a `RankHost`. Construction raises `ValueError` or `RankFailedError` with a sentence that names the rank."""

    num_stages = 1

    def __init__(self, config: EngineConfig, host: RankHost, on_stage: StageCallback) -> None:
        self.num_ranks = config.num_ranks
        self._host = host
        self._on_stage = [
            on_stage,
            *(report_shared_stages(on_stage, f"rank {rank}") for rank in range(1, self.num_ranks)),
        ]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._stats = WorkerStats()
        self._has_failed = False
        self._how_far = [_RankProgress() for _ in range(self.num_ranks)]
        self._num_launched = 0
        self._moved = 0.0  # when, by `_clock`, a rank last was further than before
        self._clock = 0.0  # seconds of waiting for answers
        self._looked_at = 0.0  # real time
        self._commands: list[zmq.Socket[bytes]] = []
        try:
            host.launch(self._bootstraps(config))
            loaded = [self._receive(RankLoaded) for _ in range(self.num_ranks)]
            num_blocks = min(message.info.num_blocks for message in loaded)
            self._broadcast(StartRank(num_blocks))
            for _ in range(self.num_ranks):
                self._receive(RankReady)
        except BaseException:
            self._has_failed = True
            self.shutdown()
            raise
        first = next(message.info for message in loaded if message.rank == 0)
        self.info = msgspec.structs.replace(first, num_blocks=num_blocks)
        self._may_work_idly = first.device_type == "cuda"  # there are no graphs elsewhere

    def launch(self, scheduled: SchedulerOutput) -> StepHandle:
        """Send the step to every rank."""
        self._num_launched += 1
        self._broadcast(RunStep(scheduled))
        return _Launched(scheduled.step)

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for rank 0's answer. Raises `RankFailedError` when a rank failed or is gone."""
        done = self._receive(StepDone)
        assert done.output.step == handle.step, (done.output.step, handle.step)
        self._stats = done.stats
        return done.output

    def idle(self) -> bool:
        """Have every rank capture one more graph. Raises `RankFailedError` for a rank that is gone."""
        self._look_for_ended()
        if self._may_work_idly:
            self._broadcast(RunIdleTask())
            done = self._receive(IdleTaskDone)
            self._stats = done.stats
            self._may_work_idly = done.worked
        return self._may_work_idly

    def stats(self) -> WorkerStats:
        """Rank 0's counters, as of its last answer."""
        return self._stats

    def shutdown(self) -> None:
        """End the ranks: those of a group that works end by themselves, others wait for one another and are killed."""
        if self._context.closed:
            return
        if not self._has_failed:
            for endpoint in self._commands:
                # A rank may be gone already: nobody asks for its reason any more, and the others are told.
                with contextlib.suppress(ValueError, RankFailedError):
                    self._send(endpoint, self._encoder.encode(StopRank()))
        self._host.stop(0.0 if self._has_failed else _STOP_SECONDS)
        self._context.destroy(linger=0)

    def _bootstraps(self, config: EngineConfig) -> list[RankBootstrap]:
        """Bind a socket for each rank's commands, and one for all answers."""
        host = self._host
        self._answers, answers = self._bind(zmq.PULL, "answers")
        self._answers.setsockopt(zmq.RCVTIMEO, _POLL_MS)
        level = logging.getLogger("compile_and_serve").getEffectiveLevel()
        without_dump = replace(config, compile=replace(config.compile, dump_dir=None))
        bootstraps = []
        for index in range(self.num_ranks):
            endpoint, commands = self._bind(zmq.PUSH, f"rank-{index}")
            endpoint.setsockopt(zmq.SNDTIMEO, _POLL_MS)
            self._commands.append(endpoint)
            rank = Rank(
                index=index,
                size=self.num_ranks,
                device_index=host.device_index(index),
                rendezvous=host.rendezvous,
                num_sharing=host.num_sharing(index, config),
            )
            own = config if index == 0 else without_dump
            bootstraps.append(
                RankBootstrap(
                    config=own,
                    rank=rank,
                    commands=commands,
                    answers=answers,
                    log_level=level,
                    busy_seconds=STUCK_SECONDS / _REPORTS,
                )
            )
        return bootstraps

    def _bind(self, kind: int, name: str) -> tuple[zmq.Socket[bytes], str]:
        endpoint = self._context.socket(kind)
        endpoint.setsockopt(zmq.LINGER, LINGER_MS)
        endpoint.set_hwm(0)
        endpoint.bind(self._host.address(name))
        return endpoint, endpoint.getsockopt_string(zmq.LAST_ENDPOINT)

    def _broadcast(self, command: ToRank) -> None:
        data = self._encoder.encode(command)
        for endpoint in self._commands:
            self._send(endpoint, data)

    def _send(self, endpoint: zmq.Socket[bytes], data: bytes) -> None:
        while True:
            try:
                return endpoint.send(data)
            except zmq.Again:  # nobody is at the other end: not yet, or no more
                self._look_for_ended()

    def _receive(self, kind: type[Message]) -> Message:
        self._moved, self._looked_at = self._clock, time.monotonic()
        while True:
            self._let_time_pass()
            try:
                message = self._decoder.decode(self._answers.recv())
            except zmq.Again:
                self._look_for_ended()
                # One rank waits for nobody: its steps may take long, and that it is gone is seen otherwise.
                if (
                    self.num_ranks > 1
                    and kind in (StepDone, IdleTaskDone)
                    and self._clock > self._moved + STUCK_SECONDS
                ):
                    self._give_up()
                continue
            if isinstance(message, RankBusy):
                self._hear(message)
                continue
            if isinstance(message, RankStage):
                self._on_stage[message.rank](message.stage, message.seconds, message.detail)
            elif isinstance(message, RankFailed):
                self._fail(message)
            else:
                assert isinstance(message, kind), message
                return message

    def _let_time_pass(self) -> None:
        """A look for answers takes a tenth of a second. Longer, we were stopped, most likely with our ranks: that does not count."""
        now = time.monotonic()
        self._clock += min(now - self._looked_at, 2 * _POLL_MS / 1000)
        self._looked_at = now

    def _hear(self, message: RankBusy) -> None:
        rank = self._how_far[message.rank]
        progress = (message.over, message.begun, message.collectives)
        if progress > rank.progress:
            self._moved = self._clock
        rank.progress, rank.heard = progress, self._clock

    def _give_up(self) -> NoReturn:
        """Name the rank that the others wait for: one that says nothing at all, else the one that is least far."""
        self._has_failed = True
        many = self.num_ranks
        busy = [i for i, rank in enumerate(self._how_far) if rank.progress[0] < self._num_launched]
        silent = [i for i in busy if self._clock > self._how_far[i].heard + STUCK_SECONDS / 2]
        least = min(rank.progress for rank in self._how_far)
        behind = [i for i, rank in enumerate(self._how_far) if rank.progress == least]
        how_long = f"for {STUCK_SECONDS:g} seconds"
        if 0 < len(silent) < many:
            raise RankFailedError(f"{_ranks(silent)} of {many} said nothing {how_long}, in which the others waited.")
        if len(behind) < many:
            raise RankFailedError(f"{_ranks(behind)} of {many} did not move {how_long}, and the others waited.")
        what = "a step" if busy else "work for idle moments"
        raise RankFailedError(f"No rank of {many} moved {how_long} in the middle of {what}.")

    def _look_for_ended(self) -> None:
        if self._host.ended():
            self._fail()

    def _fail(self, *said: RankFailed) -> NoReturn:
        """Raise the cause: the rank that ended without a word, else what the first said that said something."""
        self._has_failed = True
        failures = list(said)
        deadline = time.monotonic() + _CAUSE_SECONDS
        while True:
            is_late = time.monotonic() > deadline  # before the last look: we may be stopped in between
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
            raise RankFailedError(f"Rank {rank} of {self.num_ranks} {ended[rank]}.")
        first = failures[0]
        if first.is_mistake:
            raise ValueError(f"Rank {first.rank} of {self.num_ranks}: {first.reason}")
        raise RankFailedError(f"Rank {first.rank} of {self.num_ranks} {first.reason}")


def _ranks(numbers: Sequence[int]) -> str:
    return f"Rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class LocalRanks:
    """Child processes on this host, which meet in a folder that only this user can enter."""

    def __init__(self, first_device: int, parent: Path | None) -> None:
        """first_device: CUDA device of rank 0; the others follow. parent: where the folder is made; None: the system's
        temporary folder.
        """
        self._first_device = first_device
        self._folder = private_folder(parent)
        self.rendezvous = f"file://{self._folder}/meeting"
        self._processes: list[subprocess.Popen[bytes]] = []

    def address(self, name: str) -> str:
        """A Unix socket in the folder."""
        return f"ipc://{self._folder}/{name}"

    def device_index(self, rank: int) -> int:
        """One device a rank, the only one that it sees."""
        return one_device(self._first_device + rank)[1]

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """All of them."""
        return config.num_processes

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """One Python process a rank; its standard input stays open as long as we live."""
        environment = dict(os.environ)
        if any(name == "lo" for _, name in socket.if_nameindex()):
            # All on this host: gloo and NCCL need neither find the host by its name nor listen to a network.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        for bootstrap in bootstraps:
            own = environment | one_device(self._first_device + bootstrap.rank.index)[0]
            process = subprocess.Popen([sys.executable, "-c", BOOT_CODE], stdin=subprocess.PIPE, env=own)
            self._processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which `ended` will tell
                process.stdin.write(boot_input(self._with_folder(bootstrap)))
                process.stdin.flush()

    def ended(self) -> dict[int, str]:
        """By exit status."""
        statuses = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: describe_exit(status) for rank, status in statuses.items() if status is not None}

    def stop(self, seconds: float) -> None:
        """Wait, then kill."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _with_folder(self, bootstrap: RankBootstrap) -> RankBootstrap:
        config = bootstrap.config
        config = replace(config, compile=replace(config.compile, work_dir=Path(self._folder)))
        return replace(bootstrap, config=config, folder=self._folder)
