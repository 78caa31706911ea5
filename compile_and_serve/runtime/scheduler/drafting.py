"""Drafts of a `Speculator` in a scheduler's steps: when they may be made, which decodes get them, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.scheduler.admission import Admission
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput
from compile_and_serve.runtime.scheduler.steps_in_flight import StepInFlight


class Drafting:
    """Connects a scheduler to its speculator."""

    def __init__(self, speculator: Speculator, *, runs_ahead: bool, in_stages: bool = False) -> None:
        """runs_ahead: the runner can go on from drafts whose outcome is not known here. in_stages: steps in flight have other sequences."""
        self._speculator, self._runs_ahead, self._in_stages = speculator, runs_ahead, in_stages
        self._to_correct: dict[str, Request] = {}  # of a step with drafts: the runner must be told their true lengths
        self.missed = ""  # why the decodes of the step that is being scheduled have no drafts: of `MISSES["draft"]`
        self._is_off = False  # as `is_off` said of the last step

    def drafts(
        self,
        step: StepInFlight,
        running: Sequence[Request],
        in_flight: Sequence[StepInFlight],
        admission: Admission,
        left_out: frozenset[int] = frozenset(),
    ) -> dict[str, list[int]] | None:
        """Drafts of the decodes, as many as the step has room for. None: the step must wait for the tokens of the steps in flight.
        A step that runs ahead admits no request, so it must not be one in which a request may start. left_out: those that the step
        leaves out, by `id`.

        Sets `step.was_drafting` and `step.is_ahead`.
        """
        self.missed = ""
        if self._in_stages:
            running, in_flight = [request for request in running if id(request) not in left_out], ()
        before = in_flight[-1] if in_flight else None
        decodes = [one for one in running if one.num_computed_tokens >= one.prefill_end and id(one) not in left_out]
        if before is not None and before.drafts:  # how many of them were accepted is not known
            step.is_ahead = self._can_run_ahead(running, decodes, before) and not admission.may_admit(len(running))
            if not step.is_ahead:
                return None
        can_draft = any(request.can_draft for request in decodes)
        step.was_drafting = can_draft and self._speculator.is_on(len(decodes))
        if not step.was_drafting:
            if decodes:
                is_structured = any(request.sampling_params.speculate for request in decodes)
                self.missed = "batch" if can_draft else "structured" if is_structured else "request"
            return None if step.is_ahead else {}
        if in_flight and not step.is_ahead:
            return None
        if self._is_off and self._speculator.drafts_on_device:
            return {}  # the drafter goes on from what it computes after this step
        sequences = {
            request.request_id: (request.token_ids, request.decode_end - request.num_computed_tokens - 1)
            for request in decodes
            if request.can_draft and request.decode_end > request.num_computed_tokens + 1
        }
        drafts = self._speculator.drafts(sequences, len(decodes))
        if step.is_ahead and not drafts:
            return None
        if sequences and not drafts:
            self.missed = "none_found"
        for request in decodes:
            if request.draft_ends and (draft := drafts.get(request.request_id)):
                end = next((i for i, token in enumerate(draft) if token in request.draft_ends), len(draft))
                del draft[end:]
        return drafts

    def _can_run_ahead(self, running: Sequence[Request], decodes: Sequence[Request], before: StepInFlight) -> bool:
        """Whether the runner can go on from the drafts of the step before on its own: see `SchedulerOutput.is_ahead`."""
        if not self._runs_ahead or before.chunks or len(decodes) < len(running):
            return False
        known = set(map(id, before.decodes))
        return all(id(request) in known and not request.changes_logits for request in decodes)

    def is_off(self, step: StepInFlight) -> bool:
        """Whether the step after this one will have no drafts. Call it once the step is complete."""
        self._is_off = not step.was_drafting and not step.chunks
        return self._is_off

    def last_tokens(self, step: StepInFlight) -> dict[str, tuple[int, int]]:
        """`SchedulerOutput.last_tokens`. Requests that this step does not run are told later."""
        if not (step.drafts or self._to_correct):
            return {}
        told = step.decodes if step.drafts else [one for one in step.decodes if one.request_id in self._to_correct]
        for request in step.decodes:
            self._to_correct.pop(request.request_id, None)
        if step.drafts:
            sampling = [chunk.request for chunk in step.chunks if chunk.samples]
            self._to_correct |= {request.request_id: request for request in (*step.decodes, *sampling)}
        return {request.request_id: (len(request.token_ids), request.token_ids[-1]) for request in told}

    def observe(self, step: StepInFlight, result: ModelRunnerOutput, seconds: float) -> None:
        """Learn from a step's result. seconds: its duration."""
        sampled, speculator = result.sampled_token_ids, self._speculator
        if step.drafts:
            unfinished = [one.request_id for one in step.decodes if one.status is not RequestStatus.FINISHED]
            accepted = {name: len(sampled[name]) - 1 for name in unfinished if name in step.drafts}
            speculator.observe(step.drafts, accepted, result.missing_drafts)
        if not step.chunks:
            num_drafts = sum(map(len, step.drafts.values()))
            num_tokens = sum(map(len, sampled.values()))
            speculator.record_step(len(step.decodes), num_drafts, num_tokens, seconds, was_on=step.was_drafting)

    def drop_correction(self, request: Request) -> None:
        """The runner need not be told the request's length."""
        self._to_correct.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self.drop_correction(request)
        self._speculator.forget(request.request_id, request.token_ids[request.num_prompt_tokens :])

    def add_to(self, stats: EngineStats) -> None:
        """Fill the fields of speculative decoding."""
        speculator = self._speculator
        stats.spec_decode_num_drafts = speculator.num_drafts
        stats.spec_decode_num_draft_tokens = speculator.num_draft_tokens
        stats.spec_decode_num_accepted_tokens = speculator.num_accepted
        stats.spec_decode_num_accepted_tokens_per_pos = speculator.accepted_at.copy()
