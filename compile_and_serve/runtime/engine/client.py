"""`SyncEngine` runs an engine in this process, `AsyncEngineClient` in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from compile_and_serve.runtime.child_process import boot_input, describe_exit, one_device, private_folder
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.engine.connection import EngineConnection, EngineDeadError
from compile_and_serve.runtime.engine.process import BOOT_CODE, Bootstrap
from compile_and_serve.runtime.logs import current_format
from compile_and_serve.runtime.messages import EngineInfo, EngineRequest, Shutdown, StageCallback, StepOutputs, ignore_stage

if TYPE_CHECKING:
    from compile_and_serve.runtime.engine.core import EngineCore

logger = logging.getLogger(__name__)

_EXIT_GRACE_SECONDS = 10.0  # for the process to end after its last message; longer than the process grants its ranks


class SyncEngine:
    """An engine in this process; the caller drives it with `step`. Construction raises the errors of `EngineCore`."""

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        from compile_and_serve.runtime.engine.core import EngineCore

        if (replicas := config.parallel.data_parallel_size) > 1:
            raise ValueError(f"data_parallel_size is {replicas}, but this is one engine: use `LLM` or `serve`, or set it to 1.")
        self._core: EngineCore | None = EngineCore(config, on_stage=on_stage)
        self.info: EngineInfo = self._core.info

    @property
    def core(self) -> EngineCore:
        """The engine core. Raises `EngineDeadError` after `shutdown`."""
        if self._core is None:
            raise EngineDeadError("The engine is shut down.")
        return self._core

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` for one that can never run."""
        self.core.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        self.core.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self.core.has_work()

    def step(self) -> StepOutputs:
        """Run one step and return its outputs, which are empty if there is no work."""
        return self.core.step()

    @property
    def tokens_ahead(self) -> int:
        """Tokens of prompts to pool with which `step` is worth calling while more requests are added, because the device computes
        meanwhile; 0: add all of them first.
        """
        core = self.core
        is_worth_it = core.info.pooling is not None and core.executor.info.is_asynchronous
        return core.config.max_steps_in_flight * core.config.scheduler.token_budget if is_worth_it else 0

    def sleep(self, level: int) -> None:
        """See `EngineCore.sleep`."""
        self.core.sleep(level)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """See `EngineCore.wake_up`."""
        self.core.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is freed, so that no request can run."""
        return self.core.is_sleeping

    def shutdown(self) -> None:
        """Free the model and its KV cache. May be called more than once."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None


class AsyncEngineClient(EngineConnection):
    """An engine in a process of its own, which `start` begins and `shutdown` ends."""

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        super().__init__("owner", "", is_sole=True, on_stage=on_stage)
        self.config = config
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The engine's exit status (negative: the signal that ended it); None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> EngineInfo:
        """Start the process and wait until the engine is ready. `on_stage` is called as each stage ends.

        Raises `EngineStartError` with the engine's own sentence if it cannot start.
        """
        assert self._process is None, "the engine was started before"
        if self.folder:  # of a replica that this one replaces
            os.mkdir(self.folder, 0o700)
        else:
            self.folder = private_folder()
        config, environment = self._child_options()
        # A new session: signals to this process's group do not reach the engine, which stops when we tell it to.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BOOT_CODE, stdin=asyncio.subprocess.PIPE, start_new_session=True, env=environment
        )
        bootstrap = Bootstrap(
            config=config,
            folder=self.folder,
            log_level=logging.getLogger("compile_and_serve").getEffectiveLevel(),
            log_format=current_format(),
        )
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(boot_input(bootstrap))
        return await super().start()

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop the engine. drain: finish the running requests first; otherwise abort them.

        timeout: seconds after which the process is killed; None waits without a limit if `drain`, else 10 seconds.
        `outputs` ends once the last output was read. May be called more than once.
        """
        if self._process is None or not self._tasks:
            return
        if self.dead_reason is None:
            self._stopping = True
            with contextlib.suppress(EngineDeadError):
                await self._send(Shutdown(drain=drain))
            if timeout is None and not drain:
                timeout = _EXIT_GRACE_SECONDS
            try:
                await asyncio.wait_for(self._process.wait(), timeout)
                await self._watcher  # it ends once the last output was read
            except TimeoutError:
                logger.warning("The engine did not stop within %g seconds and is killed.", timeout)
        await self._close()

    def _connect(self) -> None:
        super()._connect()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")
        self._tasks.append(self._watcher)

    def _child_options(self) -> tuple[EngineConfig, dict[str, str]]:
        """The child's config and environment. A replica with a single rank sees only its own CUDA device."""
        config, environment = self.config, dict(os.environ)
        parallel = config.parallel
        if parallel.data_parallel_size > 1 and parallel.executor is None and config.mesh.size == 1:
            named, index = one_device(parallel.data_parallel_rank, config.device)
            config, environment = replace(config, parallel=replace(parallel, device_index=index)), environment | named
        return config, environment

    async def _read(self) -> None:
        """Without a reader nobody would answer the requests, so the engine ends."""
        await super()._read()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _watch(self) -> None:
        """Wait for the process to end, and read its last messages before reporting that."""
        assert self._process is not None
        status = await self._process.wait()
        while not self._reader.done() and await self._socket.poll(100):
            await asyncio.sleep(0)
        if self._stopping and status == 0:
            self._steps.put_nowait(None)
            self._fail_calls("The engine is shut down.")
        elif self._death_reason is None:
            self.die(f"The engine process {describe_exit(status)}.")

    async def _close(self, linger: int = 0) -> None:
        process = self._process
        assert process is not None
        if process.returncode is None and self.dead_reason is not None:  # it has sent its last message
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _EXIT_GRACE_SECONDS)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.stdin is not None:
            process.stdin.close()
        await super()._close(linger)
        shutil.rmtree(self.folder, ignore_errors=True)
