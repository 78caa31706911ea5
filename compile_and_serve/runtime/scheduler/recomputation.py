"""The canary's second look: keys and values of random blocks against those of the same tokens, computed again.

A request of the canary's own computes the first tokens of a running request once more, in blocks of its own. Then the device compares a
block of both. So what was wrong from the beginning is found, too. Other batches round otherwise: only content that is far apart is a
finding.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.block_pool import COMPUTED, KVCacheBlock
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, StateChecks

PREFIX = "canary "  # of the names of its requests; no client's request has a space in its name
MAX_TOKENS = 512  # that are computed again for a block
TOLERANCE = 0.3  # of the norm of a block in a layer; another token's keys and values are 0.5 to 1.4 of it apart
_TRIES = 8


@dataclass(slots=True)
class _Check:
    """name: of the canary's request. source: whose block it is. key, step: of the content. place: in the list of blocks of the group."""

    name: str
    source: str
    block: KVCacheBlock
    key: bytes
    step: int
    group: int
    place: int
    end: int
    planned: int | None = None


class Recomputation:
    """Of one scheduler, in the order `begin`, `plan`, `take`. seconds: between two checks. num_checked: blocks that were compared."""

    def __init__(
        self, scheduler: Scheduler, *, steps_in_flight: int, seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self.num_checked = seconds, 0
        self._scheduler, self._clock = scheduler, clock
        self._depth = max(2, steps_in_flight)
        self._random = random.Random(0)
        self._check: _Check | None = None
        self._is_over = False
        self._last = -seconds
        self._last_step = self._number = 0

    def begin(self) -> None:
        """Before steps are scheduled: begin to compute a block again, if it is time, and end what has been compared."""
        check, scheduler = self._check, self._scheduler
        if check is not None:
            if self._is_over or check.name not in scheduler.requests:
                scheduler.abort([check.name])
                self._check, self._is_over = None, False
            return
        now = self._clock()
        if now - self._last < self.seconds or not scheduler.requests:
            return
        self._last = now
        names = list(scheduler.requests)
        for name in self._random.sample(names, min(_TRIES, len(names))):
            if (check := self._choose(scheduler.requests[name])) is not None:
                self._compute(check, scheduler.requests[name])
                return

    def _choose(self, source: Request) -> _Check | None:
        """A block of a request whose tokens alone say what it holds."""
        beside = source.prompt.contents is not None or source.step_data or source.kv_transfer is not None or source.adapter is not None
        is_limited = source.share.account.tenant.max_running is not None  # the canary must not take what is the key's
        if source.status is not RequestStatus.RUNNING or beside or is_limited or source.request_id.startswith(PREFIX):
            return None
        scheduler = self._scheduler
        pool, found = scheduler.manager.pool, list[_Check]()
        for number, group in enumerate(scheduler.groups):
            if group.kind != "tokens":
                continue
            last = min(len(source.block_ids[number]), MAX_TOKENS // group.block_size, scheduler.max_len // group.block_size - 1)
            for place in range(source.num_freed_blocks[number], last):
                block = pool.blocks[source.block_ids[number][place]]
                first = None if block.key is None else pool.cached.get(block.key)
                if first is block and block.key is not None and block.step < self._last_step - self._depth:
                    end = (place + 1) * group.block_size
                    found.append(_Check("", source.request_id, block, block.key, block.step, number, place, end))
        return self._random.choice(found) if found else None

    def _compute(self, check: _Check, source: Request) -> None:
        self._number += 1
        check.name = f"{PREFIX}{self._number}"
        tenant = source.share.account.tenant
        request = EngineRequest(
            request_id=check.name,
            prompt_token_ids=source.token_ids[: check.end + 1],
            # It runs until it is compared, and not for ever.
            sampling_params=SamplingParams(temperature=0.0, max_tokens=4 * self._depth + 8, ignore_eos=True, speculate=False),
            cache_salt=check.name,  # it must not find the block in the prefix cache
            tenant=msgspec.structs.replace(tenant, user=source.share.name or None),
        )
        try:
            self._scheduler.add_request(request)
        except (QueueFullError, ValueError):  # there is no room for it
            return
        self._scheduler.requests[check.name].clock = None  # nobody asks what it waited for
        self._check = check

    def plan(self, scheduled: SchedulerOutput) -> None:
        """Let the step compare, before it runs, if both blocks are complete."""
        self._last_step = max(self._last_step, scheduled.step)
        check = self._check
        if check is None or self._is_over or check.planned is not None or not scheduled.num_scheduled_tokens:
            return
        request = self._scheduler.requests.get(check.name)
        if request is None or request.status is not RequestStatus.RUNNING or request.num_preemptions:
            self._is_over = request is None or request.num_preemptions > 0
            return
        is_decoding = len(request.token_ids) > request.num_prompt_tokens  # its prompt's steps are over
        if not is_decoding or check.place < request.num_freed_blocks[check.group]:
            return
        if not self._is_unchanged(check):
            self._is_over = True
            return
        check.planned = scheduled.step
        scheduled.checks = scheduled.checks or StateChecks()
        scheduled.checks.pairs = [(check.group, request.block_ids[check.group][check.place], check.block.block_id)]

    def take(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> tuple[KVCacheBlock, bytes, str] | None:
        """A block that holds something else than it should, the key of its content, and a sentence."""
        check = self._check
        if check is None or check.planned != scheduled.step or not result.differences:
            return None
        self._is_over = True
        self.num_checked += 1
        [apart] = result.differences
        if apart <= TOLERANCE or not self._is_unchanged(check):
            return None
        origin = "was loaded, or computed before it was cached" if check.step == COMPUTED else f"was computed by step {check.step}"
        sentence = (
            f"The canary computed the first {check.end} tokens of request {check.source} again and found that block "
            f"{check.block.block_id} of state group {check.group} holds something else ({apart:.2f} of its norm apart). It {origin}."
        )
        return check.block, check.key, sentence

    def _is_unchanged(self, check: _Check) -> bool:
        return check.block.key == check.key and check.block.step == check.step and check.block.ref_count > 0


def without_own(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """The outputs of clients' requests."""
    return [output for output in outputs if not output.request_id.startswith(PREFIX)]
