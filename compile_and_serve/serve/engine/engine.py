"""The engine as the API process sees it: `AsyncEngine` sends requests, delivers their deltas and aborts abandoned ones.

`EngineClient` is the interface that `AsyncEngine` needs from a client of the engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from compile_and_serve.custom_ops.step_data import MediaItem
from compile_and_serve.runtime.engine.connection import EngineDeadError, EngineFullError
from compile_and_serve.runtime.ledger.records import StepTotals
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineInfo, EngineRequest, StepData, StepOutputs, Tenant, UtilityOptions
from compile_and_serve.runtime.pooling.results import check_generates
from compile_and_serve.runtime.pooling_params import PoolingParams
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError as RequestsFullError
from compile_and_serve.runtime.scheduler.request_checks import TenantLimitError
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.output_processor import OutputProcessor
from compile_and_serve.serve.engine.generation import Generation
from compile_and_serve.serve.errors import ApiError, QueueFullError, ShuttingDownError
from compile_and_serve.serve.http.request_scope import current_deadline
from compile_and_serve.serve.ledger.book import LedgerBook
from compile_and_serve.serve.ledger.record import SequenceRecord
from compile_and_serve.serve.observe.metrics import Metrics
from compile_and_serve.serve.observe.queue_speed import QueueSpeed
from compile_and_serve.serve.processes.siblings import Siblings
from compile_and_serve.serve.settings import MAX_API_SERVERS
from compile_and_serve.serve.tenants.current import current_tenant
from compile_and_serve.serve.tenants.places import Places
from compile_and_serve.serve.tenants.rate_limits import RateLimits

logger = logging.getLogger(__name__)


SLEEP_RETRY_SECONDS = 10  # sleeping servers do not know when they will be woken
_PROMPTS_PER_TURN = 16  # of the event loop: sending them takes about half a millisecond


class EngineClient(Protocol):
    """A connection to an engine process. If the engine is dead, every method raises `EngineDeadError` with one sentence."""

    dead_reason: str | None  # set when the engine or one of its replicas has died

    @property
    def info(self) -> EngineInfo: ...

    @property
    def num_others(self) -> int:
        """Unfinished sequences of other clients of the engine, as of its last step."""
        ...

    async def add_request(self, request: EngineRequest) -> None:
        """Send a request. Raises `EngineFullError` if other clients have filled the engine."""
        ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def utility(
        self, method: str, adapter: LoRARequest | None = None, options: UtilityOptions | None = None
    ) -> dict[str, int | float | str | bool | None]: ...

    async def flush(self) -> None:
        """Return once the engine has received everything that was sent so far."""
        ...

    def outputs(self) -> AsyncIterator[StepOutputs]:
        """Every step's outputs. Ends at shutdown; raises `EngineDeadError` if the engine dies."""
        ...

    def health_problem(self) -> str | None:
        """One sentence if the engine is dead, silent or stuck in a step, else None. Does not wait for the engine."""
        ...

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None: ...


