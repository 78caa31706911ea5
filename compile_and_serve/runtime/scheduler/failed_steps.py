"""What a failed step leaves behind: content that cannot be trusted."""

from __future__ import annotations

from collections.abc import Iterable

from compile_and_serve.runtime.messages import ErrorKind, RequestOutput
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT, is_users_mistake
from compile_and_serve.runtime.scheduler.steps_in_flight import Chunk, StepInFlight


def failed_output(request_id: str, error: str) -> RequestOutput:
    """The last output of a request that failed. error: a sentence."""
    kind: ErrorKind = "invalid" if is_users_mistake(error) else "internal"
    return RequestOutput(request_id=request_id, finish_reason="error", error=error, error_kind=kind)


def untrusted_chunks(step: StepInFlight, errors: dict[str, str]) -> list[Chunk]:
    """What the failed requests of a step may have left in the prefix cache, unless it was the user's mistake."""
    # Of a decode, only the state that it left when it ended or was preempted is in the prefix cache already.
    left = [
        Chunk(request, 0, len(request.token_ids), True, request.num_preemptions, step.step, request.num_prompt_tokens)
        for request in step.decodes
    ]
    return [chunk for chunk in (*step.chunks, *left) if not is_users_mistake(errors.get(chunk.request.request_id, NOTHING_LEFT))]


def forget_failed(failed: Chunk, in_flight: Iterable[StepInFlight], manager: KVCacheManager) -> list[Request]:
    """Forget the content that a failed prefill computed, and what later prefills computed from it. → those of their requests that run, or
    that were preempted and wait for steps in flight
    """
    keys = manager.uncache(failed.request, failed.prefill_start, failed.end, failed.prefill_step)
    misled: list[Request] = []
    for chunk in [chunk for later in in_flight for chunk in later.chunks]:
        request = chunk.request
        if request is not failed.request and manager.has_prefix(request, chunk.prefill_start, keys):
            keys |= manager.uncache(request, chunk.prefill_start, chunk.end, chunk.prefill_step)
            is_preempted = request.status is RequestStatus.WAITING and request.num_pending_steps > 0
            if (
                request.status is RequestStatus.RUNNING or is_preempted
            ) and request.num_preemptions - is_preempted == chunk.num_preemptions:
                misled.append(request)
    return list(dict.fromkeys(misled))


def kept_from_running(request_id: str, num_pinned: int) -> RequestOutput:
    """The output of a request that cannot run, because transfers that do not end keep so many blocks."""
    return failed_output(request_id, f"{num_pinned} blocks of the KV cache are kept by transfers that do not end.")
