"""Bounds that hold while several API keys have unfinished requests.

A key's share of the batch slots, of the KV blocks and of a step's prompt tokens follows from its weight. A key may have more than its
share as long as no key wants what is left of its own:
- A key that is behind and waits takes slots and blocks from a key that is ahead: the last request of that key is preempted.
- While several keys have prompts to compute, each gets its share of the step for them. A short prompt that waits gets a
  `SHORT_FRACTION`th of its key's part although longer prompts of the key are under way.
- Beside decodes of other keys, prompts of one key make a step longer by a few times what decodes take, or are an `AHEAD_FRACTION`th of a
  step if that is more. They wait, and decodes that want more than a token sit out, while they have made steps much longer (step_time.py).
  Before times are known, prompts of a key that is ahead get what costs as much as the decodes of the keys that are behind.
- A sequence whose mask of structured output takes long sits out some steps.
- A key that has its share of the slots starts no more requests while a key with fewer could start one.

Costs are in prompt tokens. A decode costs more than a prompt token, and so do a prompt token's logprobs; how much more is measured
(`TokenCost`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from compile_and_serve.runtime.scheduler.fair_queue import FairQueue, can_start
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.shares import Account
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput
from compile_and_serve.runtime.scheduler.step_time import StepTime
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight

AHEAD_FRACTION = 64
SHORT_FRACTION = 4
PROBE_STEPS = 64  # one in so many steps beside a key that is ahead has no prompts, so that the time of decodes is known
MASK_PAUSE = 4.0  # seconds in which a sequence sits out, for each second of its mask
STARTS_PER_STEP = 8  # requests for which a step makes room
MIN_PROMPT_ROWS, MAX_PROMPT_ROWS = 4, 64  # prompt logprobs of a step, in place of the scheduler's PROMPT_LOGPROB_ROWS


class Part(NamedTuple):
    """Tokens of a step that a key's prompts may have. kept: of these, for prompts that wait."""

    tokens: int
    kept: int


class TokenCost:
    """What a decode and the logprobs of a prompt token cost, in prompt tokens: measured over the steps, within limits."""

    DEFAULT, LIMITS = 2.0, (1.0, 16.0)
    _NEW_PART = 0.1  # of an average

    def __init__(self) -> None:
        self.decode, self.row = self.DEFAULT, 0.0
        self.prompt_seconds = self._decode_seconds = self._row_seconds = 0.0  # of a token
        # Of a row, by which a step with decodes takes longer: with its token, and its part of what a step with prompts takes anyway.
        self._seconds_beside = 0.0

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float, num_rows: int = 0) -> None:
        """Learn from a step's duration. num_rows: prompt tokens whose logprobs it computed."""
        if seconds <= 0.0:
            return
        rest = seconds - num_decodes * self._decode_seconds - (num_prompt_tokens * self.prompt_seconds if num_rows else 0.0)
        if not num_prompt_tokens:
            self._decode_seconds = self._mean(self._decode_seconds, seconds / num_decodes)
        elif num_rows:
            self._row_seconds = self._mean(self._row_seconds, max(0.0, rest) / num_rows)
            beside = max(0.0, seconds - num_decodes * self._decode_seconds)
            self._seconds_beside = self._mean(self._seconds_beside, beside / num_rows)
        elif rest > 0.0:
            self.prompt_seconds = self._mean(self.prompt_seconds, rest / num_prompt_tokens)
        if self.prompt_seconds:
            lowest, highest = self.LIMITS
            self.row = min(highest, self._row_seconds / self.prompt_seconds)
            if self._decode_seconds:
                self.decode = min(highest, max(lowest, self._decode_seconds / self.prompt_seconds))

    def rows_beside(self, num_decodes: int) -> int:
        """Prompt tokens that, with their logprobs, take about as long as so many decodes."""
        if not num_decodes:
            return MAX_PROMPT_ROWS
        if not self._seconds_beside:
            return MIN_PROMPT_ROWS
        return min(MAX_PROMPT_ROWS, max(MIN_PROMPT_ROWS, int(num_decodes * self._decode_seconds / self._seconds_beside)))

    def _mean(self, before: float, new: float) -> float:
        return new if not before else before + self._NEW_PART * (new - before)


