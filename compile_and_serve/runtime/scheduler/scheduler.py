"""Continuous batching: which requests run in the next step, with how many tokens, and what its results mean for them.

One step has a token budget. Running decodes take one token each, and the drafts of a `Speculator`. Then prefills under way and waiting
requests, in order, take chunks of what is left. Running and waiting requests are ordered by one key: arrival ("fcfs"), or priority and then
arrival ("priority"). When blocks run out, the last of the running requests is preempted: it loses its blocks, waits at its old place in the
order, and recomputes its prompt and its generated tokens (its cached blocks are usually still there). The first in order is never
preempted, so there is always progress.

admission.py says which waiting requests start, fairness.py what each of several API keys gets, and whose requests are preempted.

Async scheduling is not a mode of this file. `schedule` advances a request when it is scheduled, `update` appends its tokens when they are
known, and any number of steps may be in flight between the two. This has consequences:
- A decode may be scheduled before its input token is known here. `schedule` counts all of its draft tokens as accepted,
  and `update` takes back those that were not. So no step computes a token beyond the length limits. One exception: a step
  that runs ahead may compute one token of a request that has ended.
- When `update` finds that a request ended, the steps in flight compute tokens for it that are discarded. Its blocks are
  freed at once; runtime/scheduler/kv_cache_manager.py says why that is safe.
- A preempted request keeps the tokens of the steps in flight, and resumes when they are known.

A `Speculator` that drafts from the tokens that are known here waits for them: while it is on, at most one step with decodes is in flight.
Where the runner drafts, a step with drafts may be in flight when the next one is scheduled (`SchedulerOutput.is_ahead`).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from compile_and_serve.custom_ops.step_data import LengthRegimes
from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.connector.connector import SchedulerConnector
from compile_and_serve.runtime.connector.messages import FinishedTransfers
from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.ledger.records import Preparation
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, FinishReason, RequestOutput
from compile_and_serve.runtime.scheduler.adapter_slots import AdapterSlots
from compile_and_serve.runtime.scheduler.admission import Admission
from compile_and_serve.runtime.scheduler.drafting import Drafting
from compile_and_serve.runtime.scheduler.encoder_cache import EncoderCache
from compile_and_serve.runtime.scheduler.failed_steps import failed_output, forget_failed, kept_from_running, untrusted_chunks
from compile_and_serve.runtime.scheduler.handovers import Handovers
from compile_and_serve.runtime.scheduler.item_queue import ItemQueue
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.length_regimes import begin, outgrown
from compile_and_serve.runtime.scheduler.micro_batches import MicroBatches
from compile_and_serve.runtime.scheduler.prefills import add_chunks
from compile_and_serve.runtime.scheduler.request import NOTHING, Prompt, Request, RequestStatus
from compile_and_serve.runtime.scheduler.request_checks import check_config, check_queue, check_request
from compile_and_serve.runtime.scheduler.step_messages import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    StateGroupInfo,
    step_without_tokens,
)
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight
from compile_and_serve.runtime.scheduler.transfers import Transfers

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256  # prompt tokens of a step whose logits are wanted: each is a row of the whole vocabulary


class Scheduler:
    """Requests in, steps out: `add_request`, then `schedule` → (the model runner) → `update`, in turn.

    num_blocks: blocks of the KV cache, over all groups of layers. max_model_len: limit of prompt and output of one request together, in
    tokens; where the whole cache holds fewer, that is the limit. groups: None is one group, of the cache's blocks. num_adapter_slots: LoRA
    adapters that one step may use. speculator: None: no step has drafts. drafts_run_ahead, whole_prompts, length_regimes: of `WorkerInfo`.
    connector: None: no blocks are loaded or stored. encoder: None: there is none. num_stages: of the model.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        groups: Sequence[StateGroupInfo] | None = None,
        num_adapter_slots: int = 0,
        speculator: Speculator | None = None,
        drafts_run_ahead: bool = False,
        whole_prompts: bool = False,
        connector: SchedulerConnector | None = None,
        encoder: EncoderCache | None = None,
        length_regimes: LengthRegimes | None = None,
        num_stages: int = 1,
    ) -> None:
        check_config(config)
        self.config = config
        self.groups = [StateGroupInfo("tokens", block_size=cache.tokens_per_block)] if groups is None else list(groups)
        self.manager = KVCacheManager(
            num_blocks,
            self.groups,
            max_step_tokens=config.token_budget,
            enable_prefix_caching=cache.enable_prefix_caching,
            max_draft_tokens=0 if speculator is None else speculator.max_tokens,
        )
        self._transfers = None if connector is None else Transfers(self.manager, connector)
        self.handovers = Handovers(self._transfers)
        self.max_model_len = max_model_len
        self.max_len = self.manager.max_tokens(max_model_len)
        if self.max_len < max_model_len:
            logger.warning("max_model_len is %d, but sequences end at %d tokens: the KV cache holds no more.", max_model_len, self.max_len)
        self.max_num_seqs = min(config.max_num_seqs, config.token_budget)
        self.requests: dict[str, Request] = {}  # all unfinished ones, which nobody else changes
        self._running: list[Request] = []  # sorted by key
        self._in_flight: deque[StepInFlight] = deque()
        self._forget_ids: list[str] = []  # for the next step's finished_request_ids
        self._numbers = itertools.count()  # of requests, in their order
        self._next_step = self._num_preemptions = 0
        self.adapter_slots = AdapterSlots(num_adapter_slots)
        self._admission = Admission(
            self.manager,
            self.adapter_slots,
            max_num_seqs=self.max_num_seqs,
            config=config,
            whole_prompts=whole_prompts,
            transfers=self._transfers,
        )
        self.waiting = self._queue = self._admission.waiting
        self.misses, self.unfinished_keys = self._admission.misses, self._queue.accounts.keys()  # names of API keys
        if isinstance(encoder, ItemQueue):
            encoder.blocks = self.manager.items
        self.encoder, self._whole_prompts, self._length_regimes = encoder, whole_prompts, length_regimes
        self._drafting = None if speculator is None else Drafting(speculator, runs_ahead=drafts_run_ahead, in_stages=num_stages > 1)
        self._micro_batches = MicroBatches(num_stages, runs_ahead=bool(config.async_scheduling) and speculator is None)

    def add_request(self, request: EngineRequest, waits_for: Mapping[Future[Any], Preparation] = NOTHING) -> None:
        """Queue all sequences of a request. They do not run, and delay nobody, until all of `waits_for` is done.

        Raises ValueError when it can never run (empty prompt, longer than the model or the whole KV cache allows, id
        in use) and QueueFullError beyond `SchedulerConfig.max_in_flight` unfinished sequences.
        """
        check_request(request, self.requests, max_model_len=self.max_model_len, max_len=self.max_len, whole_prompts=self._whole_prompts)
        check_queue(request, self._queue, self.config.max_in_flight, self.max_num_seqs)
        now, prompt = time.time(), Prompt(request)
        before = (float(request.priority), request.arrival_time or now) if self.config.policy == "priority" else ()
        for sequence in request.sequences():
            key = (*before, float(next(self._numbers)))
            new = Request(sequence, prompt, key=key, max_len=self.max_len, now=now)
            begin(self._length_regimes, new)
            if new.adapter is not None:
                self.adapter_slots.num_unfinished[new.adapter] += 1
            self.requests[new.request_id] = new
            self._queue.join(new, request.tenant)
            new.wait_for(waits_for)
            self._queue.push(new)
            if self.handovers.begin(new, self._finish):
                self._drop_finished()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are, without an output. Unknown ids (just finished, say) are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, "abort")
        self._drop_finished()

    def fail_all(self, reason: str) -> list[RequestOutput]:
        """End every request with the error `reason` (a sentence). Steps in flight are forgotten: do not update them."""
        outputs = [RequestOutput(request_id=request_id, finish_reason="error", error=reason) for request_id in self.requests]
        for request in list(self.requests.values()):
            self._finish(request, "error")
        self._drop_finished()
        self._in_flight.clear()
        self._forget_cached()  # the steps in flight may not have computed what is cached
        return outputs

    def has_work(self) -> bool:
        """Whether a request is unfinished, or blocks wait for a transfer. A step in flight of finished requests is to be updated, too."""
        return bool(self.requests or self.handovers.given) or (self._transfers is not None and self._transfers.is_busy)

    def forget_device_memory(self) -> None:
        """The device's memory will be freed: forget cached prefixes and the adapters in its slots. No request may be left. The ranks
        stop what they transfer.
        """
        forgotten = self._forget_cached()
        assert forgotten, "a request holds blocks"
        if self._transfers is not None:
            self._transfers.forget()
        self.adapter_slots.forget()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes, also those that a connector stored. Returns False, and does nothing, while a request holds blocks."""
        is_reset = self._forget_cached()
        if is_reset and self._transfers is not None:
            self._transfers.reset()
        return is_reset

    def _forget_cached(self) -> bool:
        is_reset = self.manager.reset_prefix_cache()
        if is_reset and self.encoder is not None:
            self.encoder.forget()
        return is_reset

    def stats(self) -> EngineStats:
        """The scheduler's part of EngineStats. The fields of the model runner and of the step keep their defaults."""
        stats = EngineStats(num_running=len(self._running), num_waiting=len(self._queue), num_preemptions=self._num_preemptions)
        for part in (self.manager, self._drafting, self._transfers, self._queue):
            if part is not None:
                part.add_to(stats)
        return stats

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run: no request, or each waits for a step in flight to be updated. While nothing is in
        flight but transfers, it is a step without tokens.
        """
        if self._transfers is not None:
            self._transfers.end_overdue()
        if self.encoder is not None:
            self.encoder.begin_step()
        is_contended = self._queue.is_contended
        rows = self._admission.fairness.max_prompt_rows if is_contended else PROMPT_LOGPROB_ROWS
        step = StepInFlight(self._next_step, rows, self.encoder)
        order, now = (self._make_room(), time.monotonic()) if is_contended else (self._running, math.inf)
        decodes, drafts = step.decodes, dict[str, list[int]]()
        left_out = self._micro_batches.left_out(self._running, self._in_flight)
        left_out = self._admission.fairness.left_out(self._running, left_out, now) if is_contended else left_out
        if self._drafting is not None:
            if (proposed := self._drafting.drafts(step, self._running, self._in_flight, self._admission, left_out)) is None:
                return None
            drafts = proposed
        grown, prefilling = list[CachedRequestData](), list[Request]()
        shorter: dict[str, int] = {}  # decodes with fewer tokens
        # Preemption takes from the end of this list: nothing that this loop has passed is taken back.
        for request in order:
            if left_out and id(request) in left_out:
                continue
            num_computed = request.num_computed_tokens
            wanted = 1
            if drafts:
                wanted += len(drafts.get(request.request_id, ()))
            if num_computed + wanted > request.fast_until:
                if num_computed < request.prefill_end:
                    prefilling.append(request)
                    continue
                if request.paused_until > now:
                    continue
                end = min(num_computed + wanted, request.decode_end)
                if num_computed >= request.decode_end:
                    # If all its drafts in flight are accepted, it has ended. In a step that runs ahead it still takes part where its
                    # blocks have room. If it left out a step, the step after that could not run ahead.
                    may_go_on = step.is_ahead and num_computed == request.decode_end
                    if not may_go_on or num_computed == request.num_held_tokens:
                        continue
                    end = num_computed + 1
                if end > request.num_held_tokens and not self._grow(request, end, grown, order):
                    break
                request.fast_until = min(request.decode_end, request.num_held_tokens)
                if end < num_computed + wanted:
                    shorter[request.request_id] = end - num_computed
                    num_computed = end - wanted
            request.num_computed_tokens = num_computed + wanted
            decodes.append(request)
        scheduled = dict.fromkeys([request.request_id for request in decodes], 1)
        budget = self.config.token_budget - len(decodes)
        if drafts or shorter:
            scheduled |= {name: 1 + len(draft) for name, draft in drafts.items() if name in scheduled} | shorter
            budget = self.config.token_budget - sum(scheduled.values())
            kept = {name: draft[: scheduled.get(name, 1) - 1] for name, draft in drafts.items()}
            step.drafts = {name: draft for name, draft in kept.items() if draft}
        budget = self._micro_batches.prompt_budget(budget, prefilling, self._queue.only_heap, self.max_num_seqs - len(self._running))
        parts, withheld = None, 0
        if is_contended and not self._whole_prompts:
            prefilling, parts, withheld = self._admission.fairness.divide(prefilling, budget, step)
        budget = add_chunks(prefilling, budget - withheld, step, scheduled, grown, self.manager, parts)
        new_requests: list[NewRequestData] = []
        if not self._queue:
            self._admission.free_slots.was_full = False
        elif not step.is_ahead:
            budget = self._admission.admit(self._running, budget, step, scheduled, new_requests, parts)
        if is_contended:
            if parts is not None:  # and what nobody could use
                add_chunks(prefilling, budget, step, scheduled, grown, self.manager)
            self._admission.fairness.charge(step, scheduled)
        emptied = self.manager.end_step(has_tokens=bool(scheduled))
        if not scheduled:
            return self._step_without_tokens(step, now)
        self._next_step += 1
        self._in_flight.append(step)
        self.last_step = step
        forget_ids, self._forget_ids = self._forget_ids, []
        return SchedulerOutput(
            step=step.step,
            new_requests=new_requests,
            cached_requests=grown,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_request_ids=forget_ids,
            adapter_loads=self.adapter_slots.take_new(),
            drafts=step.drafts,
            last_tokens={} if self._drafting is None else self._drafting.last_tokens(step),
            is_drafting_off=self._drafting is not None and self._drafting.is_off(step),
            is_ahead=step.is_ahead,
            transfers=None if self._transfers is None else self._transfers.take(),
            encodes=[] if self.encoder is None else self.encoder.end_step(),
            emptied_blocks=emptied,
            times_masks=is_contended,
            num_decodes=len(decodes),
            missed_drafts="" if self._drafting is None else self._drafting.missed,
        )

    def _step_without_tokens(self, step: StepInFlight, now: float) -> SchedulerOutput | None:
        """A step of transfers; None if there is nothing to transfer, steps in flight will tell, or decodes are paused beyond `now`."""
        transfers, has_requests = self._transfers, bool(self._running or self._queue.first_ready())
        is_busy = transfers is not None and (transfers.is_busy or (has_requests and transfers.has_leases))
        if not (is_busy or has_requests) or (self._in_flight and not (transfers is not None and transfers.has_orders)):
            return None
        if not is_busy and not any(request.paused_until > now for request in self._running):
            if transfers is not None and transfers.release_all():
                return self.schedule()
            step.is_last_poll = transfers is not None and not transfers.may_end
            if (transfers is None or step.is_last_poll) and len(self._running) > 1:  # see `KVCacheManager.may_lack_room`
                self._preempt(self._running.pop(), last_step=self._next_step - 1)
                return self.schedule()
        if transfers is None or not (is_busy or self.manager.pool.num_pinned):
            return None
        self._next_step += 1
        self._in_flight.append(step)
        return step_without_tokens(step.step, transfers.take())

    def end_transfers(self, transfers: FinishedTransfers | None) -> None:
        """Take what became of transfers from a step that is not updated."""
        if self._transfers is not None and transfers is not None:
            self._transfers.end(transfers)

    def update(self, scheduled: SchedulerOutput, result: ModelRunnerOutput, seconds: float = 0.0) -> list[RequestOutput]:
        """Take the results of the oldest step in flight. → what is new for each of its requests

        seconds: the step's duration; 0.0 if unknown.
        """
        step = self._in_flight.popleft()
        assert step.step == scheduled.step == result.step, (step.step, scheduled.step, result.step)
        outputs: list[RequestOutput] = []
        if self._transfers is not None:
            num_prompt_tokens = scheduled.total_num_scheduled_tokens - len(step.decodes) if step.chunks else 0
            self._transfers.update(result.transfers, step.step, num_prompt_tokens, seconds, () if result.errors else step.chunks)
            if step.is_last_poll and result.transfers is None:
                self._end_first(outputs)
        sampled, logprobs = result.sampled_token_ids, result.logprobs
        if result.errors:
            self._fail(step, result.errors, outputs)
        for chunk in step.chunks:
            if (output := chunk.take(scheduled, result)) is not None:
                if output.finish_reason is not None:
                    self._finish(chunk.request, output.finish_reason)
                    self.handovers.end(chunk.request, output)
                outputs.append(output)
        if step.drafts:
            step.take_back_rejected(scheduled.num_scheduled_tokens, result)
        if self._drafting is not None and step.decodes:
            self._drafting.observe(step, result, seconds)
        if self._queue.is_contended:
            self._admission.fairness.observe(step, result, seconds, self._in_flight[0] if self._in_flight else None)
        running, finished, drafts = RequestStatus.RUNNING, RequestStatus.FINISHED, step.drafts
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
            may_end = num_tokens >= request.end_len or not request.stop_ids.isdisjoint(new_ids)
            is_last = may_end and request.end(output)
            if logprobs and request_id in logprobs:
                output.new_logprobs = logprobs[request_id][: len(output.new_token_ids)]
            if drafts and request_id in drafts:
                output.num_draft_tokens = len(drafts[request_id]) - result.missing_drafts.get(request_id, 0)
                output.num_accepted_drafts = min(len(new_ids) - 1, len(output.new_token_ids))
            if status is not running:
                request.num_pending_steps -= 1
            elif num_tokens > request.next_cache_len:
                self.manager.cache_blocks(request, len(token_ids) - 1)
            if is_last:
                self._finish(request, output.finish_reason)
            outputs.append(output)
        for request in outgrown(self._length_regimes, step):
            if request.status is running:
                self._compute_again(request, last_step=self._next_step - 1)
        self._drop_finished()
        return outputs

    def _end_first(self, outputs: list[RequestOutput]) -> None:
        """Nothing can run, because transfers that do not end keep blocks: end the first request, which would have run next."""
        request = self._running[0] if self._running else self._queue.first_ready()
        assert request is not None
        self._finish(request, "error")
        outputs.append(kept_from_running(request.request_id, self.manager.pool.num_pinned))

    def _make_room(self) -> list[Request]:
        """Preempt what gives way to keys that are behind. → the running requests, in the order in which they get blocks"""
        for victim in self._admission.fairness.make_room(self._running):
            self._running.remove(victim)
            self._preempt(victim, last_step=self._next_step - 1)
        # Only where blocks may run out: another order is another batch, for which the runner prepares everything again.
        return self._running if self.manager.num_spare > 2 * len(self._running) else self._admission.fairness.by_service(self._running)

    def _grow(self, request: Request, num_tokens: int, grown: list[CachedRequestData], order: list[Request]) -> bool:
        """Give a decode the blocks of its first `num_tokens` tokens. They are taken from the last of the running
        requests, in `order`, where none are free. False if it cannot run in this step.
        """
        # With drafts in flight, the tokens that it has computed may be fewer than num_computed_tokens.
        has_drafts = self._drafting is not None
        first_read = len(request.token_ids) - 1 if has_drafts else request.num_computed_tokens
        while (new_ids := self.manager.grow(request, num_tokens, first_read)) is None:
            if self._transfers is not None and self._transfers.release_all():
                continue
            if len(self._running) == 1:
                # `max_len` sees to it that a request alone has room for all its tokens, once it is known which were rejected, and once
                # transfers have ended.
                assert self.manager.pool.num_pinned or (has_drafts and self._in_flight), request.request_id
                return False
            victim = order.pop()
            if order is not self._running:
                self._running.remove(victim)
            self._preempt(victim, last_step=self._next_step - 1)
            if victim is request:
                return False
        grown.append(CachedRequestData(request_id=request.request_id, new_block_ids=new_ids))
        return True

    def _preempt(self, request: Request, last_step: int | None) -> None:
        """Take the blocks of a request, which has left `_running`, and let it wait. last_step: as in `KVCacheManager.free`."""
        request.num_pending_steps = sum(step.samples_for(request) for step in self._in_flight)
        request.num_charged_tokens = max(request.num_charged_tokens, request.num_computed_tokens)
        self._give_back(request, last_step)
        request.fast_until = 0
        request.num_preemptions += 1
        request.may_load = True
        request.status = RequestStatus.WAITING
        self._num_preemptions += 1
        if self._drafting is not None:
            self._drafting.drop_correction(request)  # it is sent again with all its tokens
        self._queue.push(request)

    def _compute_again(self, request: Request, last_step: int | None, *steps: StepInFlight) -> None:
        """Drop what these steps and those in flight return for a request, and preempt it if it runs. last_step: of `_preempt`."""
        for step in (*steps, *self._in_flight):
            step.drop(request)
        request.num_pending_steps = 0
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._preempt(request, last_step)

    def _fail(self, step: StepInFlight, errors: dict[str, str], outputs: list[RequestOutput]) -> None:
        """End the requests that failed, and forget what they computed; those that took it up compute it again."""
        for chunk in untrusted_chunks(step, errors):
            for request in forget_failed(chunk, self._in_flight, self.manager):
                self._compute_again(request, None, step)
        for request in [*step.decodes, *(chunk.request for chunk in step.chunks)]:
            if request.request_id in errors and not request.has_ended:
                self._finish(request, "error")
                outputs.append(failed_output(request.request_id, errors[request.request_id]))

    def _give_back(self, request: Request, last_step: int | None) -> None:
        """Free all that a running request holds. last_step: as in `KVCacheManager.free`."""
        self.manager.free(request, last_step)
        request.share.account.num_running -= 1
        if self.encoder is not None:
            self.encoder.release(request)
        if request.adapter is not None:
            self.adapter_slots.release(request.adapter)
        self._forget_ids.append(request.request_id)

    def _finish(self, request: Request, reason: FinishReason | None) -> None:
        """Give back what the request holds. The queues still have it until `_drop_finished`."""
        assert reason is not None, request.request_id
        assert request.status is not RequestStatus.FINISHED, request.request_id
        if request.status is RequestStatus.RUNNING:
            self._give_back(request, None if reason == "error" else self._next_step - 1)
        if self._transfers is not None:
            self._transfers.finish(request, reason)
        if request.adapter is not None:
            self.adapter_slots.num_unfinished[request.adapter] -= 1
        self._queue.leave(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        if self._drafting is not None:
            self._drafting.forget(request)
        del self.requests[request.request_id]

    def _drop_finished(self) -> None:
        if len(self._running) + len(self._queue) != len(self.requests):
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
            self._queue.drop_finished()
