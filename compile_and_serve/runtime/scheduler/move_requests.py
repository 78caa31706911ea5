"""Unfinished requests that go from one scheduler to another one, whose KV cache has nothing of them yet."""

from __future__ import annotations

import msgspec

from compile_and_serve.runtime.messages import RequestOutput, Tenant
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.scheduler import Scheduler


def take_all(scheduler: Scheduler) -> list[tuple[Request, Tenant]]:
    """Take all unfinished requests out, those that run with their tokens so far. What steps in flight compute is forgotten."""
    scheduler._in_flight.clear()
    while scheduler._running:
        scheduler._preempt(scheduler._running.pop(), last_step=None)
    taken = []
    for request in sorted(scheduler.requests.values(), key=lambda one: one.key):
        request.num_pending_steps = 0
        user = request.share
        scheduler.waiting.leave(request)
        if request.adapter is not None:
            scheduler.adapter_slots.num_unfinished[request.adapter] -= 1
        taken.append((request, msgspec.structs.replace(user.account.tenant, user=user.name or None)))
    scheduler.requests.clear()
    return taken


def adopt(scheduler: Scheduler, request: Request, tenant: Tenant) -> RequestOutput | None:
    """Queue a request that another scheduler had. → its end, if this scheduler's KV cache is too small for it."""
    if len(request.token_ids) >= scheduler.max_len:
        error = f"The request has {len(request.token_ids)} tokens; since ranks have joined or left, the cache holds {scheduler.max_len}."
        return RequestOutput(request_id=request.request_id, finish_reason="error", error=error)
    request.max_total_tokens = min(request.max_total_tokens, scheduler.max_len)
    request.decode_end = request.max_total_tokens - 1
    request.end_len = min(request.end_len, request.max_total_tokens)
    request.key = (*request.key[:-1], float(next(scheduler._numbers)))
    if request.adapter is not None:
        scheduler.adapter_slots.num_unfinished[request.adapter] += 1
    scheduler.requests[request.request_id] = request
    scheduler.waiting.join(request, tenant)
    scheduler.waiting.push(request)
    return None
