"""Continuous batching: which requests run in the next step, with how many tokens, and what its results mean for them.

One step has a token budget. Running decodes take one token each; then a prefill that is under way, then waiting
requests in order, take chunks of what is left. Both queues are ordered by one key (arrival for "fcfs"; priority, then
arrival for "priority"), nobody is overtaken by a request behind him, and when blocks run out the last of the running
is preempted: it loses its blocks, waits at its old place in the order and recomputes prompt and generated tokens (its
cached blocks are usually still there). The first in order is never preempted, so there is always progress.

Where every seat is taken and requests wait, seats that become free may be filled several at once (SEATS_TOKENS).

Prompts whose logprobs are wanted get PROMPT_LOGPROB_ROWS tokens of a step in all: their logits take memory.

A request gets the blocks of its whole prompt when it is admitted, so a prefill that has begun never lacks one; only
decodes allocate.

Async scheduling is not a mode of this file: `schedule` advances a request when it is scheduled and `update` appends
tokens when they are known, and any number of steps may be in flight between the two (none: the synchronous engine).
What follows from it:
- A decode may be scheduled before its input token is known here; never beyond the length limits, which do not depend
  on its value.
- When `update` finds that a request ended, the steps in flight that have it compute one token too many: that token is
  discarded. Its blocks are freed at once; runtime/scheduler/kv_cache_manager.py says why that is safe.
- A preempted request whose token is in flight keeps it, and resumes when it is known.
"""

from __future__ import annotations

