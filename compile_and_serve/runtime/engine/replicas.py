"""Several replicas behind the interface of one engine. Each is an engine process with its own ranks, scheduler and KV cache.

When a replica dies, its requests end with an error at once. It is started again, alone, while the others take all requests. They are not
given its requests: one of these may be what it died of. Once all are dead, or the first time without `restarts`, `dead_reason` is set and
new requests are refused; requests on the other replicas then continue until `shutdown`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from compile_and_serve.runtime.child_process import describe_error
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.executor import report_shared_stages
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.connection import EngineConnection, EngineDeadError, EngineFullError, EngineStartError
from compile_and_serve.runtime.engine.event_follower import EventFollower
from compile_and_serve.runtime.engine.held_requests import HeldRequests, TenantsInFlight
from compile_and_serve.runtime.engine.router import Router
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import (
    NOBODY,
    EngineInfo,
    EngineRequest,
    FinishReason,
    RequestOutput,
    StageCallback,
    StepOutputs,
    UtilityOptions,
    ignore_stage,
)

logger = logging.getLogger(__name__)

Replica = TypeVar("Replica", bound=EngineConnection)

_MAX_DELAY_SECONDS = 60.0  # before a replica that keeps failing is started again
_STEADY_SECONDS = 60.0  # a replica that ran for so long has started well


def make_client(config: EngineConfig, on_stage: StageCallback | None = None, *, restarts: bool = True) -> OwnEngine:
    """An engine client for the options, not started: for one engine, or for several replicas. on_stage: reports the start of the first.
    restarts: of `DataParallelClient`.
    """
    on_stage, size = on_stage or ignore_stage, config.parallel.data_parallel_size
    if size == 1:
        return AsyncEngineClient(config, on_stage=on_stage)

    def make(index: int, on_stage: StageCallback = ignore_stage) -> AsyncEngineClient:
        parallel = replace(config.parallel, data_parallel_rank=index)
        # All replicas would dump the same files.
        compile = config.compile if index == 0 else replace(config.compile, dump_dir=None)
        own = replace(config, parallel=parallel, compile=compile)
        return AsyncEngineClient(own, on_stage=on_stage)

    replicas = [make(index, on_stage if index == 0 else report_shared_stages(on_stage, f"replica {index}")) for index in range(size)]
    return DataParallelClient(config, replicas, make if restarts else None)


def connect(config: EngineConfig, folders: list[str], name: str, *, num_clients: int) -> ConnectedEngine:
    """A client, not started, of engines that another process has started with `config`.

    folders: of the engine, or of each replica. name: unlike those of the engines' other clients. num_clients: how many
    clients the engines have; each may hold back its share of the requests that may wait.
    """
    connections = [EngineConnection(name, folder) for folder in folders]
    if len(connections) == 1:
        return connections[0]

    def make(index: int) -> EngineConnection:
        return EngineConnection(name, folders[index])

    client = DataParallelClient(config, connections, make, num_clients=num_clients)
    client.is_owner = False
    return client


class DataParallelClient(Generic[Replica]):
    """An `EngineConnection` to several replicas. Other processes may have one too: each routes its own requests.

    on_change: awaited with a replica's number and why it is dead, or None once it is back. is_owner: it starts dead replicas again;
    otherwise it is told with `replica_back` that somebody has.
    """

    def __init__(
        self, config: EngineConfig, replicas: list[Replica], make_replica: Callable[[int], Replica] | None = None, *, num_clients: int = 1
    ) -> None:
        """make_replica: a new one, not started, in place of a dead one; None: the first death is the end. num_clients: see `connect`."""
        self.config, self._num_clients = config, num_clients
        self.dead_reason: str | None = None
        self.is_owner = True
        self.on_change: Callable[[int, str | None], Awaitable[None]] | None = None
        self._make_replica = make_replica
        self._was_told = False  # by `die`, whose reason names the replica
        self._is_closing = False
        self._down: dict[int, str] = {}  # dead replica → the reason
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._closing: list[asyncio.Task[None]] = []  # dead replicas that are being put away
        self._served_since: dict[int, float] = {}
        self._delays: dict[int, float] = {}  # before a replica is started again
        self._asleep: UtilityOptions | None = None  # how the replicas were put to sleep
        self.replicas = replicas
        # With priorities, a replica may preempt for a request, so it has to have it.
        self._may_hold = config.scheduler.policy != "priority"
        self._in_flight = TenantsInFlight()
        self._held = HeldRequests(self._in_flight)
        self._steps: asyncio.Queue[StepOutputs | None] = asyncio.Queue()  # None: the end
        self._readers: list[asyncio.Task[None]] = []
        self._info: EngineInfo | None = None
        self._router: Router
        self._follower: EventFollower | None = None

    @property
    def info(self) -> EngineInfo:
        """Limits and properties of all replicas together, known once `start` has returned."""
        assert self._info is not None, "the replicas have not started"
        return self._info

    @property
    def folders(self) -> list[str]:
        """What other processes need to `connect`."""
        return [replica.folder for replica in self.replicas]

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: every replica runs, or is being started again."""
        return self.dead_reason is None and all(one.is_alive for index, one in enumerate(self.replicas) if index not in self._down)

    def health_problem(self) -> str | None:
        """One sentence if any replica is silent or stuck in a step, or if none is started again, else None. Does not wait for them."""
        if self.dead_reason is not None:
            return self.dead_reason
        for index, replica in enumerate(self.replicas):
            if index not in self._down and (problem := replica.health_problem()) is not None:
                return f"Replica {index} of {len(self.replicas)}: {problem}"
        return None

    @property
    def num_others(self) -> int:
        """Unfinished sequences of other clients, as of the replicas' last steps."""
        return sum(replica.num_others for replica in self.replicas)

    async def start(self) -> EngineInfo:
        """Start all replicas at the same time.

        Raises `EngineStartError` with the sentence of the first replica that fails; the others are then stopped.
        """
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
            max_sequence_len=min(info.max_sequence_len or info.max_model_len for info in infos),
            max_running=sum(info.max_running for info in infos),
            max_in_flight=None if limit is None else limit * len(infos),
        )
        self._router = Router(
            len(self.replicas),
            max_num_seqs=infos[0].max_running,
            max_waiting=self.config.scheduler.max_waiting,
            num_blocks=num_blocks,
            block_size=infos[0].block_size,
            enable_prefix_caching=infos[0].prefix_caching,
        )
        self._readers = [asyncio.create_task(self._read(index)) for index in range(len(self.replicas))]
        self._served_since = dict.fromkeys(range(len(self.replicas)), time.monotonic())
        events = self.config.kv_events
        if events is not None and EventFollower.can_follow(events):
            self._follower = EventFollower(events, self._router, len(self.replicas))
        return self._info

    async def add_request(self, request: EngineRequest) -> None:
        """Send a request to the replica that the router chooses, or hold it back until one has room.

        Raises `EngineDeadError` if all replicas are dead, and `EngineFullError`.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        router, num_held = self._router, self._held.num_sequences
        must_wait = num_held or not router.has_room(request)
        if self._may_hold and must_wait and not self._is_behind(request) and router.accepts(request, num_held * self._num_clients):
            self._held.add(request)
        else:
            await self._send(request)

    def _is_behind(self, request: EngineRequest) -> bool:
        """Whether the request's API key has fewer sequences on the replicas than its share of their slots. These requests must reach a
        replica, which takes a slot from the key that has more.
        """
        in_flight, tenant = self._in_flight, request.tenant or NOBODY
        others = [one for name, one in in_flight.tenants.items() if name != tenant.name]
        if not others or self._held.has(tenant):
            return False
        share = tenant.weight / (tenant.weight + sum(one.weight for one in others))
        return in_flight.counts[tenant.name] + len(request.request_ids) <= share * self.info.max_running

    async def _send(self, request: EngineRequest, *, confirm: bool = True) -> None:
        while True:
            index = self._router.route(request)
            self._in_flight.add(request)
            try:
                return await self.replicas[index].add_request(request, confirm=confirm)
            except (EngineDeadError, EngineFullError) as error:
                for request_id in request.request_ids:
                    self._finish(request_id)
                if isinstance(error, EngineFullError):
                    raise
                self._handle_death(index, str(error))
                if self.dead_reason is not None:
                    raise EngineDeadError(self.dead_reason) from error

    async def abort(self, request_ids: list[str]) -> None:
        """End requests on the replicas that run them."""
        request_ids = self._held.abort(request_ids)
        by_replica: dict[int, list[str]] = {}
        for request_id in request_ids:
            index = self._router.replica_of(request_id)
            if index is not None and self.replicas[index].dead_reason is None:
                by_replica.setdefault(index, []).append(request_id)
            self._finish(request_id)
        for index, ids in by_replica.items():
            try:
                await self.replicas[index].abort(ids)
            except EngineDeadError as error:
                self._handle_death(index, str(error))
        await self._hand_out()

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        """The steps of all replicas, as they arrive, for a single reader.

        Ends after `shutdown`. Raises `EngineDeadError` once all replicas are dead.
        """
        while (step := await self._steps.get()) is not None:
            yield step
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    async def utility(
        self, method: str, adapter: LoRARequest | None = None, options: UtilityOptions | None = None
    ) -> dict[str, int | float | str | bool | None]:
        """Call a method on all replicas that live and merge the answers: booleans by `all`, numbers by sum, `…_usage` by mean.

        Raises `EngineDeadError` if all replicas are dead, or one of them dies meanwhile.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if method == "sleep":  # the replicas must know what they have to finish, or to end
            await self._hand_out(at_once=True)
        living = [index for index in range(len(self.replicas)) if index not in self._down]
        answers = await asyncio.gather(*(self._ask(index, method, adapter, options) for index in living))
        if method in ("reset_prefix_cache", "sleep"):
            self._router.forget_prefixes()
        if method in ("sleep", "wake_up"):
            self._asleep = (options or {}) if method == "sleep" else None
        return {name: _merge(name, [answer[name] for answer in answers]) for name in answers[0]}

    async def flush(self) -> None:
        """Return once the replicas have received everything that was sent so far, and what was held back.

        Replicas are flushed before they sleep, which empties their caches.
        """
        await self._hand_out(at_once=True)
        self._router.forget_prefixes()
        await self.utility("ping")

    @property
    def dead_replicas(self) -> list[int]:
        """Indices of the replicas that are dead."""
        return [index for index, replica in enumerate(self.replicas) if replica.dead_reason is not None]

    def die(self, reason: str, dead_replicas: Sequence[int] = (0,)) -> None:
        """The process that started the replicas says that some are dead. The requests of the others continue."""
        self.dead_reason, self._was_told = self.dead_reason or reason, True
        for index in dead_replicas:
            self.replicas[index].die(reason)

    async def replica_died(self, index: int, reason: str) -> None:
        """The process that started the replicas says that one is dead, and that it starts it again."""
        self.replicas[index].die(reason)

    async def replica_back(self, index: int) -> None:
        """A new replica lives in the place of a dead one, whose sockets lie where those of the dead one did."""
        self._handle_death(index, "It was started again.")  # unless that is known
        assert self._make_replica is not None
        await self._take_in(index, self._make_replica(index))

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        """Stop all replicas; see `AsyncEngineClient.shutdown`. May be called more than once."""
        self._is_closing = True
        for restart in self._restarts.values():
            restart.cancel()
        await asyncio.gather(*self._restarts.values(), *self._closing, return_exceptions=True)
        if drain:
            await self._hand_out(at_once=True)
        else:
            self._end_held("abort")
        await asyncio.gather(*(replica.shutdown(drain, timeout) for replica in self.replicas))
        if self._follower is not None:
            await self._follower.close()
        if self._readers:
            await asyncio.gather(*self._readers)
        self._steps.put_nowait(None)

    async def _start(self, index: int) -> EngineInfo:
        try:
            return await self.replicas[index].start()
        except EngineStartError as error:
            raise EngineStartError(f"Replica {index} of {len(self.replicas)}: {error}") from error

    async def _ask(
        self, index: int, method: str, adapter: LoRARequest | None, options: UtilityOptions | None
    ) -> dict[str, int | float | str | bool | None]:
        try:
            return await self.replicas[index].utility(method, adapter, options)
        except EngineDeadError as error:
            self._handle_death(index, str(error))
            raise EngineDeadError(self.dead_reason or self._down[index]) from error

    async def _read(self, index: int) -> None:
        router = self._router
        try:
            async for step in self.replicas[index].outputs():
                step.replica = index
                for output in step.outputs:
                    if output.finish_reason is not None:
                        self._finish(output.request_id)
                if step.stats is not None:
                    router.observe(index, step.stats, step.num_others)
                await self._hand_out()
                if step.stats is not None and index == 0:  # requests wait only while replica 0 has steps to come
                    step.stats.num_held = self._held.num_sequences
                self._steps.put_nowait(step)
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.error("Reading the outputs of replica %d failed.", index, exc_info=error)
                error = EngineDeadError(f"Its outputs could not be read: {describe_error(error)}")
            self._handle_death(index, str(error))
            if len(self._down) == len(self.replicas):
                self._steps.put_nowait(None)

    async def _hand_out(self, *, at_once: bool = False) -> None:
        """Send the requests that were held back and now have room. at_once: all, to wait in the replicas' queues."""
        while self._held and self.dead_reason is None and (at_once or self._router.has_room(self._held.first())):
            request, aborted = self._held.pop()
            request.held_seconds = max(0.0, time.time() - request.arrival_time)
            try:
                await self._send(request, confirm=False)
                if aborted:
                    await self.abort(aborted)
            except EngineDeadError as error:  # `_handle_death` has ended the others
                outputs = [
                    RequestOutput(request_id=request_id, finish_reason="error", error=str(error))
                    for request_id in request.request_ids
                    if request_id not in aborted
                ]
                self._steps.put_nowait(StepOutputs(outputs=outputs))

    def _finish(self, request_id: str) -> None:
        self._router.finish(request_id)
        self._in_flight.remove(request_id)

    def _end_held(self, finish_reason: FinishReason, error: str | None = None) -> None:
        outputs = [
            RequestOutput(request_id=request_id, finish_reason=finish_reason, error=error)
            for request, aborted in self._held.drain()
            for request_id in request.request_ids
            if request_id not in aborted
        ]
        if outputs:
            self._steps.put_nowait(StepOutputs(outputs=outputs))

    def _handle_death(self, index: int, reason: str) -> None:
        """Mark the replica as dead, end its requests with the reason, and have it started again. If there will be none, those that were
        held back end, too.
        """
        if index in self._down:
            return
        name = f"Replica {index} of {len(self.replicas)}: "
        reason = reason if self._was_told or reason.startswith(name) else name + reason
        self._down[index] = reason
        self._router.set_down(index, True)
        if self._make_replica is None or len(self._down) == len(self.replicas) or self._was_told:
            self.dead_reason = self.dead_reason or reason
            self._end_held("error", reason)
        elif self.is_owner and not self._is_closing:
            logger.error("%s It is started again; the others serve meanwhile.", reason)
            self._restarts[index] = asyncio.create_task(self._restart(index, reason))
        outputs = []
        for request_id in self._router.requests_of(index):
            self._finish(request_id)
            output = RequestOutput(request_id=request_id, finish_reason="error", error=reason)
            output.error_kind = "overloaded" if self.dead_reason is None else output.error_kind
            outputs.append(output)
        self._steps.put_nowait(StepOutputs(outputs=outputs, replica=index))

    async def _restart(self, index: int, reason: str) -> None:
        """Start a dead replica again, as often as it takes: at once, and with longer and longer pauses while it keeps failing."""
        if self.on_change is not None:
            await self.on_change(index, reason)
        closing = asyncio.create_task(self.replicas[index].shutdown(drain=False))
        self._closing.append(closing)
        await asyncio.shield(closing)  # it must not be left half done
        if time.monotonic() - self._served_since[index] > _STEADY_SECONDS:
            self._delays.pop(index, None)
        while self.dead_reason is None:
            delay = self._delays.get(index, 0.0)
            await asyncio.sleep(delay)
            self._delays[index] = min(_MAX_DELAY_SECONDS, max(1.0, 2 * delay))
            assert self._make_replica is not None
            replica = self._make_replica(index)
            replica.folder = self.replicas[index].folder  # where other processes look for it
            try:
                await self._take_in(index, replica)
            except (EngineStartError, EngineDeadError, OSError) as error:
                logger.error("Replica %d of %d did not start: %s", index, len(self.replicas), error)
                continue
            logger.info("Replica %d of %d serves again.", index, len(self.replicas))
            if self.on_change is not None:
                await self.on_change(index, None)
            return

    async def _take_in(self, index: int, replica: Replica) -> None:
        """Start a replica and give it requests. Raises `EngineStartError`."""
        await replica.start()
        try:
            if self._asleep is not None:
                await replica.utility("sleep", options=self._asleep)
            if self.dead_reason is not None:
                raise EngineDeadError(self.dead_reason)
        except BaseException:
            await replica.shutdown(drain=False)
            raise
        self.replicas[index] = replica
        self._served_since[index] = time.monotonic()
        del self._down[index]
        self._router.set_down(index, False)
        self._readers[index] = asyncio.create_task(self._read(index))
        await self._hand_out()


OwnEngine = AsyncEngineClient | DataParallelClient[AsyncEngineClient]  # whose processes this one has started
ConnectedEngine = EngineConnection | DataParallelClient[EngineConnection]


def _merge(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], (int, float)):
        return sum(values) / len(values) if name.endswith("_usage") else sum(values)
    return values[0]
