"""Admission: which waiting requests start in a step.

Requests start in order: that of their API keys' shares (fair_queue.py), and within a key that of `Request.key`. None is overtaken by those
behind it, with two exceptions. Both keep back the batch slot and the blocks that the request will need:
- The step computes blocks that the request can share (MIN_SHARED_TOKENS or more). The next step may read them.
- It wants prompt logprobs, and the step's rows for them are taken (PROMPT_LOGPROB_ROWS): such logits take memory.

A request whose LoRA adapter finds no slot (running requests use all of them) waits without keeping anything back: requests
without an adapter overtake it, those with one do not. A request that waits for something else (a grammar, an adapter, blocks that
are being loaded) delays no other request.
A prompt that cannot be cut waits for a step with room for all of it. One that begins with a media item waits for a step that can encode
it.

Where every batch slot is taken and requests wait, slots that become free may be given away in groups
(runtime/scheduler/free_slots.py).
"""

from __future__ import annotations

import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Mapping

from compile_and_serve.custom_ops.step_data import ADAPTER_SLOT, CROSS_ROWS_DATUM, CROSS_SPANS_ARRAY, PROMPT_LENGTH
from compile_and_serve.runtime.config import SchedulerConfig
from compile_and_serve.runtime.ledger.records import WaitReason
from compile_and_serve.runtime.scheduler.adapter_slots import AdapterSlots
from compile_and_serve.runtime.scheduler.fair_queue import FairQueue
from compile_and_serve.runtime.scheduler.fairness import Fairness, Part
from compile_and_serve.runtime.scheduler.free_slots import FreeSlots
from compile_and_serve.runtime.scheduler.item_queue import ItemQueue
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.prefix_misses import PrefixMisses
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.shares import Account
from compile_and_serve.runtime.scheduler.step_messages import NewRequestData
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight
from compile_and_serve.runtime.scheduler.transfers import Transfers

HASHED_TOKENS = 1 << 15  # prompt tokens that a step with other work hashes to look for their prefixes, about 2 ms
MIN_SHARED_TOKENS = 64  # prompt tokens worth waiting a step for, which then need not be computed
ADMITTED_TOKENS = 1 << 17  # tokens of the requests that a step admits, cached ones included: they take about 5 ms


