"""Which decodes take part in a step where the model runs in stages: each stage computes another step, so steps are of other sequences."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight

_NONE: frozenset[int] = frozenset()


class MicroBatches:
    """Divides the decodes over as many steps in flight as there are stages. With one stage, each step has all.

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
