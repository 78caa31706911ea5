"""`EngineCore`: in each step, the scheduler chooses what to compute, the executor runs the model, and the scheduler takes the tokens.

With async scheduling, a step is launched before the result of the previous one is read, so that the device need not wait
for the host.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import msgspec

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.handover.engine_side import note_seed, with_handover
from compile_and_serve.runtime.distributed.executor import Executor, StepHandle
from compile_and_serve.runtime.distributed.factory import make_executor
from compile_and_serve.runtime.engine.adapters import Adapters
from compile_and_serve.runtime.engine.canaries import Canaries
from compile_and_serve.runtime.engine.data_groups import DataGroups, MovedRequest
from compile_and_serve.runtime.engine.elastic import Elastic
from compile_and_serve.runtime.engine.expert_balance import ExpertBalancer
from compile_and_serve.runtime.engine.interrupts import DeferInterrupt
from compile_and_serve.runtime.engine.schedulers import data_groups, engine_info, make_schedulers, publish_events
from compile_and_serve.runtime.ledger.records import Preparation
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import (
    EngineRequest,
    EngineStats,
    ErrorKind,
    RequestOutput,
    Sibling,
    StageCallback,
    StepOutputs,
    UtilityOptions,
    ignore_stage,
)
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError, for_engine
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.source_prompts import for_encoder
from compile_and_serve.runtime.scheduler.step_ledger import StepLedger
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput

logger = logging.getLogger(__name__)

SLEEP_TAGS = ("weights", "kv_cache")
UtilityValue = dict[str, int | float | str | bool | None]
PREPARING_SECONDS = 0.002  # for a grammar or an adapter, while no step can run: new requests may arrive meanwhile
SHORT_WAIT_SECONDS = 0.05  # of a wait for blocks
TRANSFER_SECONDS = 0.0005  # for blocks, at first: a request from another engine waits for nothing else
NOT_PREPARED = "The engine failed on this request's structured_outputs or adapter; its log has the details."


class EngineCore:
    """Call `step` while `has_work`. `add_request` and `abort` may be called between any two steps.

    Construction raises a `ValueError` with one sentence if the model, its files or the options are wrong, and
    `RankFailedError` if a rank cannot start.
    """

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        self.executor: Executor = make_executor(config, on_stage)
        # Replicas must not give their requests the same seeds.
        self._seeds = random.Random(f"{config.model.seed} {config.parallel.data_parallel_rank}")
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._host_gap = 0.0
        self._idle_since: float | None = None
        # When the oldest step in flight began: at the end of the step before it, so that host time between two steps counts.
        self._step_began: float | None = None
        self._preparing: list[tuple[list[str], Future[Any]]] = []  # grammars and adapters that are not ready
        self._waits_since = self._waited_at = 0.0  # for blocks
        self._is_profiling = False
        self._to_profile: str | None = None  # what `Executor.profile` is to be called with
        self._asleep: set[str] = set()  # tags
        self._refusal: str | None = None  # why new requests are refused
        self._broken_by: BaseException | None = None  # the error with which a step failed
        self._steps: StepLedger | None = None
        self._ended: list[RequestOutput] = []  # requests that no other ranks could go on with
        self._moved: list[MovedRequest] = []  # from ranks that are gone, while there are no others
        self.elastic = Elastic(self, config) if config.parallel.enable_elastic_ep else None
        self._begin(config)

    def _begin(self, config: EngineConfig) -> None:
        """Schedule for the ranks that the executor has."""
        found = self.executor.info
        options = config.scheduler.for_device(
            is_asynchronous=found.is_asynchronous, longest_whole_prompt=found.max_model_len if found.whole_prompts else None
        )
        cache = replace(config.cache, block_size=found.block_size)
        config = self.config = replace(config, scheduler=options, cache=cache)
        if cache.enable_prefix_caching and found.prefix_caching_unsupported is not None:
            logger.warning("Prefix caching is off: %s", found.prefix_caching_unsupported)
            cache = replace(cache, enable_prefix_caching=False)
        if not found.groups:  # there is no cache
            cache = replace(cache, enable_prefix_caching=False)
        if config.kv_transfer is not None and not cache.enable_prefix_caching:
            raise ValueError("kv_transfer_config hands cached prefixes over, which this model does not have: see the log.")
        schedulers = make_schedulers(self.config, cache, found)
        self._pools = [one.manager.pool for one in schedulers]
        self._handovers = None if config.kv_transfer is None else schedulers[0].handovers
        is_one = len(schedulers) == 1 and self.elastic is None
        self._scheduler: Scheduler | DataGroups = schedulers[0] if is_one else data_groups(schedulers, self.config, cache, found)
        self._events = publish_events(self.config, schedulers)
        self.adapters = Adapters(
            self.executor,
            found.adapter_targets,
            max_on_host=max(config.max_cpu_loras or 0, config.compile.max_loras),
            is_used=self._scheduler.adapter_slots.is_used,
        )
        self._depth = self.config.max_steps_in_flight
        self._captures_due = 0  # as of the last idle task
        self.canaries: Canaries | None = None
        if config.verify_state and found.groups:
            computes = is_one and found.length_regimes is None and found.pooling is None
            self.canaries = Canaries(schedulers, found.groups, steps_in_flight=self._depth, computes=computes)
        self.experts: ExpertBalancer | None = None
        if config.expert_balance is not None and found.spread is not None:
            self.experts = ExpertBalancer(config.expert_balance, found.spread)
        if options.request_ledger and self._steps is None:
            weights = found.compile_report.get("loaded_bytes", 0)
            self._steps = StepLedger(weight_bytes=int(weights), page_bytes=found.page_bytes)
        self.info = engine_info(self.config, cache, found, self._scheduler)

    def replace_ranks(self, config: EngineConfig, start: Callable[[], Executor]) -> None:
        """End the ranks, and go on with the unfinished requests on those that `start` brings then. No step may be in flight. If `start`
        raises, this may be called again.
        """
        if isinstance(self._scheduler, DataGroups):
            self._moved += self._scheduler.take_all()
        self.executor.shutdown()
        for publisher, _ in self._events:
            publisher.close()
        self._events = []
        self.executor = start()
        self._begin(config)
        moved, self._moved = self._moved, []
        for one in moved:
            assert isinstance(self._scheduler, DataGroups)
            if (output := self._scheduler.adopt(one)) is not None:
                self._ended.append(output)

    def end_group(self, group: int | None, reason: str) -> StepOutputs:
        """A rank of a data group is gone: end the group's requests, and forget all steps in flight. group: None: all groups."""
        assert isinstance(self._scheduler, DataGroups)
        self._in_flight.clear()
        self._broken_by = self._step_began = self._idle_since = self._to_profile = None
        self._is_profiling = False
        return StepOutputs(outputs=self._scheduler.fail_group(group, reason), stats=self.stats())

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether a launched step is not over."""
        return bool(self._in_flight)

    @property
    def unfinished_keys(self) -> Collection[str]:
        """Names of the API keys that have unfinished requests."""
        return self._scheduler.unfinished_keys

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request with all its sequences.

        Raises `ValueError` with one sentence for a request that can never run, and `QueueFullError` if too many wait.
        """
        if self._refusal is not None:
            raise QueueFullError(self._refusal)
        request = for_engine(request, self.info)
        request = for_encoder(request, self.executor.info.encoder)
        if request.kv_transfer is not None:
            request = with_handover(request, self.info.kv_transfer)
        params, contents, encoder = request.sampling_params, request.contents(), self._scheduler.encoder
        if contents is not None:
            contents.check(len(request.prompt_token_ids), self.executor.info.arrays)
        if encoder is not None:
            encoder.check(contents)
        if params.seed is None and not params.is_greedy:
            # Drawn once, here: all ranks must draw the same tokens, and a preempted request must continue its stream.
            draw = self._seeds.getrandbits
            request = msgspec.structs.replace(
                request,
                sampling_params=msgspec.structs.replace(params, seed=draw(63)),
                siblings=[Sibling(sibling.request_id, draw(63)) for sibling in request.siblings],
            )
            if request.kv_transfer is not None:
                note_seed(request)
        structured, awaited = params.structured_outputs, dict[Future[Any], Preparation]()
        if structured is not None:
            if structured.compiled is None:
                raise ValueError("structured_outputs must come from InputProcessor.prepare, which checks them.")
            tenant = "" if request.tenant is None else request.tenant.name
            awaited[self.executor.compile_grammar(structured.compiled, tenant)] = "grammar"
        if request.lora is not None:
            awaited[self.load_adapter(request.lora)] = "adapter"
        # One that ends from here on is seen by `_requests_not_prepared`: until then, the request cannot start.
        pending = {future: what for future, what in awaited.items() if not future.done()}
        for future in awaited:
            if future not in pending:
                future.result()
        self._scheduler.add_request(request, pending)
        self._preparing += [(request.request_ids, future) for future in pending]

    def load_adapter(self, adapter: LoRARequest) -> Future[None]:
        """Have every rank read an adapter. `poll_adapters` and `step` end the future. This and the future raise `AdapterError`."""
        if not adapter.pinned:
            return self.adapters.load(adapter)
        slots = self._scheduler.adapter_slots
        was_pinned = slots.is_pinned(adapter.lora_int_id)
        slots.pin(adapter.lora_int_id)
        try:
            loading = self.adapters.load(adapter)
        except Exception:
            if not was_pinned:
                slots.unpin(adapter.lora_int_id)
            raise
        if not was_pinned:

            def unpin_failed(loaded: Future[None]) -> None:
                if loaded.cancelled() or loaded.exception() is not None:
                    slots.unpin(adapter.lora_int_id)

            loading.add_done_callback(unpin_failed)
        return loading

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or bool(self._ended) or self._scheduler.has_work()

    def step(self) -> StepOutputs:
        """Launch as many steps as may be in flight, wait for the oldest, and return its outputs (none without work).

        Raises what a rank raised, `RankFailedError` for a rank that is gone, and `RuntimeError` after a failed launch.
        """
        if self._broken_by is not None:
            raise RuntimeError(
                f"An earlier step failed ({type(self._broken_by).__name__}: {self._broken_by}), so the engine's state is "
                "unknown: create a new engine."
            ) from self._broken_by
        if self.elastic is not None:
            self.elastic.poll()
        scheduler, in_flight, executor = self._scheduler, self._in_flight, self.executor
        self.poll_adapters()
        failed = self._requests_not_prepared() if self._preparing else []
        if self._handovers is not None:
            failed += self._handovers.take()
        if self._ended:
            failed, self._ended = failed + self._ended, []
        depth = self._depth
        if executor.stats().captures_due > self._captures_due:
            depth = 1  # a graph can be captured only while nothing is in flight
            if not in_flight:
                self._idle(requests_wait=True)
        if self.elastic is not None and self.elastic.holds_steps:
            depth = 0
        if self.canaries is not None:
            self.canaries.begin()
        while len(in_flight) < depth and self._to_profile is None:
            with DeferInterrupt():  # on the CPU, launching a step computes it
                scheduled = scheduler.schedule()
                if scheduled is None:
                    break
                if self.canaries is not None:
                    self.canaries.plan(scheduled)
                if self.experts is not None:
                    self.experts.begin(scheduled)
                if not in_flight and self._idle_since is not None:
                    self._host_gap += time.perf_counter() - self._idle_since
                if self._step_began is None:
                    self._step_began = time.perf_counter()
                try:
                    in_flight.append((scheduled, executor.launch(scheduled)))
                except BaseException as error:
                    self._broken_by = error
                    raise
        if not in_flight:
            self._idle_since = None
            if self._preparing and not failed:
                self._wait_for_others()
            return StepOutputs(outputs=failed, stats=self.stats())
        scheduled, handle = in_flight[0]
        result = executor.result(handle)  # if Ctrl-C interrupts this wait, the step stays in flight
        in_flight.popleft()
        if self._to_profile is not None and not in_flight:
            self.executor.profile(self._to_profile)
            self._to_profile = None
        now = time.perf_counter()
        self._idle_since = None if in_flight else now
        seconds = 0.0 if self._step_began is None else now - self._step_began
        self._step_began = now
        if self.canaries is not None:
            self.canaries.take(scheduled, result)
        if self._steps is not None:
            self._steps.add(scheduled, result, seconds, self._pools)
        outputs = failed + scheduler.update(scheduled, result, seconds)
        if self.canaries is not None:
            outputs = self.canaries.without_own(outputs)
        if not scheduler.has_work():
            self._idle_since = self._step_began = None
        elif not (in_flight or scheduled.num_scheduled_tokens or outputs or scheduled.transfers or result.transfers):
            self._wait_for_others()
        self._publish_events()
        stats = self.stats()
        stats.step_tokens = scheduled.total_num_scheduled_tokens
        if self.experts is not None:
            self.experts.take(result.expert_tokens)
        if self.config.expert_metrics:
            stats.expert_tokens = result.expert_tokens
        if self._steps is not None:
            self._steps.add_to(stats, scheduler.misses)
        return StepOutputs(outputs=outputs, stats=stats)

    def _publish_events(self) -> None:
        """Tell those who listen what the prefix cache has got and lost."""
        for publisher, recorder in self._events:
            if (batch := recorder.take()) is not None:
                publisher.publish(batch)

    def _wait_for_others(self) -> None:
        """No step can run: wait a little for a grammar, an adapter or blocks."""
        awaited = [*(future for _, future in self._preparing), *self.adapters.being_read]
        if awaited:
            wait(awaited, PREPARING_SECONDS, FIRST_COMPLETED)
        else:
            now = time.monotonic()
            if now - self._waited_at > 2 * PREPARING_SECONDS:
                self._waits_since = now
            time.sleep(TRANSFER_SECONDS if now - self._waits_since < SHORT_WAIT_SECONDS else PREPARING_SECONDS)
            self._waited_at = time.monotonic()

    def poll_adapters(self) -> None:
        """End the futures of adapters that every rank has read. `step` does it too."""
        if self.adapters.being_read:
            if not self._in_flight:
                self.executor.poll()
            self.adapters.poll()

    def _requests_not_prepared(self) -> list[RequestOutput]:
        """End the requests whose grammars or adapters turned out to be wrong."""
        outputs: list[RequestOutput] = []
        for request_ids, future in self._preparing:
            if future.done() and (error := future.exception()) is not None:
                kind: ErrorKind = "invalid" if isinstance(error, ValueError) else "internal"
                reason = str(error) if kind == "invalid" else NOT_PREPARED
                outputs += [
                    RequestOutput(request_id=request_id, finish_reason="error", error=reason, error_kind=kind)
                    for request_id in request_ids
                    if request_id in self._scheduler.requests
                ]
                self._scheduler.abort(request_ids)
        self._preparing = [entry for entry in self._preparing if not entry[1].done()]
        return outputs

    def idle(self) -> bool:
        """Run one deferrable task (capture one more CUDA graph, measure kernels); False if there is none, or if requests are unfinished.

        Raises `RankFailedError` for a rank that is gone.
        """
        return not self.has_work() and self._idle(requests_wait=False)

    def _idle(self, *, requests_wait: bool) -> bool:
        if self._asleep:
            return False
        self._captures_due = self.executor.stats().captures_due
        return self.executor.idle(requests_wait=requests_wait)

    def stats(self) -> EngineStats:
        """State after the last step, with `step_tokens` 0."""
        stats, worker = self._scheduler.stats(), self.executor.stats()
        stats.padded_tokens, stats.steps_on_device = worker.padded_tokens, worker.steps_on_device
        stats.graph_replays, stats.prompt_steps = worker.graph_replays, worker.prompt_steps
        stats.pending_work = worker.pending_work
        stats.host_gap_seconds = self._host_gap
        stats.stage_wait_seconds = worker.stage_wait_seconds
        if self.canaries is not None:
            self.canaries.add_to(stats)
        return stats

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is freed, so that no request can run."""
        return bool(self._asleep)

    def refuse_requests(self, reason: str) -> None:
        """Refuse new requests until the engine has slept and is awake again."""
        self._refusal = reason

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, whose content is forgotten, and the weights. Stops transfers of blocks. Does nothing if the engine sleeps.

        level: 1 keeps the weights in host memory, 2 drops them; waking then reads the checkpoint again. Raises `ValueError` for
        another level, or while requests are unfinished.
        """
        if not self._asleep:
            self._refusal = None  # if sleeping fails, requests are accepted again
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {level!r:.200}.")
        if self._in_flight or self._scheduler.requests:
            raise ValueError("Requests are unfinished, so the engine cannot sleep: wait for them or abort them.")
        if self._asleep:
            return
        self._refusal = "The engine sleeps: wake it up first."
        self._scheduler.forget_device_memory()
        self._publish_events()
        self._asleep = set(SLEEP_TAGS)
        self.executor.sleep(level)
        if self.experts is not None and level == 2:
            self.experts.reset()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Bring back what `sleep` freed, or only the parts in `tags`: "weights", "kv_cache". Requests run once both are back.

        Raises `ValueError` for another tag, or with one sentence if there is not enough memory.
        """
        wanted = set(SLEEP_TAGS if tags is None else tags)
        if unknown := wanted.difference(SLEEP_TAGS):
            raise ValueError(f"tags must be among {', '.join(SLEEP_TAGS)}, got {min(unknown)!r:.200}.")
        parts = wanted & self._asleep
        if parts:
            self.executor.wake_up(weights="weights" in parts, kv_cache="kv_cache" in parts)
            self._asleep -= parts
        if not self._asleep:
            self._refusal = None
            self._captures_due = self.executor.stats().captures_due

    def profile(self, folder: str) -> None:
        """Begin to record a trace, or write it to `folder`, unless that is "". Raises `ValueError` if it comes out of turn."""
        if self._asleep:
            raise ValueError("The engine sleeps: wake it up first.")
        if bool(folder) != self._is_profiling:
            raise ValueError("No profile is being recorded." if folder else "A profile is being recorded already.")
        self._is_profiling = not folder
        if self._in_flight:
            self._to_profile = folder  # `step` does it once nothing is in flight
        else:
            self.executor.profile(folder)

    def utility(self, method: str, adapter: LoRARequest | None = None, options: UtilityOptions | None = None) -> UtilityValue:
        """Answer a `UtilityCall` that waits for nothing.

        Raises `ValueError` for an unknown method and names the known ones, and `AdapterError`.
        """
        if method == "unload_adapter" and adapter is not None:
            self._scheduler.adapter_slots.unpin(adapter.lora_int_id)
            self.adapters.unload(adapter.lora_int_id)
            return {"ok": True}
        given: dict[str, Any] = dict(options or {})
        if method == "sleep":
            self.sleep(given.get("level", 1))
        elif method == "wake_up":
            self.wake_up(given.get("tags"))
        if method in ("sleep", "wake_up", "is_sleeping"):
            return {"ok": True, "is_sleeping": self.is_sleeping}
        if method == "profile":
            self.profile(str(given.get("folder", "")))
        if method in ("ping", "profile"):
            return {"ok": True}
        if method == "is_scaling_elastic_ep":
            return {"is_scaling_elastic_ep": self.elastic is not None and self.elastic.is_scaling}
        if method == "reset_prefix_cache":
            is_reset = self._scheduler.reset_prefix_cache()
            self._publish_events()
            return {"ok": is_reset}
        if method == "stats":
            stats = self.stats()
            return {name: value for name in stats.__struct_fields__ if not isinstance(value := getattr(stats, name), dict | list)}
        raise ValueError(
            f"The engine has no method {method!r}: known are ping, reset_prefix_cache, stats, unload_adapter, "
            "sleep, wake_up, is_sleeping, profile."
        )

    def abort_all(self) -> list[RequestOutput]:
        """End every request, and return an output with finish_reason "abort" for each."""
        outputs = self._scheduler.fail_all("")
        for output in outputs:
            output.finish_reason, output.error = "abort", None
        while self._in_flight:
            self._scheduler.end_transfers(self.executor.result(self._in_flight.popleft()[1]).transfers)
        return outputs

    def shutdown(self) -> None:
        """Stop the executor. The core cannot be used afterwards. May be called more than once."""
        self._in_flight.clear()
        for publisher, _ in self._events:
            publisher.close()
        if self._handovers is not None:
            self._handovers.close()
        self.executor.shutdown()