class Admission:
    """Holds the waiting requests and starts them."""

    def __init__(
        self,
        manager: KVCacheManager,
        adapter_slots: AdapterSlots,
        *,
        max_num_seqs: int,
        config: SchedulerConfig,
        whole_prompts: bool = False,
        transfers: Transfers | None = None,
    ) -> None:
        """whole_prompts: of `WorkerInfo`."""
        self.waiting = FairQueue()
        self.waiting.keeps_ledgers = config.request_ledger
        self.prefix_misses = PrefixMisses(manager)
        self.misses: Counter[str] = Counter()  # "kind.reason"
        self.fairness = Fairness(self.waiting, manager, max_num_seqs=max_num_seqs, token_budget=config.token_budget)
        self.free_slots = FreeSlots(max_num_seqs, admit_in_groups=bool(config.admit_in_groups))
        self._manager = manager
        self._adapter_slots = adapter_slots
        self._max_num_seqs = max_num_seqs
        self._whole_prompts = whole_prompts
        self._transfers = transfers
        # The first waiting request, if it did not fit; how many blocks were spare; what else would let it fit.
        self._blocked: tuple[Request, int, bytes | None] | None = None

    def may_admit(self, num_running: int) -> bool:
        """Whether a request may start in the next step: one is ready, there is a batch slot, and it is not known that it does not fit."""
        if not self.waiting or num_running >= self._max_num_seqs:
            return False
        first = self.waiting.first_ready()
        return first is not None and not self._is_blocked(first, self._manager.num_spare - num_running)

    def admit(
        self,
        running: list[Request],
        budget: int,
        step: StepInFlight,
        scheduled: dict[str, int],
        new_requests: list[NewRequestData],
        parts: Mapping[Account, Part] | None = None,
    ) -> int:
        """Start waiting requests, in order, until the first that does not fit. Returns the budget that is left.

        running: sorted by key. The started requests are added to it, to `scheduled` and to `new_requests`. parts: what each API key may
        have of the step; None: the keys do not share it.
        """
        waiting, now = self.waiting, time.monotonic()
        if budget <= 0:
            self._say_why("budget", now)
            return budget
        num_free = self._max_num_seqs - len(running)
        has_prompts = not step.decodes or bool(step.chunks)
        heap = waiting.only_heap
        if heap is not None and self.free_slots.are_held_back(num_free, heap, budget, has_prompts=has_prompts):
            self._say_why("group", now)
            return budget
        manager = self._manager
        manager.chains.budget = HASHED_TOKENS if scheduled else sys.maxsize
        deferred: list[Request] = []
        not_ready: list[Request] = []
        num_admitted_tokens = 0
        # A block for each running sequence is kept back: its next decodes should not undo what is admitted now.
        reserve = len(running)
        left = {} if parts is None else {account: part.tokens for account, part in parts.items()}
        for chunk in step.chunks if left else ():
            if (account := chunk.request.share.account) in left:
                left[account] -= chunk.end - chunk.start
        why: WaitReason = "step"
        while (request := waiting.first()) is not None:
            if budget <= 0 or len(running) + len(deferred) >= self._max_num_seqs:
                why = "budget" if budget <= 0 else "slots"
                break
            account, clock = request.share.account, request.clock
            if not request.is_ready:
                not_ready.append(waiting.pop(request))
                continue
            if clock is not None:
                clock.consider(now)
            if request.adapter is not None and not self._adapter_slots.has_room(request.adapter):
                # Requests of its key without an adapter may overtake it. All others are set aside at once: they may be many.
                without_slot = waiting.take(account, _has_adapter)
                for one in without_slot:
                    if one.clock is not None:
                        one.clock.wait_alone("adapter_slots", now)
                not_ready += without_slot
                continue
            room = budget if parts is None else min(budget, left.get(account, 0))
            if request.num_pending_steps > 0 or room <= 0:
                account.is_skipped = True
                account.clock.turn("step" if request.num_pending_steps else "key", now)
                continue
            num_tokens = len(request.token_ids)
            if num_admitted_tokens + num_tokens > max(ADMITTED_TOKENS, num_tokens) or (self._whole_prompts and num_tokens > budget):
                why = "budget"
                break
            num_spare = manager.num_spare - reserve
            prompt = request.prompt
            if prompt.deferred_step == step.step and num_tokens == request.num_prompt_tokens:
                # A sibling was deferred just now: spare the look into the prefix cache.
                if prompt.num_new_blocks > num_spare:
                    why = "blocks"
                    break
                deferred.append(waiting.pop(request))
                if clock is not None:
                    clock.wait_alone("prefix", now)
                reserve += prompt.num_new_blocks + 1
                continue
            if self._is_blocked(request, num_spare):
                why = "blocks"
                break
            prefix = manager.find_prefix(request, step.step)
            if prefix is None:
                break
            num_new = manager.num_new_blocks(request, prefix)
            if num_new > num_spare:
                if waiting.is_contended and self.fairness.exceeds_blocks(account, num_new, running):
                    account.is_skipped = True  # it waits for its own requests to end, and the other keys do not
                    account.clock.turn("key", now)
                    continue
                self._blocked = (request, num_spare, prefix.missing_key)
                why = "blocks"
                break
            num_shared = prefix.num_tokens - prefix.num_ready_tokens
            if num_shared >= MIN_SHARED_TOKENS or not step.has_rows(request):
                deferred.append(waiting.pop(request))
                if clock is not None:
                    clock.wait_alone("prefix" if num_shared >= MIN_SHARED_TOKENS else "prompt_logprobs", now)
                reserve += num_new + 1
                if num_tokens == request.num_prompt_tokens:
                    prompt.deferred_step, prompt.num_new_blocks = step.step, num_new
                continue
            if num_shared > 0:
                prefix = manager.find_prefix(request, step.step, only_ready=True)
                assert prefix is not None
                if manager.num_new_blocks(request, prefix) > num_spare:
                    why = "blocks"
                    break
            if self._transfers is not None:
                if not manager.chains.reach(request, manager.longest_prefix(request) // manager.chains.tokens_per_key):
                    break
                if self._transfers.load(request, prefix, num_spare):
                    if clock is not None:
                        clock.prepare("kv_load", request.waits_for[-1])
                    not_ready.append(waiting.pop(request))
                    continue
            if not step.can_read(request, prefix.num_tokens, room):
                if not step.can_read(request, prefix.num_tokens, budget):
                    why = "encoder"
                    break
                room = budget  # its key's part is too small for an item that must be whole
            waiting.pop(request)
            manager.admit(request, prefix)
            if clock is not None:
                clock.start(now)
                if request.num_preemptions == 0 and (miss := self.prefix_misses.explain(request, prefix)) is not None:
                    request.misses.append(miss)
                    self.misses["prefix." + miss.reason] += 1
            if self._transfers is not None:
                self._transfers.release(request)
            new_requests.append(self._start(request, running, room, step, scheduled))
            reserve += 1
            left[account] = room - scheduled[request.request_id]
            budget -= scheduled[request.request_id]
            num_admitted_tokens += num_tokens
        else:
            why = "key" if waiting else "step"
        for request in (*deferred, *not_ready):
            waiting.push_back(request)
        self._say_why(why, now)
        waiting.end_step()
        self.free_slots.was_full = len(waiting) > len(not_ready) and len(running) == self._max_num_seqs
        return budget

    def _say_why(self, reason: WaitReason, now: float) -> None:
        """From now on, requests that are not told otherwise wait for this."""
        for account in self.waiting.accounts.values():
            if not account.is_skipped:
                account.clock.turn(reason if account.has_room else "key", now)

    def _is_blocked(self, request: Request, num_spare: int) -> bool:
        """Whether nothing has changed since the request did not fit: neither are more blocks spare, nor has its prefix become
        longer. Saves the look for its prefix.
        """
        if self._blocked is None:
            return False
        blocked, num_spare_before, missing_key = self._blocked
        if blocked is request and num_spare <= num_spare_before and missing_key not in self._manager.pool.cached:
            return True
        self._blocked = None
        return False

    def _start(
        self, request: Request, running: list[Request], budget: int, step: StepInFlight, scheduled: dict[str, int]
    ) -> NewRequestData:
        """Run an admitted request."""
        request.status = RequestStatus.RUNNING
        request.share.account.num_running += 1
        request.prefill_end = len(request.token_ids)
        request.prefill_step = step.step
        request.first_scheduled_time = request.first_scheduled_time or time.time()
        insort(running, request, key=_key)
        # The list goes into the message, which may be read after we have appended to our copy.
        token_ids = request.token_ids
        request.token_ids = token_ids.copy()
        if request.clock is not None and request.num_preemptions == 0:
            self.prefix_misses.remember(request)
        num_computed = request.num_computed_tokens
        step.add_chunk(request, budget, scheduled, self._manager)
        step_data, contents = request.step_data, request.prompt.contents
        arrays = {} if contents is None else contents.all_arrays(without=() if step.encoder is None else step.encoder.arrays)
        if self._whole_prompts:
            step_data = step_data | {PROMPT_LENGTH: request.num_prompt_tokens}
        if request.adapter is not None:
            step_data = step_data | {ADAPTER_SLOT: 1 + self._adapter_slots.acquire(request.adapter)}
        if isinstance(step.encoder, ItemQueue):
            step_data = step_data | {CROSS_ROWS_DATUM: step.encoder.num_rows(request)}
            arrays |= {CROSS_SPANS_ARRAY: spans} if (spans := step.encoder.spans(request)) else {}
        return NewRequestData(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            stop_token_ids=sorted(request.stop_ids),
            block_ids=[block_ids.copy() for block_ids in request.block_ids],
            num_computed_tokens=num_computed,
            step_data=step_data,
            arrays=arrays,
            pooling=request.pooling,
        )


def _has_adapter(request: Request) -> bool:
    return request.adapter is not None


def _key(request: Request) -> tuple[float, ...]:
    return request.key
