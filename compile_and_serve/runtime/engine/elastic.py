"""Ranks join and leave a running engine: another number of data groups, in two phases.

Staged: in a thread, the ranks of the new mesh start beside those that serve. They compile and load what there is memory for, and wait.
Committed: between two steps the old ranks end, the new ones join each other, and the unfinished requests go on in the new groups from the
tokens that they have. If the new ranks cannot be staged, the old ones serve on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from compile_and_serve.custom_ops.mesh import DATA
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.executor import Executor, RankFailedError
from compile_and_serve.runtime.distributed.factory import make_executor, stage_executor
from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor
from compile_and_serve.runtime.messages import StepOutputs, ignore_stage

logger = logging.getLogger(__name__)

STEADY_SECONDS = 10.0  # a rank that fails so soon after a restart would fail again


class Scaling:
    """A change of the number of data groups that is under way. done: ends once the engine has that many, or why it has not."""

    def __init__(self, config: EngineConfig, num_groups: int, *, num_before: int) -> None:
        """config: of the engine. num_before: its ranks."""
        self.config = replace(config, compile=replace(config.compile, data_parallel_attention_size=num_groups, dump_dir=None))
        self.done: Future[None] = Future()
        self._staged: Future[DistributedExecutor] = Future()
        self._is_dropped = False
        threading.Thread(target=self._stage, args=(num_before,), name="stage-ranks", daemon=True).start()

    def _stage(self, num_before: int) -> None:
        try:
            executor = stage_executor(self.config, num_before)
        except BaseException as error:
            self._staged.set_exception(error)
            return
        self._staged.set_result(executor)
        if self._is_dropped:
            executor.shutdown()

    @property
    def is_staged(self) -> bool:
        """Whether nothing is left to do beside the old ranks: steps should come to an end."""
        return self._staged.done()

    def problem(self) -> ValueError | None:
        """Why the ranks cannot be staged, once `is_staged`."""
        error = self._staged.exception()
        if error is None:
            return None
        if not isinstance(error, (ValueError, RankFailedError)):
            raise error
        return ValueError(f"The new ranks could not start, and the engine serves on with those that it has: {error}")

    def join(self) -> Executor:
        """Once the old ranks have ended: the executor of the new ones. Raises `ValueError` or `RankFailedError`."""
        executor = self._staged.result()
        executor.join()
        return executor

    def drop(self, reason: str) -> None:
        """Give up."""
        self._is_dropped = True
        if self._staged.done() and self._staged.exception() is None:
            self._staged.result().shutdown()
        self.done.set_exception(ValueError(reason))


class ScalableEngine(Protocol):
    """What of an `EngineCore` changes with its ranks."""

    executor: Executor

    @property
    def has_steps_in_flight(self) -> bool: ...

    @property
    def is_sleeping(self) -> bool: ...

    def replace_ranks(self, config: EngineConfig, start: Callable[[], Executor]) -> None: ...

    def end_group(self, group: int | None, reason: str) -> StepOutputs: ...


class Elastic:
    """Changes the number of an engine's data groups, and starts its ranks again when one has failed."""

    def __init__(self, engine: ScalableEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._scaling: Scaling | None = None
        self._last_restart = float("-inf")

    @property
    def is_scaling(self) -> bool:
        """Whether ranks are about to join or leave."""
        return self._scaling is not None

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be launched, so that ranks can be replaced."""
        return self._scaling is not None and self._scaling.is_staged

    def scale(self, num_groups: object) -> Future[None]:
        """Begin to change the number of data groups. `poll` ends the future. This and the future raise `ValueError`."""
        if self._scaling is not None:
            raise ValueError("The engine is being scaled already: ask /is_scaling_elastic_ep, and try again later.")
        if self._engine.is_sleeping:
            raise ValueError("The engine sleeps: wake it up first.")
        if not isinstance(num_groups, int) or isinstance(num_groups, bool) or num_groups < 1:
            raise ValueError(f"new_data_parallel_size must be a number of at least 1, got {num_groups!r:.50}.")
        if num_groups == self._engine.executor.mesh.data:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        self._scaling = Scaling(self._config, num_groups, num_before=self._engine.executor.mesh.size)
        return self._scaling.done

    def poll(self) -> None:
        """Replace the ranks once those of the new mesh are staged and no step is in flight. To be called between steps."""
        scaling, engine = self._scaling, self._engine
        if scaling is None or not scaling.is_staged or engine.has_steps_in_flight:
            return
        self._scaling = None
        problem, start = scaling.problem(), time.monotonic()
        if problem is None:
            try:
                engine.replace_ranks(scaling.config, scaling.join)
            except (ValueError, RankFailedError) as error:
                problem = ValueError(f"The new ranks could not join, and the engine was started again as it was: {error}")
                engine.replace_ranks(self._config, lambda: make_executor(self._config, ignore_stage))
            else:
                self._config = scaling.config
                seconds = time.monotonic() - start
                logger.info("%d data groups serve; no step ran for %.1f s.", scaling.config.mesh.data, seconds)
        if problem is None:
            scaling.done.set_result(None)
        else:
            scaling.done.set_exception(problem)

    def fail(self, error: RankFailedError) -> StepOutputs:
        """A rank has failed: end the requests of its group. `restart` must follow. Raises the error where ranks fail again and again."""
        now = time.monotonic()
        if now - self._last_restart < STEADY_SECONDS:
            raise error
        mesh = self._engine.executor.mesh
        group = None if error.rank is None else mesh.coordinates(error.rank)[DATA]
        if self._scaling is not None:
            self._scaling.drop(f"A rank failed meanwhile: {error}")
            self._scaling = None
        logger.error("%s Its requests end, and the ranks are started again.", error)
        return self._engine.end_group(group, str(error))

    def restart(self) -> None:
        """Start all ranks again. Those requests that have not ended go on."""
        self._engine.replace_ranks(self._config, lambda: make_executor(self._config, ignore_stage))
        self._last_restart = time.monotonic()
        logger.info("The ranks serve again.")
