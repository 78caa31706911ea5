"""What takes part in a step where the model runs in stages.

Each stage computes another step, so steps are of other sequences. All stages wait for the one with the longest step, so steps should take
about as long: prompts are spread over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight

SPREAD_STEPS = 8  # over which the prompt tokens at hand are spread,
MIN_PROMPT_TOKENS = 512  # as long as each gets so many,
MAX_PROMPT_TOKENS = 2048  # and none more, with which a GPU computes as fast as with more.

_NONE: frozenset[int] = frozenset()


class MicroBatches:
    """Divides the decodes over as many steps in flight as there are stages, and spreads prompts. With one stage, each step has all.

    A decode waits for its last token on the device, which a step behind the last stage's is at hand where steps run ahead. Elsewhere, and
    with drafts, it waits for the result.
    """

    def __init__(self, num_stages: int, *, runs_ahead: bool) -> None:
        self._num_stages, self._runs_ahead = num_stages, runs_ahead

    def left_out(self, running: Sequence[Request], in_flight: Sequence[StepInFlight]) -> frozenset[int]:
        """The decodes that the next step has to leave out, by `id`."""
        if self._num_stages == 1:
            return _NONE
        decodes = [request for request in running if request.num_computed_tokens >= request.prefill_end]
        # With fewer decodes than stages, each is a step of its own.
        apart = min(self._num_stages, len(decodes)) - 1 if self._runs_ahead else len(in_flight)
        recent = list(in_flight)[len(in_flight) - apart :] if apart else []
        busy = {id(request) for step in recent for request in step.sampling()}
        free = [id(request) for request in decodes if id(request) not in busy]
        return frozenset(busy.union(free[-(-len(decodes) // self._num_stages) :]))

    def prompt_budget(
        self, budget: int, prefilling: Sequence[Request], waiting: Sequence[tuple[tuple[float, ...], Request]] | None, num_free: int
    ) -> int:
        """How many prompt tokens the next step may have. budget: tokens that it has left. prefilling: requests whose prompts are under way.
        waiting: heap of those that may start in `num_free` batch slots; None: they are in several queues, and as many as there may be.
        """
        if self._num_stages == 1 or budget <= MIN_PROMPT_TOKENS:
            return budget
        enough = SPREAD_STEPS * MAX_PROMPT_TOKENS
        at_hand = enough if waiting is None and num_free else 0
        at_hand += sum(request.prefill_end - request.num_computed_tokens for request in prefilling)
        # The first entries of a heap are about those that come next.
        for _, request in islice(waiting or (), num_free):
            if at_hand >= enough:
                break
            at_hand += len(request.token_ids)
        return min(budget, max(MIN_PROMPT_TOKENS, min(MAX_PROMPT_TOKENS, at_hand // SPREAD_STEPS)))
