"""Puts chunks of the prefills under way into a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compile_and_serve.runtime.scheduler.fairness import Part
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.shares import Account
from compile_and_serve.runtime.scheduler.step_messages import CachedRequestData
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight


def add_chunks(
    prefilling: Sequence[Request],
    budget: int,
    step: StepInFlight,
    scheduled: dict[str, int],
    grown: list[CachedRequestData],
    manager: KVCacheManager,
    parts: Mapping[Account, Part] | None = None,
) -> int:
    """Give prefills, in order, the budget that is left. → what is left then

    Those that are in the step already get nothing. parts: of `Fairness.divide`; None: the first may have all of it.
    """
    left = None if parts is None else {account: part.tokens - part.kept for account, part in parts.items()}
    for request in prefilling:
        account = request.share.account
        room = budget if left is None else min(budget, left.get(account, 0))
        if room <= 0 or request.request_id in scheduled or not step.has_rows(request):
            continue
        if not step.can_read(request, request.num_computed_tokens, room):
            if not step.can_read(request, request.num_computed_tokens, budget):
                continue
            room = budget  # its key's part is too small for an item that must be whole
        if manager.may_lack_room and not manager.has_room(request, step.chunk_end(request, room, manager)):
            continue
        new_ids = step.add_chunk(request, room, scheduled, manager)
        budget -= scheduled[request.request_id]
        if left is not None:
            left[account] -= scheduled[request.request_id]
        if new_ids is not None:
            grown.append(CachedRequestData(request_id=request.request_id, new_block_ids=new_ids))
    return budget