class Fairness:
    """Counts what keys get, and says who may start, whose prompts go on and who gives way. Call it while `queue.is_contended`."""

    def __init__(self, queue: FairQueue, manager: KVCacheManager, *, max_num_seqs: int, token_budget: int) -> None:
        self.cost, self.step_time = TokenCost(), StepTime()
        self._queue = queue
        self._manager = manager
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._slack = token_budget / 2  # by which a key may be behind; a step may add as much again
        self._num_decodes = 0  # of the last step that had any
        self._is_probing = False  # costly decodes sit out so that it is known what steps take without them
        self._num_withheld = 0  # steps in which prompts of a key that is ahead left room
        queue.may_start = self._may_start

    def share(self, account: Account) -> float:
        """A key's part of everything, 0 to 1."""
        return account.tenant.weight / sum(other.tenant.weight for other in self._queue.accounts.values())

    @property
    def max_prompt_rows(self) -> int:
        """Prompt logprobs that a step may compute, beside as many decodes as steps have."""
        return self.cost.rows_beside(self._num_decodes)

    def charge(self, step: StepInFlight, scheduled: Mapping[str, int]) -> None:
        """Count what a step computes. What is computed again after a preemption is not counted again."""
        for request in step.decodes:
            self._charge(request, request.num_computed_tokens, scheduled[request.request_id], self.cost.decode)
        for chunk in step.chunks:
            row_cost = self.cost.row if chunk.request.wants_prompt_logprobs else 0.0
            self._charge(chunk.request, chunk.end, chunk.end - chunk.start, 1.0 + row_cost)
        self._num_decodes = len(step.decodes) or self._num_decodes

    def _charge(self, request: Request, end: int, count: int, token_cost: float) -> None:
        num_new = min(count, end - request.num_charged_tokens)
        if num_new > 0:
            cost, user = num_new * token_cost, request.share
            user.served += cost
            user.account.served += cost / user.account.tenant.weight

    def observe(self, step: StepInFlight, result: ModelRunnerOutput, seconds: float, following: StepInFlight | None = None) -> None:
        """Learn from a step's result. seconds: its duration. following: the step that was launched meanwhile.

        Sequences whose masks take long sit out the next steps: together those of a key take one second in 1 + `MASK_PAUSE`, and they come
        back one after the other, so that a step waits for few of them.
        """
        num_prompt_tokens = sum(chunk.end - chunk.start for chunk in step.chunks)
        self.cost.observe(len(step.decodes), num_prompt_tokens, seconds, step.num_prompt_rows)
        accounts = self._queue.accounts
        weights = {name: account.tenant.weight for name, account in accounts.items()}
        # What makes the step longer costs as much as decodes in that time, unless prompt tokens cost more.
        for name, longer in self.step_time.observe(step, following, seconds, weights).items():
            if name in accounts:
                cost = longer * len(step.decodes) * self.cost.decode - num_prompt_tokens
                accounts[name].served += max(0.0, cost) / weights[name]
        if not result.mask_seconds:
            return
        slow: dict[Account, list[Request]] = {}
        for request in step.decodes:
            if request.request_id in result.mask_seconds and not request.has_ended:
                slow.setdefault(request.share.account, []).append(request)
        now = time.monotonic()
        for requests in slow.values():
            pause = MASK_PAUSE * sum(result.mask_seconds[request.request_id] for request in requests)
            for number, request in enumerate(requests, start=1):
                request.paused_until = now + pause * number / len(requests)
                request.fast_until = 0

    def left_out(self, running: Sequence[Request], left_out: frozenset[int], now: float) -> frozenset[int]:
        """The decodes that the next step leaves out, by `id`: those of `left_out`, and costly ones of keys that have made steps much
        longer, or of one key of which it is not known by how much. None of the latter where no other key would decode.
        """
        self._is_probing = False
        step_time = self.step_time
        if not step_time.may_hold or not any(map(step_time.should_sit_out, self._queue.accounts)):
            return left_out
        decodes, costly = dict[Account, int](), dict[Account, list[int]]()
        for request in running:
            if request.prefill_end <= request.num_computed_tokens < request.decode_end and request.paused_until <= now:
                if left_out and id(request) in left_out:
                    continue
                account = request.share.account
                decodes[account] = decodes.get(account, 0) + 1
                if request.costs_extra:
                    costly.setdefault(account, []).append(id(request))
        num_left = sum(decodes.values())
        for account in sorted(costly, key=lambda account: step_time.saved(account.tenant.name)):
            name = account.tenant.name
            is_probe = not step_time.is_overdrawn(name)
            if num_left == decodes[account] or (is_probe and (self._is_probing or not step_time.needs_step_without(name))):
                continue
            self._is_probing |= is_probe
            left_out = left_out.union(costly[account])
            decodes[account] -= len(costly[account])
            num_left -= len(costly[account])
        return left_out

    def divide(self, prefilling: Sequence[Request], budget: int, step: StepInFlight) -> tuple[list[Request], dict[Account, Part], int]:
        """Divide what a step's decodes leave of its budget among prompts. → the prefills under way, those of the least served key first;
        what each key with prompts to compute may have; and how much is withheld from all of them.

        A key that is ahead by more than the slack gets none while the key that is behind has a prompt that waits.
        """
        held_back = self._held_back(step)
        may_start = sum(account.num_running for account in self._queue.accounts.values()) < self._max_num_seqs
        if not prefilling and not may_start:
            return [], {}, 0
        if held_back:
            prefilling = [request for request in prefilling if request.share.account not in held_back]
        withheld = self._withheld(prefilling, budget, step, held_back)
        demands: Counter[Account] = Counter()
        for request in prefilling:
            demands[request.share.account] += request.prefill_end - request.num_computed_tokens
        first: dict[Account, int] = {}  # tokens of the prompt that is next
        for account in self._queue.accounts.values() if may_start else ():
            if not account.num_waiting or not account.has_room or account in held_back:
                continue
            for user in account.waiting_users():
                # The first entries of a heap are about those that come next.
                lengths = [len(request.token_ids) for _, request in user.waiting[:STARTS_PER_STEP] if can_start(request)]
                if lengths:
                    demands[account] += sum(lengths)
                    first[account] = min(lengths[0], first.get(account, self._token_budget))
        lowest = min((account.served for account in first), default=math.inf)
        demands = Counter({account: count for account, count in demands.items() if account.served - lowest <= self._slack})
        parts = {}
        for account, tokens in self._shared_out(demands, budget - withheld).items():
            is_short = account in first and first[account] <= tokens // SHORT_FRACTION
            parts[account] = Part(tokens, first[account] if is_short else 0)
        return self.by_service(prefilling), parts, withheld

    def _held_back(self, step: StepInFlight) -> set[Account]:
        """Keys whose prompts have made the steps of other keys' decodes so much longer that they wait."""
        found: set[Account] = set()
        if not self.step_time.may_hold:
            return found
        for account in self._queue.accounts.values():
            if self.step_time.is_overdrawn(account.tenant.name):
                others = [one.share.account.served for one in step.decodes if one.share.account is not account]
                if others:
                    found.add(account)
                    account.served = max(account.served, min(others))  # it does not wait for the others, so it saves nothing up
        return found

    def _withheld(self, prefilling: Sequence[Request], budget: int, step: StepInFlight, held_back: Collection[Account]) -> int:
        """Tokens of a step's budget that its prompts must leave, where all of them are of one key and another one decodes."""
        wanting = {request.share.account for request in prefilling}
        wanting |= {account for account in self._queue.accounts.values() if account.num_waiting and account not in held_back}
        others = [other for one in step.decodes if (other := one.share.account) not in wanting or len(wanting) > 1]
        if not wanting or not others:
            return 0
        if self._is_probing or self.step_time.needs_plain_step(several=len(wanting) > 1):
            return budget
        if len(wanting) > 1:
            return 0
        [account] = wanting
        least = max(1, self._token_budget // AHEAD_FRACTION)
        if self.step_time.without(account.tenant.name):
            most = self.step_time.max_tokens(account.tenant.name, self.cost.prompt_seconds)
            return max(0, budget - max(least, int(min(budget, most))))
        behind = [other for other in others if account.served - other.served > self._slack]
        if not behind:
            return 0
        self._num_withheld += 1
        if self._num_withheld % PROBE_STEPS == 1:
            return budget
        as_much = sum(self.cost.decode / other.tenant.weight for other in behind) * account.tenant.weight
        return max(0, budget - max(least, int(as_much)))

    def _shared_out(self, demands: Counter[Account], budget: int) -> dict[Account, int]:
        """Give each key its part of the budget by weight, and what a key does not need to the others. The least served gets what
        rounding leaves.
        """
        granted: dict[Account, int] = dict.fromkeys(demands, 0)
        wanting = sorted((account for account in demands if demands[account]), key=lambda account: account.served)
        while wanting and budget > 0:
            weights = sum(account.tenant.weight for account in wanting)
            available = budget
            for account in wanting:
                count = min(demands[account] - granted[account], budget, math.ceil(available * account.tenant.weight / weights))
                granted[account] += count
                budget -= count
            wanting = [account for account in wanting if granted[account] < demands[account]]
        return granted

    def by_service(self, requests: Iterable[Request]) -> list[Request]:
        """The requests, those of the least served key first; the order within a key stays."""
        return sorted(requests, key=lambda request: request.share.account.served)

    def make_room(self, running: Sequence[Request]) -> list[Request]:
        """The running requests to preempt, so that keys which are behind can start what waits. running: in order."""
        free_slots = self._max_num_seqs - len(running)
        wanting = [
            account
            for account in self._queue.accounts.values()
            if account.num_waiting
            and (free_slots > 0 or self._may_take_slot(account))
            and not self.step_time.is_overdrawn(account.tenant.name)
        ]
        if not wanting:
            return []
        spare = self._manager.num_spare - len(running)
        victims: list[Request] = []
        slots = Counter({account: account.num_running for account in self._queue.accounts.values()})
        blocks: Counter[Account] | None = None
        # One that computes again what it lost makes some progress first.
        candidates = [one for one in running if one.num_computed_tokens > one.num_charged_tokens]
        for account in sorted(wanting, key=lambda account: account.served):
            limit = account.tenant.max_running
            for request in self._starting(account):
                if limit is not None and slots[account] >= limit:
                    break
                num_blocks = self._manager.num_blocks(len(request.token_ids))
                if spare < num_blocks and blocks is None:
                    blocks = Counter()
                    for one in running:
                        if one not in victims:
                            blocks[one.share.account] += _num_blocks(one)
                found: list[Request] = []
                while free_slots + len(found) < 1 or spare + sum(map(_num_blocks, found)) < num_blocks:
                    needs_slot = free_slots + len(found) < 1
                    left = [one for one in candidates if one not in victims and one not in found]
                    if needs_slot or blocks is None:
                        victim = self._victim(account, slots, 1, self._max_num_seqs, left)
                    else:
                        victim = self._victim(account, blocks, num_blocks, self._manager.pool.num_blocks, left)
                    if victim is None:
                        found = []
                        break
                    found.append(victim)
                    slots[victim.share.account] -= 1
                    if blocks is not None:
                        blocks[victim.share.account] -= _num_blocks(victim)
                if not found and (free_slots < 1 or spare < num_blocks):
                    break
                victims += found
                free_slots += len(found) - 1
                spare += sum(map(_num_blocks, found)) - num_blocks
                slots[account] += 1
                if blocks is not None:
                    blocks[account] += num_blocks
        return victims

    def _may_take_slot(self, account: Account) -> bool:
        """Whether `_victim` could find one whose slot the key may take."""
        share = self.share(account) * self._max_num_seqs
        if account.num_running + 1 <= share:
            return True
        is_behind = any(other.served - account.served > self._slack for other in self._queue.accounts.values())
        return account.num_running <= share and is_behind

    def exceeds_blocks(self, account: Account, num_new: int, running: Sequence[Request]) -> bool:
        """Whether a key that holds blocks would have more than its share with `num_new` more."""
        held = sum(_num_blocks(request) for request in running if request.share.account is account)
        return held > 0 and held + num_new > self.share(account) * self._manager.pool.num_blocks

    def _starting(self, account: Account) -> list[Request]:
        """Requests of a key that would start next."""
        found = [one for user in account.waiting_users() for _, one in user.waiting[:STARTS_PER_STEP] if can_start(one)]
        return found[:STARTS_PER_STEP]

    def _victim(self, account: Account, held: Counter[Account], wanted: int, total: int, running: Sequence[Request]) -> Request | None:
        """Whose slot or blocks the key may take: the last request of the key that is the most above its share of them, and not behind.

        A key that is behind by more than the slack may take it from the key that is the most ahead, and exceed its own share by less than a
        request. held: of each key. wanted: by the request that is to start. total: what there is.
        """
        own = self.share(account) * total
        others = {one.share.account for one in running if one.share.account is not account}
        above = [other for other in others if other.served >= account.served and held[other] > self.share(other) * total]
        ahead = [other for other in others if other.served - account.served > self._slack]
        if held[account] + wanted <= own and above:
            taken_from = max(above, key=lambda other: held[other] - self.share(other) * total)
        elif held[account] <= own and ahead:
            taken_from = max(ahead, key=lambda other: other.served)
        else:
            return None
        return next(one for one in reversed(running) if one.share.account is taken_from)

    def _may_start(self, account: Account) -> bool:
        if not account.has_room:
            return False
        if not self._queue.is_contended or account.num_running + 1 <= self.share(account) * self._max_num_seqs:
            return True
        for other in self._queue.accounts.values():
            if other is account or not other.num_waiting or other.is_skipped:
                continue
            if other.num_running + 1 <= self.share(other) * self._max_num_seqs and other.has_room:
                return False
        return True


def _num_blocks(request: Request) -> int:
    return sum(map(len, request.block_ids)) - sum(request.num_freed_blocks)