import heapq
import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, ErrorKind, FinishReason, RequestOutput
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.step_messages import (
    NOTHING_LEFT,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

logger = logging.getLogger(__name__)

# `SchedulerConfig.admit_in_groups`: a step with few prompt tokens runs its products at a lower rate than a longer one, and is launched
# piece by piece, where decodes alone replay one graph. Seats that become free are taken
SEATS_TOKENS = 2048  # once so many prompt tokens come at once,
SEATS_PART = 16  # or this part of all seats is free,
SEATS_STEPS = 8  # or so many steps have gone by.
PROMPT_LOGPROB_ROWS = 256  # prompt tokens of a step whose logits are wanted: each is a row of the whole vocabulary


class QueueFullError(RuntimeError):
    """As many requests as may run and wait are here already; try again later (HTTP 503)."""


@dataclass(slots=True)
class _Chunk:
    """A piece of a prefill in a step. num_preemptions: the request's then; another count now means other blocks."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_preemptions: int


@dataclass(slots=True)
class _StepInFlight:
    """The requests themselves, not their ids: an id may belong to another request by the time the step is over."""

    step: int
    decodes: list[Request] = field(default_factory=list)
    chunks: list[_Chunk] = field(default_factory=list)


class Scheduler:
    """Requests in, steps out: `add_request`, then `schedule` → (the model runner) → `update`, in turn.

    num_blocks: blocks of the KV cache. max_model_len: tokens that prompt and output of one request may have together;
    where the whole cache holds fewer, that is the limit.
    """

    def __init__(self, config: SchedulerConfig, cache: CacheConfig, *, num_blocks: int, max_model_len: int) -> None:
        if config.max_num_seqs < 1 or config.token_budget < 1:
            raise ValueError(
                "max_num_seqs and max_num_batched_tokens must be at least 1, "
                f"got {config.max_num_seqs} and {config.token_budget}."
            )
        self.config = config
        self.manager = KVCacheManager(num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching)
        self.max_model_len = max_model_len
        self.max_len = min(max_model_len, self.manager.max_tokens)
        if self.max_len < max_model_len:
            logger.warning(
                "The KV cache holds %d tokens, fewer than max_model_len=%d: sequences end at %d tokens.",
                self.max_len, max_model_len, self.max_len,
            )  # fmt: skip
        self.max_num_seqs = config.max_running
        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._running: list[Request] = []  # sorted by key
        self._waiting: list[tuple[tuple[float, ...], Request]] = []  # heap
        self._in_flight: deque[_StepInFlight] = deque()
        self._forget_ids: list[str] = []  # for the next step's finished_request_ids
        self._blocked: tuple[Request, int] | None = None  # who did not fit, and the spare blocks there were
        self._num_added = 0
        self._next_step = 0
        self._rows_left = 0  # of PROMPT_LOGPROB_ROWS, in the step that is being scheduled
        self._num_preemptions = 0
        self._was_full = False  # with requests waiting, when there was last a budget for them
        self._steps_waited = 0  # that seats which have become free since were left so

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ValueError when it can never run (empty prompt, longer than the model or the whole KV cache allows, id
        in use) and QueueFullError beyond `SchedulerConfig.max_in_flight` unfinished requests.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        num_needed = num_prompt_tokens + (request.sampling_params.max_tokens != 0)
        if num_prompt_tokens == 0:
            raise ValueError("The prompt has no tokens; give at least one.")
        if request.request_id in self._requests:
            raise ValueError(f"A request with id {request.request_id!r} is being processed; ids must be unique.")
        if num_needed > self.max_model_len:
            raise ValueError(
                f"The prompt has {num_prompt_tokens} tokens, which leaves no room for output in the model's "
                f"{self.max_model_len}; shorten it."
            )
        if num_needed > self.max_len:
            raise ValueError(
                f"The prompt has {num_prompt_tokens} tokens, but the whole KV cache holds {self.max_len}; "
                "shorten it or give the cache more memory."
            )
        limit = self.config.max_in_flight
        if limit is not None and len(self._requests) >= limit:
            raise QueueFullError(
                f"{len(self._requests)} requests are running or waiting, which is the limit; try again later."
            )

        now = time.time()
        order = float(self._num_added)
        self._num_added += 1
        key: tuple[float, ...] = (order,)
        if self.config.policy == "priority":
            key = (float(request.priority), request.arrival_time or now, order)
        new = Request(request, key=key, max_len=self.max_len, now=now)
        self.manager.hash_prompt(new, request.cache_salt)
        self._requests[new.request_id] = new
        heapq.heappush(self._waiting, (key, new))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are, without an output. Unknown ids (finished just now, say) are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
        self._drop_finished()

    def fail_all(self, reason: str) -> list[RequestOutput]:
        """End every request with the error `reason` (a sentence). Steps in flight are forgotten: do not update them."""
        outputs = [
            RequestOutput(request_id=request_id, finish_reason="error", error=reason) for request_id in self._requests
        ]
        for request in list(self._requests.values()):
            self._finish(request, "error")
        self._drop_finished()
        self._in_flight.clear()
        return outputs

    def has_work(self) -> bool:
        """Whether a request is unfinished. (A step in flight of finished requests is no work, but must still be updated.)"""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, and nothing done, while a request holds blocks."""
        return self.manager.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """What the scheduler knows of EngineStats; the model runner's fields and the step's are left at their defaults."""
        manager = self.manager
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=manager.usage,
            num_free_blocks=manager.pool.num_free,
            num_total_blocks=manager.pool.num_blocks,
            prefix_cache_queries=manager.prefix_queries,
            prefix_cache_hits=manager.prefix_hits,
            num_preemptions=self._num_preemptions,
        )

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run (no request; or each waits for a step in flight to be updated)."""
        step = _StepInFlight(self._next_step)
        decodes = step.decodes
        block_size = self.manager.block_size
        grown: list[CachedRequestData] = []
        prefilling: list[Request] = []

        # Preemption takes from the end of this list: nothing that this loop has passed is taken back.
        for request in self._running:
            num_computed = request.num_computed_tokens
            if num_computed >= request.fast_until:
                if num_computed < request.prefill_end:
                    prefilling.append(request)
                    continue
                if num_computed >= request.decode_end:
                    continue
                if num_computed == len(request.block_ids) * block_size and not self._append_block(request, grown):
                    break
                request.fast_until = min(request.decode_end, len(request.block_ids) * block_size)
            request.num_computed_tokens = num_computed + 1
            decodes.append(request)

        scheduled = dict.fromkeys([request.request_id for request in decodes], 1)
        budget = self.config.token_budget - len(decodes)
        self._rows_left = PROMPT_LOGPROB_ROWS
        for request in prefilling:
            if budget > 0 and self._has_rows(request):
                budget -= self._schedule_chunk(request, budget, step, scheduled)
        new_requests: list[NewRequestData] = []
        budget = self._admit(budget, step, scheduled, new_requests)
        if not scheduled:
            return None

        self._next_step += 1
        self._in_flight.append(step)
        forget_ids, self._forget_ids = self._forget_ids, []
        return SchedulerOutput(
            step=step.step,
            new_requests=new_requests,
            cached_requests=grown,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=self.config.token_budget - budget,
            finished_request_ids=forget_ids,
        )

    def update(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Take the results of the oldest step in flight; what is new for each of its requests."""
        step = self._in_flight.popleft()
        assert step.step == scheduled.step == result.step, (step.step, scheduled.step, result.step)
        outputs: list[RequestOutput] = []
        sampled, logprobs = result.sampled_token_ids, result.logprobs
        if result.errors:
            self._fail(step, result.errors, outputs)
        for chunk in step.chunks:
            self._update_chunk(chunk, result, outputs)
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        for request in step.decodes:
            status = request.status
            if status is finished:
                continue
            request_id = request.request_id
            output = RequestOutput(request_id=request_id)
            is_last = request.append_token(sampled[request_id], output)
            if logprobs and request_id in logprobs:
                output.new_logprobs = [logprobs[request_id]]
            if status is running:
                num_computed = len(request.token_ids) - 1
                if num_computed >= request.next_cache_len:
                    self.manager.cache_computed(request, num_computed)
            else:
                request.num_pending_tokens -= 1
            if is_last:
                self._finish(request, output.finish_reason)
            outputs.append(output)
        self._drop_finished()
        return outputs

    def _append_block(self, request: Request, grown: list[CachedRequestData]) -> bool:
        """Give a decode the block that it needs, taken from the last running if need be; False if that is itself."""
        while (block_id := self.manager.append_block(request)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        grown.append(CachedRequestData(request_id=request.request_id, new_block_ids=[block_id]))
        return True

    def _preempt(self, request: Request) -> None:
        assert self._running, "a request alone has room for all its tokens: max_len sees to it"
        if request.num_computed_tokens >= request.prefill_end:
            request.num_pending_tokens = request.num_computed_tokens + 1 - len(request.token_ids)
        self.manager.free(request)
        request.fast_until = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._num_preemptions += 1
        self._forget_ids.append(request.request_id)
        heapq.heappush(self._waiting, (request.key, request))

    def _admit(
        self, budget: int, step: _StepInFlight, scheduled: dict[str, int], new_requests: list[NewRequestData]
    ) -> int:
        """Start waiting requests, in order, until the first that does not fit; the budget that is left."""
        if budget <= 0 or self._waits_for_seats(budget, step):
            return budget
        while self._waiting and budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting[0][1]
            if request.num_pending_tokens > 0 or not self._has_rows(request):
                break
            # A block for each running sequence is kept back: their next decodes should not undo what is admitted now.
            reserve = len(self._running)
            num_spare = self.manager.pool.num_free - reserve
            if self._blocked and self._blocked[0] is request and num_spare <= self._blocked[1]:
                break  # nothing has become free since: spare the look into the prefix cache
            if not self.manager.try_admit(request, reserve=reserve):
                self._blocked = (request, num_spare)
                break
            self._blocked = None
            heapq.heappop(self._waiting)
            request.status = RequestStatus.RUNNING
            request.prefill_end = len(request.token_ids)
            request.first_scheduled_time = request.first_scheduled_time or time.time()
            insort(self._running, request, key=_key)
            new_requests.append(
                NewRequestData(
                    request_id=request.request_id,
                    token_ids=request.token_ids.copy(),  # ours grows, also while this message is being read
                    num_prompt_tokens=request.num_prompt_tokens,
                    sampling_params=request.sampling_params,
                    stop_token_ids=sorted(request.stop_ids),
                    block_ids=request.block_ids.copy(),
                    num_computed_tokens=request.num_computed_tokens,
                )
            )
            budget -= self._schedule_chunk(request, budget, step, scheduled)
        self._was_full = bool(self._waiting) and len(self._running) == self.max_num_seqs
        return budget

    def _waits_for_seats(self, budget: int, step: _StepInFlight) -> bool:
        """Whether seats that have become free in a full batch stay so for this step of decodes, to be taken by several requests in a later
        one.
        """
        if not self._waiting:
            self._was_full = False
        num_free = self.max_num_seqs - len(self._running)
        is_due = not 0 < num_free < self.max_num_seqs // SEATS_PART or self._steps_waited == SEATS_STEPS
        if self.config.admit_in_groups and self._was_full and step.decodes and not step.chunks and not is_due:
            next_ones = self._waiting[:num_free]  # about those: it is a heap
            if sum(len(request.token_ids) for _, request in next_ones) < min(SEATS_TOKENS, budget):
                self._steps_waited += 1
                return True
        self._steps_waited = 0
        return False

    def _has_rows(self, request: Request) -> bool:
        return self._rows_left > 0 or not request.wants_prompt_logprobs

    def _schedule_chunk(self, request: Request, budget: int, step: _StepInFlight, scheduled: dict[str, int]) -> int:
        """Put the next tokens of a prefill into the step; how many."""
        start = request.num_computed_tokens
        num_tokens = min(request.prefill_end - start, budget)
        if request.wants_prompt_logprobs:
            num_tokens = min(num_tokens, self._rows_left)
            self._rows_left -= num_tokens
        request.num_computed_tokens = start + num_tokens
        samples = request.num_computed_tokens == request.prefill_end
        step.chunks.append(_Chunk(request, start, num_tokens, samples, request.num_preemptions))
        scheduled[request.request_id] = num_tokens
        return num_tokens

    def _update_chunk(self, chunk: _Chunk, result: ModelRunnerOutput, outputs: list[RequestOutput]) -> None:
        request = chunk.request
        if request.status is RequestStatus.FINISHED:
            return
        request_id = request.request_id
        if request.wants_prompt_logprobs:
            request.add_prompt_logprobs(chunk.start, result.prompt_logprobs.get(request_id, []))
        if chunk.num_preemptions == request.num_preemptions:
            self.manager.cache_computed(request, chunk.start + chunk.num_tokens)
        elif chunk.samples:
            request.num_pending_tokens -= 1
        if not chunk.samples:
            return

        output = RequestOutput(request_id=request_id)
        if len(request.token_ids) == request.num_prompt_tokens:
            output.num_cached_tokens = request.num_cached_tokens
            output.queue_seconds = max(0.0, request.first_scheduled_time - request.arrival_time)
            output.prefill_seconds = max(0.0, time.time() - request.first_scheduled_time)
        if request.wants_prompt_logprobs:
            assert len(request.prompt_logprobs) == request.num_prompt_tokens, (request_id, len(request.prompt_logprobs))
            output.prompt_logprobs = request.prompt_logprobs
            request.wants_prompt_logprobs = False
            # The runner is not to make them again, without a limit of rows, when the request resumes after a preemption.
            request.sampling_params = msgspec.structs.replace(request.sampling_params, prompt_logprobs=None)
        if request.max_total_tokens == request.num_prompt_tokens:
            output.finish_reason = "length"  # max_tokens=0: only the prompt was of interest
        else:
            request.append_token(result.sampled_token_ids[request_id], output)
            if request_id in result.logprobs:
                output.new_logprobs = [result.logprobs[request_id]]
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)
        outputs.append(output)

    def _fail(self, step: _StepInFlight, errors: dict[str, str], outputs: list[RequestOutput]) -> None:
        for request in [*step.decodes, *(chunk.request for chunk in step.chunks)]:
            if request.request_id in errors and request.status is not RequestStatus.FINISHED:
                self._finish(request, "error")
                error = errors[request.request_id]
                kind: ErrorKind = "invalid" if error == NOTHING_LEFT else "internal"
                outputs.append(
                    RequestOutput(request_id=request.request_id, finish_reason="error", error=error, error_kind=kind)
                )

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        """Give back what the request holds. The queues still have it until `_drop_finished`."""
        assert reason is not None, request.request_id
        assert request.status is not RequestStatus.FINISHED, request.request_id
        if request.status is RequestStatus.RUNNING:
            self.manager.free(request)
            self._forget_ids.append(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _drop_finished(self) -> None:
        if len(self._running) + len(self._waiting) == len(self._requests):
            return
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        self._waiting = [entry for entry in self._waiting if entry[1].status is RequestStatus.WAITING]
        heapq.heapify(self._waiting)


def _key(request: Request) -> tuple[float, ...]:
    return request.key