class AsyncEngine:
    """One engine for many concurrent requests, on one event loop.

    on_death: called once with the reason when the engine dies. process: number of this API process among its `siblings`. rates: where the
    tokens of tenants are counted that have a limit of them. rated: their names.
    """

    def __init__(
        self,
        client: EngineClient,
        inputs: InputProcessor,
        metrics: Metrics,
        *,
        on_death: Callable[[str], None] | None = None,
        process: int = 0,
        siblings: Siblings | None = None,
        rates: RateLimits | None = None,
        rated: Collection[str] = (),
    ) -> None:
        self.client = client
        self.inputs = inputs
        self.metrics = metrics
        self.now = time.monotonic()
        self.step_totals, self.output_seconds = StepTotals(), 0.0
        self.book = LedgerBook(inputs.tokenizer, float(client.info.compile_report.get("memory_bandwidth", 0)))
        self.dead_reason: str | None = None
        self.draining = False
        self.sleeping = False
        self._sleep_lock = asyncio.Lock()
        self._num_submitting = 0
        self._processor = OutputProcessor(inputs, itertools.count(process, MAX_API_SERVERS))
        self._process, self._siblings = process, siblings
        self._on_death = on_death
        self._reader: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.speed = QueueSpeed()
        self.places = Places()
        self._rates, self._rated = rates, rated
        self._counting: set[asyncio.Task[None]] = set()

    @property
    def num_in_flight(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._processor)

    @property
    def load(self) -> int:
        """Number of sequences that wait or run, those of other API processes included."""
        return self.num_in_flight + self.client.num_others

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.dead_reason is None and not self.draining and not self.sleeping

    @property
    def pending_work(self) -> dict[str, int]:
        """Work that the replicas have still to do beside serving, as of their last reports: kind → how many pieces are left."""
        total = Counter[str]()
        for stats in self.metrics.last_stats.values():
            total.update(stats.pending_work)
        return dict(sorted(total.items()))

    def start(self) -> None:
        """Begin to read the engine's outputs. Must be called on the running event loop."""
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def submit(
        self,
        request_id: str,
        prompts: list[list[int]],
        params: list[SamplingParams],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
        media: Sequence[list[MediaItem]] | None = None,
        step_data: Sequence[StepData] | None = None,
        kv_transfer: dict[str, Any] | None = None,
    ) -> Generation:
        """Send prepared prompts, each with its `SamplingParams`, as one request. step_data: of each prompt. kv_transfer: of the only one.

        Completion i of prompt p gets the index p * n + i. Raises `EngineDeadError`, `QueueFullError`, `ShuttingDownError`, and a
        400 for more sequences than the server ever accepts at once.
        """
        if pooling is None:
            check_generates(self.client.info)
        self.check_accepts(params)
        while self._background:  # aborts must reach the engine before the requests that take the freed places
            await asyncio.wait(set(self._background))
            self.check_accepts(params)
        if (deadline := current_deadline.get()) is not None and time.monotonic() >= deadline[0]:
            raise ApiError(504, f"The request did not begin within its limit of {deadline[1]:g} seconds.")
        num_sequences = sum(p.n for p in params)
        generation = Generation(self, num_sequences)
        self.speed.started(time.monotonic())
        first_index, tenant = 0, generation.tenant
        requests: list[EngineRequest] = []
        try:
            for number, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
                for index in range(first_index, first_index + prompt_params.n):
                    generation.clocks[index] = self.metrics.start(
                        len(prompt), None if lora is None else lora.lora_name, None if tenant is None else tenant.name
                    )
                    if generation.record is not None:
                        one = generation.sequences[index] = SequenceRecord(len(prompt), time.monotonic())
                        generation.record.sequences.append(one)
                        generation.record.tenant = None if tenant is None else tenant.name
                if generation.trace is not None:
                    generation.trace.sequence_started(len(prompt))
                added = self._processor.add(
                    request_id,
                    prompt,
                    prompt_params,
                    generation.put,
                    first_index=first_index,
                    priority=priority,
                    cache_salt=cache_salt,
                    lora=lora,
                    pooling=pooling,
                    step_data=None if step_data is None else step_data[number],
                    tenant=tenant,
                )
                if media is not None:
                    added.media = media[number]
                added.kv_transfer = kv_transfer
                self.places.add(tenant, prompt_params.n)
                self.count_tokens(tenant, len(prompt))
                first_index += prompt_params.n
                generation.engine_ids += added.request_ids
                if generation.record is not None:
                    for offset, engine_id in enumerate(reversed(added.request_ids), 1):
                        generation.sequences[first_index - offset].engine_id = engine_id
                requests.append(added)
            self._num_submitting += 1
            try:
                for number, request in enumerate(requests, 1):
                    await self.client.add_request(request)
                    if number % _PROMPTS_PER_TURN == 0:
                        await asyncio.sleep(0)  # streams go on
            except EngineFullError as error:
                self.check_accepts(())
                if error.is_of_key:
                    raise self._key_full(str(error)) from error
                raise self._full(num_sequences, in_flight=self.load - num_sequences) from error
            finally:
                self._num_submitting -= 1
        except BaseException:
            generation.close()
            raise
        return generation

    def release(self, generation: Generation) -> None:
        """Abort a generation's unfinished sequences. Never awaits, because it also runs inside cancelled tasks."""
        if num_ended := self.end(generation):
            self.places.remove(generation.tenant, num_ended)
            self.count_tokens(generation.tenant, sum(clock.new_tokens for clock in generation.clocks.values()))
            self.metrics.observe_aborted(list(generation.clocks.values()))
            for index in generation.clocks if generation.sequences else ():
                generation.sequences[index].end("abort", self)
            self.speed.finished(num_ended, time.monotonic(), in_flight=self.num_in_flight)
            if generation.trace is not None:
                for clock in generation.clocks.values():
                    generation.trace.sequence_finished(clock, "abort")

    def end(self, generation: Generation) -> int:
        """Abort a generation's unfinished sequences in the engine, without a note of it. Returns how many there were."""
        unfinished = self._processor.forget(generation.engine_ids)
        if unfinished:
            self._send(self.client.abort(unfinished))
        return len(unfinished)

    def count_tokens(self, tenant: Tenant | None, num_tokens: int) -> None:
        """Count tokens of a key whose tokens a minute are limited."""
        if tenant is not None and num_tokens and tenant.name in self._rated and self._rates is not None:
            task = asyncio.get_running_loop().create_task(self._count_tokens(self._rates, tenant.name, num_tokens))
            self._counting.add(task)
            task.add_done_callback(self._counting.discard)

    @staticmethod
    async def _count_tokens(rates: RateLimits, name: str, num_tokens: int) -> None:
        await rates.use(name, num_tokens)

    def retry_after(self, num_sequences: int = 1) -> int:
        """Estimated seconds until `num_sequences` more have ended."""
        return self.speed.seconds_until(num_sequences, time.monotonic())

    def call_at(self, when: float, action: Callable[..., None], *arguments: Any) -> asyncio.TimerHandle:
        """Call `action` when time.monotonic() is `when`."""
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), action, *arguments)

    def cancel_all(self) -> None:
        """End every request now. Each is answered with the text generated so far."""
        ended = self._processor.end_all("abort")
        if ended:
            self._send(self.client.abort(ended))

    async def sleep(self, level: int, *, abort: bool) -> None:
        """Refuse new requests, let the accepted ones finish (abort: end them now), and free the engine's memory.

        Raises `ValueError` if the engine cannot sleep.
        """
        async with self._sleep_lock:
            was_sleeping = self.sleeping
            await self._tell_sleeping(True)
            try:
                await self.client.utility("sleep", None, {"level": level, "mode": "abort" if abort else "wait"})
            except ValueError:
                await self._tell_sleeping(was_sleeping)
                raise

    async def scale(self, num_groups: int) -> None:
        """Let the engine have so many data groups. Raises `ValueError` if it cannot. The change goes on where the caller does not wait."""
        await self.client.utility("scale_elastic_ep", None, {"new_data_parallel_size": num_groups})

    async def is_scaling(self) -> bool:
        """Whether the number of data groups is being changed."""
        return bool((await self.client.utility("is_scaling_elastic_ep"))["is_scaling_elastic_ep"])

    async def set_sleeping(self, is_sleeping: bool) -> None:
        """Refuse or accept requests. To refuse them returns once the engine has received all that were accepted: it is told to sleep next,
        and would refuse the others.
        """
        self.sleeping = is_sleeping
        while is_sleeping and self._num_submitting:
            await asyncio.sleep(0.001)
        if is_sleeping and self._siblings is not None:  # another process tells the engine to sleep
            with contextlib.suppress(EngineDeadError):
                await self.client.flush()

    async def wake_up(self, tags: list[str] | None) -> None:
        """Bring back the engine's memory, or the parts in `tags`. Raises `ValueError` if that fails."""
        async with self._sleep_lock:
            answer = await self.client.utility("wake_up", None, {} if tags is None else {"tags": tags})
            await self._tell_sleeping(bool(answer["is_sleeping"]))

    def health_problem(self) -> str | None:
        """One sentence if the engine is dead, silent or stuck in a step, else None. Does not wait for the engine."""
        return self.dead_reason or self.client.health_problem()

    async def shutdown(self) -> None:
        """End every request, stop the engine and stop reading its outputs."""
        self.draining = True
        try:
            await self.client.shutdown(drain=False)
        except Exception as error:  # the engine may die during the shutdown
            logger.warning("The engine did not shut down cleanly: %s", error)
        if self._reader is not None:
            self._reader.cancel()
        self._processor.end_all("abort")

    def check_accepts(self, params: Sequence[SamplingParams]) -> None:
        """Raise as `submit` does if a request with these parameters (one per prompt) would be refused now.

        Empty parameters stand for the smallest request.
        """
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self.draining:
            raise ShuttingDownError
        if self.sleeping:
            raise QueueFullError("The server sleeps: wake it with POST /wake_up.", SLEEP_RETRY_SECONDS)
        info = self.client.info
        limit, count = info.max_in_flight, sum(p.n for p in params) or 1
        tenant = current_tenant.get()
        if limit is None and (tenant is None or tenant.max_waiting is None):
            return
        try:
            self.places.check(tenant, count, limit, info.max_running)
            return
        except TenantLimitError as error:
            raise self._key_full(str(error)) from error
        except RequestsFullError:
            assert limit is not None
        if count > limit:
            raise ApiError(
                400,
                f"This request has {count} sequences, but the server accepts {limit} at once: send fewer.",
                "n" if params[0].n > 1 else "prompt",
            )
        raise self._full(count, in_flight=self.num_in_flight)

    def _key_full(self, message: str) -> ApiError:
        """The answer to a request for which its API key has no room."""
        return ApiError(429, message, retry_after=self.retry_after())

    def _full(self, count: int, *, in_flight: int) -> QueueFullError:
        """The answer to a request with `count` sequences for which there is no room. in_flight: sequences of all API processes."""
        limit = self.client.info.max_in_flight
        assert limit is not None, "without a limit there is always room"
        share = self.num_in_flight / max(1, self.load)
        return self.speed.refusal(count, limit, time.monotonic(), in_flight=max(in_flight, limit - count + 1), share=share)

    async def _tell_sleeping(self, is_sleeping: bool) -> None:
        if self._siblings is None:
            await self.set_sleeping(is_sleeping)
        else:
            await self._siblings.call("set_sleeping", is_sleeping)

    async def _read(self) -> None:
        try:
            async for step in self.client.outputs():
                self.now = time.monotonic()
                if step.stats is not None and step.stats.steps is not None:
                    self.step_totals = step.stats.steps
                    self.book.observe(step.stats, step.replica)
                to_abort = self._processor.process(step.outputs)
                if step.outputs:
                    self.output_seconds += (time.monotonic() - self.now) / len(step.outputs)
                if to_abort:
                    self._send(self.client.abort(to_abort))
                if step.stats is not None:
                    # A single process counts the engine's steps, so that the sum over the processes is right.
                    observe = self.metrics.observe_step if self._process == 0 else self.metrics.observe_held
                    observe(step.stats, step.replica)
                if self.client.dead_reason is not None:
                    self._refuse(self.client.dead_reason)  # requests on the other replicas continue
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._die(error)
        else:
            if not self.draining:
                self._die(EngineDeadError("The engine ended its outputs."))

    def _die(self, error: Exception) -> None:
        reason = str(error) or "The engine died."
        self.now = time.monotonic()
        self._processor.end_all("error", error=reason)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        """Accept no more requests."""
        if self.dead_reason is None:
            self.dead_reason = reason
            logger.error("The engine is dead: %s", reason)
            if self._on_death is not None:
                self._on_death(reason)

    def _send(self, message: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._quietly(message))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _quietly(self, message: Coroutine[Any, Any, None]) -> None:
        try:
            await message
        except EngineDeadError:
            pass  # `_read` sees the death too, with its reason
        except Exception as error:
            self._die(error)
