"""Replicas behind the interface of one engine: each an engine process of its own, with ranks, scheduler and KV cache of its own.

A replica that dies ends the server, as an engine does that is alone: whoever restarts it gets all replicas back, where a server
that went on with fewer would only be slow. But the others need not drop what they run. The dead replica's requests end with an
error at once and `dead_reason` is set; no further requests are taken, and what the other replicas run goes on until `shutdown`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.executor import report_shared_stages
from compile_and_serve.runtime.engine.client import AsyncEngineClient, EngineDeadError, EngineStartError
from compile_and_serve.runtime.engine.router import Router
from compile_and_serve.runtime.messages import (
    EngineInfo,
    EngineRequest,
    RequestOutput,
    StageCallback,
    StepOutputs,
    ignore_stage,
)


def make_client(config: EngineConfig, on_stage: StageCallback | None = None) -> AsyncEngineClient | DataParallelClient:
    """A client of the engine that the options ask for, or of its replicas; not started."""
    kind = AsyncEngineClient if config.parallel.data_parallel_size == 1 else DataParallelClient
    return kind(config, on_stage=on_stage or ignore_stage)


class DataParallelClient:
    """`AsyncEngineClient` for several. on_stage hears of the first replica's start-up."""

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        self.config = config
        self.dead_reason: str | None = None
        self.replicas = []
        for index in range(config.parallel.data_parallel_size):
            parallel = replace(config.parallel, data_parallel_rank=index)
            # What is dumped is the same for all.
            compile = config.compile if index == 0 else replace(config.compile, dump_dir=None)
            own = replace(config, parallel=parallel, compile=compile)
            hears = on_stage if index == 0 else report_shared_stages(on_stage, f"replica {index}")
            self.replicas.append(AsyncEngineClient(own, on_stage=hears))
        self._steps: asyncio.Queue[StepOutputs | None] = asyncio.Queue()  # None: the end
        self._readers: list[asyncio.Task[None]] = []
        self._info: EngineInfo | None = None
        self._router: Router

    @property
    def info(self) -> EngineInfo:
        """What holds for every replica; known once `start` has returned."""
        assert self._info is not None, "the replicas have not started"
        return self._info

    @property
    def is_alive(self) -> bool:
        """Whether every replica runs and takes requests."""
        return all(replica.is_alive for replica in self.replicas)

    async def start(self) -> EngineInfo:
        """Start all replicas at once. Raises `EngineStartError` with the first one's sentence that cannot; none is left then."""
        starts = [asyncio.create_task(self._start(index)) for index in range(len(self.replicas))]
        try:
            infos = await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.shutdown(drain=False)
            raise
        num_blocks = min(info.num_kv_blocks for info in infos)
        limit = infos[0].max_in_flight
        self._info = msgspec.structs.replace(
            infos[0],
            num_kv_blocks=num_blocks,
            max_running=sum(info.max_running for info in infos),
            max_in_flight=None if limit is None else limit * len(infos),
        )
        cache = self.config.cache
        self._router = Router(
            len(self.replicas),
            max_num_seqs=infos[0].max_running,
            max_waiting=self.config.scheduler.max_waiting,
            num_blocks=num_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._readers = [asyncio.create_task(self._read(index)) for index in range(len(self.replicas))]
        return self._info

    async def add_request(self, request: EngineRequest) -> None:
        """Send a request to the replica that the router chooses. Raises `EngineDeadError` once a replica is dead."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        index = self._router.route(request)
        try:
            await self.replicas[index].add_request(request)
        except EngineDeadError as error:
            self._router.finish(request.request_id)
            self._lose(index, str(error))
            raise EngineDeadError(self.dead_reason) from error

    async def abort(self, request_ids: list[str]) -> None:
        """End requests, each where it runs."""
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = self._router.replica_of(request_id)
            if index is not None and self.replicas[index].dead_reason is None:
                by_replica.setdefault(index, []).append(request_id)
            self._router.finish(request_id)
        for index, ids in by_replica.items():
            try:
                await self.replicas[index].abort(ids)
            except EngineDeadError as error:
                self._lose(index, str(error))

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """Every replica's steps, as they come, for one reader; ends after `shutdown`, raises `EngineDeadError` when all are
        dead.
        """
        while (step := await self._steps.get()) is not None:
            yield step
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    async def utility(self, method: str) -> dict[str, int | float | str | bool | None]:
        """Call a method of all replicas: what is true or false holds for all, numbers are added (`…_usage`: the mean).

        Raises `EngineDeadError` once a replica is dead.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        answers = await asyncio.gather(*(self._ask(index, method) for index in range(len(self.replicas))))
        if method == "reset_prefix_cache":
            self._router.forget_prefixes()
        return {name: _together(name, [answer[name] for answer in answers]) for name in answers[0]}

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop all replicas, as `AsyncEngineClient.shutdown` does one. May be called more than once."""
        await asyncio.gather(*(replica.shutdown(drain, timeout) for replica in self.replicas))
        if self._readers:
            await asyncio.gather(*self._readers)
        self._steps.put_nowait(None)

    async def _start(self, index: int) -> EngineInfo:
        try:
            return await self.replicas[index].start()
        except EngineStartError as error:
            raise EngineStartError(f"Replica {index} of {len(self.replicas)}: {error}") from error

    async def _ask(self, index: int, method: str) -> dict[str, int | float | str | bool | None]:
        try:
            return await self.replicas[index].utility(method)
        except EngineDeadError as error:
            self._lose(index, str(error))
            raise EngineDeadError(self.dead_reason) from error

    async def _read(self, index: int) -> None:
        router = self._router
        try:
            async for step in self.replicas[index].outputs():
                step.replica = index
                for output in step.outputs:
                    if output.finish_reason is not None:
                        router.finish(output.request_id)
                if step.stats is not None:
                    router.observe(index, step.stats)
                self._steps.put_nowait(step)
        except EngineDeadError as error:
            self._lose(index, str(error))
            if all(replica.dead_reason is not None for replica in self.replicas):
                self._steps.put_nowait(None)

    def _lose(self, index: int, reason: str) -> None:
        """End a dead replica's requests with its reason."""
        reason = f"Replica {index} of {len(self.replicas)}: {reason}"
        self.dead_reason = self.dead_reason or reason
        outputs = []
        for request_id in self._router.requests_of(index):
            self._router.finish(request_id)
            outputs.append(RequestOutput(request_id=request_id, finish_reason="error", error=reason))
        self._steps.put_nowait(StepOutputs(outputs=outputs, replica=index))


def _together(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], (int, float)):
        return sum(values) / len(values) if name.endswith("_usage") else sum(values)
    return values[0]
