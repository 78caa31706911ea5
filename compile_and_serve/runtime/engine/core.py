"""`EngineCore`: in each step, the scheduler chooses what to compute, the executor runs the model, and the scheduler takes the tokens.

With async scheduling, a step is launched before the result of the previous one is read, so that the device need not wait
for the host.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import msgspec

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.executor import Executor, StepHandle
from compile_and_serve.runtime.distributed.factory import make_executor
from compile_and_serve.runtime.engine.adapters import Adapters
from compile_and_serve.runtime.engine.interrupts import DeferInterrupt
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    ErrorKind,
    RequestOutput,
    Sibling,
    StageCallback,
    StepOutputs,
    ignore_stage,
)
from compile_and_serve.runtime.sampling.checks import verify_token_ids
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput

logger = logging.getLogger(__name__)

UtilityValue = dict[str, int | float | str | bool | None]


PREPARING_SECONDS = 0.002  # for a grammar or an adapter, while no step can run: new requests may arrive meanwhile
NOT_PREPARED = "The engine failed on this request's structured_outputs or adapter; its log has the details."


class EngineCore:
    """Call `step` while `has_work`. `add_request` and `abort` may be called between any two steps.

    Construction raises a `ValueError` with one sentence if the model, its files or the options are wrong, and
    `RankFailedError` if a rank cannot start.
    """

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = ignore_stage) -> None:
        self._executor: Executor = make_executor(config, on_stage)
        found = self._executor.info
        options = config.scheduler.for_device(is_asynchronous=found.is_asynchronous)
        self.config = replace(config, scheduler=options)
        cache = config.cache
        if cache.enable_prefix_caching and found.prefix_caching_unsupported is not None:
            logger.warning("Prefix caching is off: %s", found.prefix_caching_unsupported)
            cache = replace(cache, enable_prefix_caching=False)
        self._scheduler = Scheduler(
            options,
            cache,
            num_blocks=found.num_blocks,
            max_model_len=found.max_model_len,
            groups=found.groups,
            num_draft_tokens=found.num_draft_tokens,
            num_adapter_slots=config.compile.max_loras,
        )
        self.adapters = Adapters(
            self._executor, found.adapter_targets, max_rank=config.compile.max_lora_rank,
            max_on_host=max(config.max_cpu_loras or 0, config.compile.max_loras),
            is_used=self._scheduler.is_adapter_used,
        )  # fmt: skip
        # Replicas must not give their requests the same seeds.
        self._seeds = random.Random(f"{config.model.seed} {config.parallel.data_parallel_rank}")
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        # With draft tokens one step at a time: the host compares them before it can make the next step's inputs.
        self._depth = 2 if options.async_scheduling and not found.num_draft_tokens else 1
        self._captures_due = 0  # as of the last idle task
        self._host_gap = 0.0
        self._idle_since: float | None = None
        self._preparing: list[tuple[list[str], Future[Any]]] = []  # grammars and adapters that are not ready
        self._broken_by: BaseException | None = None  # the error with which a step failed
        self.info = EngineInfo(
            max_model_len=found.max_model_len,
            vocab_size=found.vocab_size,
            num_kv_blocks=found.num_blocks,
            block_size=config.cache.block_size,
            dtype=found.dtype,
            device=found.device,
            max_running=self._scheduler.max_num_seqs,
            max_sequence_len=self._scheduler.max_len,
            prefix_caching=cache.enable_prefix_caching,
            max_in_flight=options.max_in_flight,
            compile_report=found.compile_report,
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request with all its sequences.

        Raises `ValueError` with one sentence for a request that can never run, and `QueueFullError` if too many wait.
        """
        params, vocab_size = request.sampling_params, self.info.vocab_size
        params.verify()
        verify_token_ids(params, request.stop_token_ids, vocab_size)
        prompt = request.prompt_token_ids
        if prompt and (min(prompt) < 0 or max(prompt) >= vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"The prompt has token id {wrong}, but the model's ids are 0 to {vocab_size - 1}.")
        if params.seed is None and not params.is_greedy:
            # Drawn once, here: all ranks must draw the same tokens, and a preempted request must continue its stream.
            draw = self._seeds.getrandbits
            request = msgspec.structs.replace(
                request,
                sampling_params=msgspec.structs.replace(params, seed=draw(63)),
                siblings=[Sibling(sibling.request_id, draw(63)) for sibling in request.siblings],
            )
        structured, grammar, adapter = params.structured_outputs, None, None
        if structured is not None:
            if structured.compiled is None:
                raise ValueError("structured_outputs must come from InputProcessor.prepare, which checks them.")
            grammar = self._executor.compile_grammar(structured.compiled)
        if request.lora is not None:
            adapter = self.adapters.load(request.lora)
        awaited = [future for future in (grammar, adapter) if future is not None]
        for future in awaited:
            if future.done():
                future.result()
        self._scheduler.add_request(request, grammar, adapter)
        self._preparing += [(request.request_ids, future) for future in awaited if not future.done()]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or self._scheduler.has_work()

    def step(self) -> StepOutputs:
        """Launch as many steps as may be in flight, wait for the oldest, and return its outputs (none without work).

        Raises what a rank raised, `RankFailedError` for a rank that is gone, and `RuntimeError` after a failed launch.
        """
        if self._broken_by is not None:
            raise RuntimeError(
                f"An earlier step failed ({type(self._broken_by).__name__}: {self._broken_by}), so the engine's state is "
                "unknown: create a new engine."
            ) from self._broken_by
        scheduler, in_flight, executor = self._scheduler, self._in_flight, self._executor
        failed = self._requests_not_prepared() if self._preparing else []
        depth = self._depth
        if executor.stats().captures_due > self._captures_due:
            depth = 1  # a graph can be captured only while nothing is in flight
            if not in_flight:
                self.idle()
        while len(in_flight) < depth:
            with DeferInterrupt():  # on the CPU, launching a step computes it
                scheduled = scheduler.schedule()
                if scheduled is None:
                    break
                if not in_flight and self._idle_since is not None:
                    self._host_gap += time.perf_counter() - self._idle_since
                try:
                    in_flight.append((scheduled, executor.launch(scheduled)))
                except BaseException as error:
                    self._broken_by = error
                    raise
        if not in_flight:
            self._idle_since = None
            if self._preparing and not failed:
                wait((future for _, future in self._preparing), PREPARING_SECONDS, FIRST_COMPLETED)
            return StepOutputs(outputs=failed, stats=self.stats())
        scheduled, handle = in_flight[0]
        result = executor.result(handle)  # if Ctrl-C interrupts this wait, the step stays in flight
        in_flight.popleft()
        self._idle_since = None if in_flight else time.perf_counter()
        outputs = failed + scheduler.update(scheduled, result)
        if not scheduler.has_work():
            self._idle_since = None
        stats = self.stats()
        stats.step_tokens = scheduled.total_num_scheduled_tokens
        return StepOutputs(outputs=outputs, stats=stats)

    def _requests_not_prepared(self) -> list[RequestOutput]:
        """End the requests whose grammars or adapters turned out to be wrong."""
        outputs: list[RequestOutput] = []
        for request_ids, future in self._preparing:
            if future.done() and (error := future.exception()) is not None:
                kind: ErrorKind = "invalid" if isinstance(error, ValueError) else "internal"
                reason = str(error) if kind == "invalid" else NOT_PREPARED
                outputs += [
                    RequestOutput(request_id=request_id, finish_reason="error", error=reason, error_kind=kind)
                    for request_id in self._scheduler.unfinished(request_ids)
                ]
                self._scheduler.abort(request_ids)
        self._preparing = [entry for entry in self._preparing if not entry[1].done()]
        return outputs

    def idle(self) -> bool:
        """Run one deferrable task (capture one more CUDA graph); False if there is none or a step is in flight.

        Raises `RankFailedError` for a rank that is gone.
        """
        if self._in_flight:
            return False
        self._captures_due = self._executor.stats().captures_due
        return self._executor.idle()

    def stats(self) -> EngineStats:
        """State after the last step, with `step_tokens` 0."""
        stats, worker = self._scheduler.stats(), self._executor.stats()
        stats.padded_tokens = worker.padded_tokens
        stats.steps_on_device = worker.steps_on_device
        stats.graph_replays = worker.graph_replays
        stats.host_gap_seconds = self._host_gap
        return stats

    def utility(self, method: str, adapter: LoRARequest | None = None) -> UtilityValue:
        """Answer a `UtilityCall`. Raises `ValueError` for an unknown method and names the known ones, and `AdapterError`."""
        if method == "load_adapter" and adapter is not None:
            self.adapters.load(adapter)
            return {"ok": True}
        if method == "unload_adapter" and adapter is not None:
            self.adapters.unload(adapter.lora_int_id)
            return {"ok": True}
        if method == "ping":
            return {"ok": True}
        if method == "reset_prefix_cache":
            return {"ok": self._scheduler.reset_prefix_cache()}
        if method == "stats":
            stats = self.stats()
            return {
                name: value for name in stats.__struct_fields__ if not isinstance(value := getattr(stats, name), dict)
            }
        raise ValueError(
            f"The engine has no method {method!r}: known are ping, reset_prefix_cache, stats, load_adapter, unload_adapter."
        )

    def abort_all(self) -> list[RequestOutput]:
        """End every request, and return an output with finish_reason "abort" for each."""
        outputs = self._scheduler.fail_all("")
        for output in outputs:
            output.finish_reason, output.error = "abort", None
        while self._in_flight:
            self._executor.result(self._in_flight.popleft()[1])
        return outputs

    def shutdown(self) -> None:
        """Stop the executor. The core cannot be used afterwards. May be called more than once."""
        self._in_flight.clear()
        self._executor.shutdown()
