"""Continuous batching: which requests run in the next step, with how many tokens, and what its results mean for them.

One step has a token budget. Running decodes take 1 + num_draft_tokens tokens each. Then prefills under way and waiting
requests, in order, take chunks of what is left. Running and waiting requests are ordered by one key: arrival ("fcfs"),
or priority and then arrival ("priority"). When blocks run out, the last of the running requests is preempted: it loses
its blocks, waits at its old place in the order, and recomputes its prompt and its generated tokens (its cached blocks
are usually still there). The first in order is never preempted, so there is always progress.

A waiting request is not overtaken by those behind it, with two exceptions. Both keep back the batch slot and the blocks
that it will need:
- The step computes blocks that the request can share (MIN_GAINED_TOKENS or more). The next step may read them.
- It wants prompt logprobs, and the step's rows for them are taken (PROMPT_LOGPROB_ROWS): such logits take memory.

A request whose LoRA adapter finds no slot (running requests use all of them) waits without keeping anything back: requests
without an adapter overtake it, those with one do not.

Where every batch slot is taken and requests wait, slots that become free may be given away in groups
(runtime/scheduler/free_slots.py).

Async scheduling is not a mode of this file. `schedule` advances a request when it is scheduled, `update` appends its
tokens when they are known, and any number of steps may be in flight between the two (none in a synchronous engine).
This has consequences:
- A decode may be scheduled before its input token is known here. `schedule` counts all of its draft tokens as accepted,
  and `update` takes back those that were not. So no step computes a token beyond the length limits.
- When `update` finds that a request ended, the steps in flight compute tokens for it that are discarded. Its blocks are
  freed at once; runtime/scheduler/kv_cache_manager.py says why that is safe.
- A preempted request keeps the tokens of the steps in flight, and resumes when they are known.
"""

from __future__ import annotations

import heapq
import logging
import sys
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from compile_and_serve.custom_ops.step_data import ADAPTER_SLOT
from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, ErrorKind, FinishReason, RequestOutput
from compile_and_serve.runtime.scheduler.adapter_slots import AdapterSlots
from compile_and_serve.runtime.scheduler.free_slots import FreeSlots
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Prompt, Request, RequestStatus
from compile_and_serve.runtime.scheduler.step_messages import (
    NOTHING_LEFT,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    PagedGroup,
    SchedulerOutput,
    is_users_mistake,
)
from compile_and_serve.runtime.scheduler.steps_in_flight import Chunk, StepInFlight

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256  # prompt tokens of a step whose logits are wanted: each is a row of the whole vocabulary
HASHED_TOKENS = 1 << 15  # prompt tokens that a step with other work hashes to look for their prefixes, about 2 ms
MIN_GAINED_TOKENS = 64  # prompt tokens worth waiting a step for, which then need not be computed
ADMITTED_TOKENS = 1 << 17  # tokens of the requests that a step admits, cached ones included: they take about 5 ms


class QueueFullError(RuntimeError):
    """As many requests run and wait as may; try again later (HTTP 503)."""


