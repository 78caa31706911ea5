"""Models that compute long sequences in another way than short ones (`LengthRegimes`): the keys of their prefixes, and the switch.

Sequences of one regime share cached prefixes with each other only. Where a sequence that outgrows the short regime must be computed again,
no step computes a token behind the limit before that: it is preempted there, and resumes in the long regime.
"""

from __future__ import annotations

from collections.abc import Iterable

from compile_and_serve.custom_ops.step_data import ROPE_LENGTH_DATUM, LengthRegimes
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight


def begin(regimes: LengthRegimes | None, request: Request) -> None:
    """Give a new request the regime of its prompt."""
    if regimes is None:
        return
    length = regimes.length_of(request.num_prompt_tokens)
    if length:
        _enter(request, length)
    elif regimes.recompute:
        request.decode_end = min(request.decode_end, regimes.limit)


def outgrown(regimes: LengthRegimes | None, step: StepInFlight) -> Iterable[Request]:
    """The requests of an updated step that have just left the short regime and must be computed again; they have entered the long one."""
    if regimes is None or not regimes.recompute:
        return ()
    found = []
    for request in (*step.decodes, *(chunk.request for chunk in step.chunks if chunk.samples)):
        is_short = ROPE_LENGTH_DATUM not in request.step_data
        if is_short and len(request.token_ids) > regimes.limit and request.status is not RequestStatus.FINISHED:
            _enter(request, regimes.length_of(len(request.token_ids)))
            request.decode_end = request.max_total_tokens - 1
            found.append(request)
    return found


def _enter(request: Request, length: int) -> None:
    request.prompt = request.prompt.of_length(length)
    request.keys = request.prompt.keys
    request.step_data = request.step_data | {ROPE_LENGTH_DATUM: length}