class Scheduler:
    """Requests in, steps out: `add_request`, then `schedule` → (the model runner) → `update`, in turn.

    num_blocks: blocks of the KV cache, over all groups of layers. max_model_len: limit of prompt and output of one
    request together, in tokens; where the whole cache holds fewer, that is the limit. groups: None is one group of
    `cache.block_size`. num_draft_tokens: of each decode. num_adapter_slots: LoRA adapters that one step may use.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        groups: Sequence[PagedGroup] | None = None,
        num_draft_tokens: int = 0,
        num_adapter_slots: int = 0,
    ) -> None:
        if config.max_num_seqs < 1 or config.token_budget < 1 + num_draft_tokens:
            raise ValueError(
                f"max_num_seqs must be at least 1 and max_num_batched_tokens at least {1 + num_draft_tokens}, "
                f"got {config.max_num_seqs} and {config.token_budget}."
            )
        self.config = config
        self.num_draft_tokens = num_draft_tokens
        self.groups = list(groups or [PagedGroup(block_size=cache.block_size)])
        self.manager = KVCacheManager(
            num_blocks,
            self.groups,
            max_step_tokens=config.token_budget,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self.max_model_len = max_model_len
        self.max_len = self.manager.max_tokens(max_model_len)
        if self.max_len < max_model_len:
            logger.warning(
                "The KV cache holds %d tokens, fewer than max_model_len=%d: sequences end at %d tokens.",
                self.max_len, max_model_len, self.max_len,
            )  # fmt: skip
        self.max_num_seqs = min(config.max_num_seqs, config.token_budget // (1 + num_draft_tokens))
        self._requests: dict[str, Request] = {}  # all unfinished ones
        self._running: list[Request] = []  # sorted by key
        self._waiting: list[tuple[tuple[float, ...], Request]] = []  # heap
        self._in_flight: deque[StepInFlight] = deque()
        self._forget_ids: list[str] = []  # for the next step's finished_request_ids
        # The first waiting request, if it did not fit; how many blocks were spare; what else would let it fit.
        self._blocked: tuple[Request, int, bytes | None] | None = None
        self._num_added = 0
        self._next_step = 0
        self._rows_left = 0  # of PROMPT_LOGPROB_ROWS, in the step that is being scheduled
        self._num_preemptions = 0
        self._adapter_slots = AdapterSlots(num_adapter_slots)
        self._adapter_users: Counter[int] = Counter()  # adapter → unfinished requests
        self._free_slots = FreeSlots(self.max_num_seqs, admit_in_groups=bool(config.admit_in_groups))

    def add_request(
        self,
        request: EngineRequest,
        grammar: Future[Any] | None = None,
        adapter_load: Future[Any] | None = None,
    ) -> None:
        """Queue all sequences of a request. They do not run, and delay nobody, until `grammar` and `adapter_load` are done.

        Raises ValueError when it can never run (empty prompt, longer than the model or the whole KV cache allows, id
        in use) and QueueFullError beyond `SchedulerConfig.max_in_flight` unfinished sequences.
        """
        request_ids = request.request_ids
        num_prompt_tokens = len(request.prompt_token_ids)
        num_needed = num_prompt_tokens + (request.sampling_params.max_tokens != 0)
        if num_prompt_tokens == 0:
            raise ValueError("The prompt has no tokens; give at least one.")
        for request_id in request_ids:
            if request_id in self._requests:
                raise ValueError(f"A request with id {request_id!r} is being processed; ids must be unique.")
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
        if limit is not None and len(self._requests) + len(request_ids) > limit:
            raise QueueFullError(
                f"{len(self._requests)} sequences are running or waiting, and this request adds {len(request_ids)}; "
                f"the limit is {limit}. Try again later."
            )

        now = time.time()
        prompt = Prompt(request)
        for sequence in request.sequences():
            order = float(self._num_added)
            self._num_added += 1
            key: tuple[float, ...] = (order,)
            if self.config.policy == "priority":
                key = (float(request.priority), request.arrival_time or now, order)
            new = Request(sequence, prompt, key=key, max_len=self.max_len, now=now)
            new.grammar, new.adapter_load = grammar, adapter_load
            if new.adapter is not None:
                self._adapter_users[new.adapter] += 1
            self._requests[new.request_id] = new
            heapq.heappush(self._waiting, (key, new))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are, without an output. Unknown ids (just finished, say) are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
        self._drop_finished()

    def unfinished(self, request_ids: Iterable[str]) -> list[str]:
        """Those of the requests that have not ended."""
        return [request_id for request_id in request_ids if request_id in self._requests]

    def fail_all(self, reason: str) -> list[RequestOutput]:
        """End every request with the error `reason` (a sentence). Steps in flight are forgotten: do not update them."""
        outputs = [
            RequestOutput(request_id=request_id, finish_reason="error", error=reason) for request_id in self._requests
        ]
        for request in list(self._requests.values()):
            self._finish(request, "error")
        self._drop_finished()
        self._in_flight.clear()
        self.manager.reset_prefix_cache()  # the steps in flight may not have computed what is cached
        return outputs

    def is_adapter_used(self, adapter: int) -> bool:
        """Whether an unfinished request uses a LoRA adapter."""
        return self._adapter_users[adapter] > 0

    def has_work(self) -> bool:
        """Whether a request is unfinished. A step in flight of finished requests is no work, but must still be updated."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. Returns False, and does nothing, while a request holds blocks."""
        return self.manager.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """The scheduler's part of EngineStats. The fields of the model runner and of the step keep their defaults."""
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
        """The next step, or None when nothing can run: no request, or each waits for a step in flight to be updated."""
        step = StepInFlight(self._next_step)
        decodes = step.decodes
        num_drafts = self.num_draft_tokens
        count = 1 + num_drafts
        grown: list[CachedRequestData] = []
        prefilling: list[Request] = []
        shorter: dict[str, int] = {}  # decodes with fewer tokens

        # Preemption takes from the end of this list: nothing that this loop has passed is taken back.
        for request in self._running:
            num_computed = request.num_computed_tokens
            if num_computed >= request.fast_until:
                if num_computed < request.prefill_end:
                    prefilling.append(request)
                    continue
                if num_computed >= request.decode_end:
                    continue
                end = min(num_computed + count, request.decode_end)
                if end > request.num_held_tokens and not self._grow(request, end, grown):
                    break
                request.fast_until = min(request.decode_end, request.num_held_tokens) - num_drafts
                if end < num_computed + count:
                    shorter[request.request_id] = end - num_computed
                    num_computed = end - count
            request.num_computed_tokens = num_computed + count
            decodes.append(request)

        scheduled = dict.fromkeys([request.request_id for request in decodes], count)
        budget = self.config.token_budget - count * len(decodes)
        if shorter:
            budget += count * len(shorter) - sum(shorter.values())
            scheduled |= shorter
        self._rows_left = PROMPT_LOGPROB_ROWS
        for request in prefilling:
            if budget > 0 and self._has_rows(request):
                new_ids = self._schedule_chunk(request, budget, step, scheduled)
                budget -= scheduled[request.request_id]
                if new_ids is not None:
                    grown.append(CachedRequestData(request_id=request.request_id, new_block_ids=new_ids))
        new_requests: list[NewRequestData] = []
        if not self._waiting:
            self._free_slots.was_full = False
        elif budget > 0 and not self._are_slots_held_back(budget, step):
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
            adapter_loads=self._adapter_slots.take_new(),
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
        if self.num_draft_tokens:
            self._take_back_rejected(step, scheduled, result)
        running, finished = RequestStatus.RUNNING, RequestStatus.FINISHED
        for request in step.decodes:
            status = request.status
            if status is finished:
                continue
            # `append_tokens`, without its calls for most requests.
            request_id = request.request_id
            new_ids = sampled[request_id]
            output = RequestOutput(request_id=request_id, new_token_ids=new_ids)
            token_ids = request.token_ids
            token_ids += new_ids
            num_tokens = len(token_ids)
            may_end = num_tokens >= request.max_total_tokens or not request.stop_ids.isdisjoint(new_ids)
            is_last = may_end and request.end(output)
            if logprobs and request_id in logprobs:
                output.new_logprobs = logprobs[request_id][: len(output.new_token_ids)]
            if status is not running:
                request.num_pending_steps -= 1
            elif num_tokens > request.next_cache_len:
                self.manager.cache_blocks(request, len(token_ids) - 1)
            if is_last:
                self._finish(request, output.finish_reason)
            outputs.append(output)
        self._drop_finished()
        return outputs

    def _take_back_rejected(self, step: StepInFlight, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for request in step.decodes:
            if request.status is RequestStatus.RUNNING:
                request_id = request.request_id
                num_rejected = scheduled.num_scheduled_tokens[request_id] - len(result.sampled_token_ids[request_id])
                request.num_computed_tokens -= num_rejected

    def _grow(self, request: Request, num_tokens: int, grown: list[CachedRequestData]) -> bool:
        """Give a decode the blocks of its first `num_tokens` tokens. They are taken from the last of the running
        requests where none are free. False if it cannot run in this step.
        """
        # With drafts in flight, the tokens that it has computed may be fewer than num_computed_tokens.
        first_read = len(request.token_ids) - 1 if self.num_draft_tokens else request.num_computed_tokens
        while (new_ids := self.manager.grow(request, num_tokens, first_read)) is None:
            if len(self._running) == 1:
                # `max_len` sees to it that a request alone has room for all its tokens, once it is known which were rejected.
                assert self.num_draft_tokens, request.request_id
                assert self._in_flight, request.request_id
                return False
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        grown.append(CachedRequestData(request_id=request.request_id, new_block_ids=new_ids))
        return True

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a request, which has left `_running`, and let it wait."""
        request.num_pending_steps = sum(step.samples_for(request) for step in self._in_flight)
        self.manager.free(request)
        if request.adapter is not None:
            self._adapter_slots.release(request.adapter)
        request.fast_until = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._num_preemptions += 1
        self._forget_ids.append(request.request_id)
        heapq.heappush(self._waiting, (request.key, request))

    def _admit(
        self, budget: int, step: StepInFlight, scheduled: dict[str, int], new_requests: list[NewRequestData]
    ) -> int:
        """Start waiting requests, in order, until the first that does not fit; the budget that is left."""
        manager, running = self.manager, self._running
        manager.hash_budget = HASHED_TOKENS if scheduled else sys.maxsize
        deferred: list[tuple[tuple[float, ...], Request]] = []
        not_ready: list[tuple[tuple[float, ...], Request]] = []
        num_admitted_tokens = 0
        # A block for each running sequence is kept back: its next decodes should not undo what is admitted now.
        reserve = len(running)
        while self._waiting and budget > 0 and len(running) + len(deferred) < self.max_num_seqs:
            request = self._waiting[0][1]
            if not request.is_ready:
                not_ready.append(heapq.heappop(self._waiting))
                continue
            if request.adapter is not None and not self._adapter_slots.has_room(request.adapter):
                # Requests without an adapter may overtake it. All others are set aside at once: they may be many.
                not_ready += [entry for entry in self._waiting if entry[1].adapter is not None]
                self._waiting = [entry for entry in self._waiting if entry[1].adapter is None]
                heapq.heapify(self._waiting)
                continue
            num_tokens = len(request.token_ids)
            if request.num_pending_steps > 0 or num_admitted_tokens + num_tokens > max(ADMITTED_TOKENS, num_tokens):
                break
            num_spare = manager.num_spare - reserve
            prompt = request.prompt
            if prompt.deferred_step == step.step and num_tokens == request.num_prompt_tokens:
                # A sibling was deferred just now: spare the look into the prefix cache.
                if prompt.num_new_blocks > num_spare:
                    break
                deferred.append(heapq.heappop(self._waiting))
                reserve += prompt.num_new_blocks + 1
                continue
            if self._is_blocked(request, num_spare):
                break
            prefix = manager.find_prefix(request, step.step)
            if prefix is None:
                break
            num_new = manager.num_new_blocks(request, prefix)
            if num_new > num_spare:
                self._blocked = (request, num_spare, prefix.missing_key)
                break
            num_gained = prefix.num_tokens - prefix.num_ready_tokens
            if num_gained >= MIN_GAINED_TOKENS or not self._has_rows(request):
                deferred.append(heapq.heappop(self._waiting))
                reserve += num_new + 1
                if num_tokens == request.num_prompt_tokens:
                    prompt.deferred_step, prompt.num_new_blocks = step.step, num_new
                continue
            if num_gained > 0:
                prefix = manager.find_prefix(request, step.step, only_ready=True)
                assert prefix is not None
                if manager.num_new_blocks(request, prefix) > num_spare:
                    break
            heapq.heappop(self._waiting)
            manager.admit(request, prefix)
            new_requests.append(self._start(request, budget, step, scheduled))
            reserve += 1
            budget -= scheduled[request.request_id]
            num_admitted_tokens += num_tokens
        for entry in (*deferred, *not_ready):
            heapq.heappush(self._waiting, entry)
        self._free_slots.was_full = len(self._waiting) > len(not_ready) and len(running) == self.max_num_seqs
        return budget

    def _is_blocked(self, request: Request, num_spare: int) -> bool:
        """Whether nothing has changed since the request did not fit: neither are more blocks spare, nor has its prefix become
        longer. Saves the look for its prefix.
        """
        if self._blocked is None:
            return False
        blocked, num_spare_before, missing_key = self._blocked
        if blocked is request and num_spare <= num_spare_before and missing_key not in self.manager.pool.cached:
            return True
        self._blocked = None
        return False

    def _start(self, request: Request, budget: int, step: StepInFlight, scheduled: dict[str, int]) -> NewRequestData:
        """Run an admitted request."""
        request.status = RequestStatus.RUNNING
        request.prefill_end = len(request.token_ids)
        request.prefill_step = step.step
        request.first_scheduled_time = request.first_scheduled_time or time.time()
        insort(self._running, request, key=_key)
        # The list goes into the message, which may be read after we have appended to our copy.
        token_ids = request.token_ids
        request.token_ids = token_ids.copy()
        num_computed = request.num_computed_tokens
        self._schedule_chunk(request, budget, step, scheduled)
        step_data = request.step_data
        if request.adapter is not None:
            step_data = step_data | {ADAPTER_SLOT: 1 + self._adapter_slots.acquire(request.adapter)}
        return NewRequestData(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            stop_token_ids=sorted(request.stop_ids),
            block_ids=[block_ids.copy() for block_ids in request.block_ids],
            num_computed_tokens=num_computed,
            step_data=step_data,
        )

    def _are_slots_held_back(self, budget: int, step: StepInFlight) -> bool:
        num_free = self.max_num_seqs - len(self._running)
        has_prompts = not step.decodes or bool(step.chunks)
        return self._free_slots.are_held_back(num_free, self._waiting, budget, has_prompts=has_prompts)

    def _has_rows(self, request: Request) -> bool:
        return self._rows_left > 0 or not request.wants_prompt_logprobs

    def _schedule_chunk(
        self, request: Request, budget: int, step: StepInFlight, scheduled: dict[str, int]
    ) -> list[list[int]] | None:
        """Put the next tokens of a prefill into the step; the blocks that it got for them."""
        start = request.num_computed_tokens
        num_tokens = min(request.prefill_end - start, budget)
        if request.wants_prompt_logprobs:
            num_tokens = min(num_tokens, self._rows_left)
            self._rows_left -= num_tokens
        end = request.num_computed_tokens = start + num_tokens
        new_ids = self.manager.grow_for_chunk(request, start, end)
        if end >= request.next_cache_len:
            self.manager.cache_blocks(request, end, step.step)
        samples = end == request.prefill_end
        step.chunks.append(Chunk(request, start, end, samples, request.num_preemptions, request.prefill_step))
        scheduled[request.request_id] = num_tokens
        return new_ids

    def _update_chunk(self, chunk: Chunk, result: ModelRunnerOutput, outputs: list[RequestOutput]) -> None:
        request = chunk.request
        if request.status is RequestStatus.FINISHED:
            return
        request_id = request.request_id
        if request.wants_prompt_logprobs:
            request.add_prompt_logprobs(chunk.start, result.prompt_logprobs.get(request_id, []))
        if not chunk.samples:
            return
        if chunk.num_preemptions != request.num_preemptions:
            request.num_pending_steps -= 1

        output = RequestOutput(request_id=request_id)
        if len(request.token_ids) == request.num_prompt_tokens:
            output.num_cached_tokens = request.num_cached_tokens
            output.queue_seconds = max(0.0, request.first_scheduled_time - request.arrival_time)
            output.prefill_seconds = max(0.0, time.time() - request.first_scheduled_time)
        if request.wants_prompt_logprobs:
            assert len(request.prompt_logprobs) == request.num_prompt_tokens, (request_id, len(request.prompt_logprobs))
            output.prompt_logprobs = request.prompt_logprobs
            request.wants_prompt_logprobs = False
            # The runner must not compute them again, without a limit of rows, when the request resumes after a preemption.
            request.sampling_params = msgspec.structs.replace(request.sampling_params, prompt_logprobs=None)
        if request.max_total_tokens == request.num_prompt_tokens:
            output.finish_reason = "length"  # max_tokens=0: only the prompt was of interest
        else:
            request.append_tokens(result.sampled_token_ids[request_id], output)
            if request_id in result.logprobs:
                output.new_logprobs = result.logprobs[request_id]
        if output.finish_reason is not None:
            self._finish(request, output.finish_reason)
        outputs.append(output)

    def _fail(self, step: StepInFlight, errors: dict[str, str], outputs: list[RequestOutput]) -> None:
        """End the requests that failed. What their prefills computed cannot be trusted, unless it was the user's mistake."""
        for chunk in step.chunks:
            if not is_users_mistake(errors.get(chunk.request.request_id, NOTHING_LEFT)):
                self._uncache_failed(chunk, step)
        for request in [*step.decodes, *(chunk.request for chunk in step.chunks)]:
            if request.request_id in errors and request.status is not RequestStatus.FINISHED:
                self._finish(request, "error")
                error = errors[request.request_id]
                kind: ErrorKind = "invalid" if is_users_mistake(error) else "internal"
                outputs.append(
                    RequestOutput(request_id=request.request_id, finish_reason="error", error=error, error_kind=kind)
                )

    def _uncache_failed(self, chunk: Chunk, step: StepInFlight) -> None:
        """Forget the content that a failed prefill computed, and preempt the requests that share it. What this step and the steps
        in flight return for these is dropped.
        """
        block_ids = self.manager.uncache(chunk.request, chunk.end, chunk.prefill_step)
        for request in self._running.copy():
            if request is not chunk.request and not all(map(block_ids.isdisjoint, request.block_ids)):
                for other in (step, *self._in_flight):
                    other.drop(request)
                self._running.remove(request)
                self._preempt(request)

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        """Give back what the request holds. The queues still have it until `_drop_finished`."""
        assert reason is not None, request.request_id
        assert request.status is not RequestStatus.FINISHED, request.request_id
        if request.status is RequestStatus.RUNNING:
            self.manager.free(request)
            self._forget_ids.append(request.request_id)
            if request.adapter is not None:
                self._adapter_slots.release(request.adapter)
        if request.adapter is not None:
            self._adapter_users[request.adapter] -= 1
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
