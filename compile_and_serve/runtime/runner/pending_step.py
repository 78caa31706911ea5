"""A step that was launched: what the host will make of it once the device is done."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import msgspec
import numpy as np
import torch

from compile_and_serve.custom_ops.platforms.protocol import Event, TimedEvent
from compile_and_serve.runtime.connector.messages import FinishedTransfers
from compile_and_serve.runtime.drafting.acceptance import accepted_tokens, chances_of
from compile_and_serve.runtime.ledger.records import StepRan
from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.runner.base_batch import BatchLayout, PromptRows
from compile_and_serve.runtime.sampling.logprobs import RowLogprobs
from compile_and_serve.runtime.sampling.sampler import SamplingPlan
from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT, ModelRunnerOutput
from compile_and_serve.runtime.structured.masks import GrammarSequence

NOT_FINITE = "The model computed logits that are not finite (NaN or infinity) for this request."


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """attention: float32 [rows, A, R] of `TokenLogprobs`; None: nobody asks."""

    rows: PromptRows
    logprobs: RowLogprobs
    attention: torch.Tensor | None = None


class PendingStep:
    """A launched step; `result` waits for it and may be called once. The attributes of the class are what the result reports."""

    expert_tokens: Sequence[list[int]] = ()
    transfers: FinishedTransfers | None = None
    mask_seconds: Mapping[str, float] = MappingProxyType({})
    ran = StepRan()
    encoding: tuple[TimedEvent, TimedEvent] | None = None  # before and after what was encoded
    checksums: Sequence[int] = ()
    wrong_tables: Mapping[str, str] = MappingProxyType({})
    differences: Sequence[float] = ()

    def __init__(
        self,
        step: int,
        layout: BatchLayout,
        tokens: np.ndarray,
        best: np.ndarray,
        plan: SamplingPlan | None,
        logprobs: RowLogprobs | None,
        prompts: list[PromptResult],
        event: Event | None,
        errors: dict[str, str],
        acceptance_rate: float | None = None,
        drafts: np.ndarray | None = None,
    ) -> None:
        """tokens: int64, best: float32, one element a sampled row. acceptance_rate: accept guesses by chance
        (`SpeculativeConfig.synthetic_acceptance_rate`). drafts: int64 [R, K] by batch slot, complete once the step is over; None: the
        layout has them already.
        """
        self.step = step
        self._layout = layout
        self._sampled_drafts = layout.sampled_drafts  # the layout may be another step's by the time of the result
        self._errors = errors
        self._tokens = tokens
        self._best = best
        self._plan = plan
        self._logprobs = logprobs
        self._prompts = prompts
        self._event = event
        self._acceptance_rate = acceptance_rate
        self._drafts = drafts
        self._missing_drafts: dict[str, int] = {}
        self._grammars: list[tuple[int, GrammarSequence]] = []
        self._lock = threading.Lock()  # of _grammars: a thread may take the result while the next step is launched

    def follow_with(self, grammars: list[tuple[int, GrammarSequence]]) -> None:
        """Let grammars follow the step's tokens. Each comes with its sequence's number among those that sample."""
        self._grammars = grammars

    def advance_grammars(self) -> None:
        """Wait for the step's tokens and let its grammars follow them, unless they have."""
        with self._lock:
            if not self._grammars:
                return
            if self._event is not None:
                self._event.synchronize()
            accepted, _ = self._accepted
            grammars, self._grammars = self._grammars, []
            for index, grammar in grammars:
                grammar.advance(accepted[index])

    def wait_for_tokens(self) -> dict[str, list[int]]:
        """Wait for the device; request → the tokens that it gained."""
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._layout.sampled_ids, self._accepted[0], strict=True))

    def result(self) -> ModelRunnerOutput:
        """Wait for the device; what the step sampled."""
        if self._event is not None:
            self._event.synchronize()
        self.advance_grammars()
        accepted, first_rows = self._accepted
        if self.encoding is not None:
            before, after = self.encoding
            after.synchronize()
            self.ran = msgspec.structs.replace(self.ran, encode=after.seconds_since(before))
        ids = self._layout.sampled_ids
        output = ModelRunnerOutput(
            step=self.step,
            sampled_token_ids=dict(zip(ids, accepted, strict=True)),
            logprobs={},
            prompt_logprobs={},
            errors=self._errors,
            expert_tokens=list(self.expert_tokens),
            missing_drafts=self._missing_drafts,
            transfers=self.transfers,
            mask_seconds=dict(self.mask_seconds),
            ran=self.ran,
            checksums=list(self.checksums),
            wrong_tables=dict(self.wrong_tables),
            differences=list(self.differences),
        )
        if self._logprobs is not None:
            assert self._plan is not None
            messages = self._logprobs.to_messages(self._plan.logprob_counts, self._plan.num_logprob_others)
            by_row = dict(zip(self._plan.logprob_rows, messages, strict=True))
            for request_id, tokens, first in zip(ids, accepted, first_rows, strict=True):
                if first in by_row:
                    output.logprobs[request_id] = [by_row[first + i] for i in range(len(tokens))]
        for prompt in self._prompts:
            output.prompt_logprobs[prompt.rows.request_id] = _prompt_messages(prompt)
        finite = np.isfinite(self._best)
        if not finite.all():
            for request_id, tokens, first in zip(ids, accepted, first_rows, strict=True):
                wrong = np.flatnonzero(~finite[first : first + len(tokens)])
                if len(wrong):
                    output.errors[request_id] = NOTHING_LEFT if self._best[first + wrong[0]] == -np.inf else NOT_FINITE
        for request_id in output.errors:
            output.sampled_token_ids.pop(request_id, None)
            output.logprobs.pop(request_id, None)
        return output

    @cached_property
    def _accepted(self) -> tuple[list[list[int]], Sequence[int]]:
        """The tokens of each sequence, and its first row."""
        counts = self._layout.sampled_counts
        if not counts:
            return self._tokens[:, None].tolist(), range(len(self._tokens))
        if self._drafts is not None:
            rows = zip(self._layout.sampled_ids, self._layout.sampled_slots, self._sampled_drafts, strict=True)
            for request_id, slot, draft in rows:
                is_wanted = draft >= 0
                np.copyto(draft, self._drafts[slot, : len(draft)], where=is_wanted)
                if missing := int((draft[is_wanted] < 0).sum()):
                    self._missing_drafts[request_id] = missing
        chances = None
        if self._acceptance_rate is not None:
            chances = chances_of(self.step, len(self._tokens))
        accepted = accepted_tokens(self._tokens, counts, self._sampled_drafts, chances, self._acceptance_rate or 0.0)
        return accepted, np.cumsum([0, *counts[:-1]]).tolist()


class StepWithoutTokens(PendingStep):
    """A step that only transfers."""

    def __init__(self, step: int) -> None:
        self.step = step

    def result(self) -> ModelRunnerOutput:
        """What has been transferred."""
        return ModelRunnerOutput(step=self.step, sampled_token_ids={}, logprobs={}, prompt_logprobs={}, errors={}, transfers=self.transfers)


def _prompt_messages(prompt: PromptResult) -> list[TokenLogprobs]:
    counts: Sequence[int] = [prompt.rows.count] * len(prompt.rows.targets)
    messages = prompt.logprobs.to_messages(list(counts))
    for message, weights_AR in zip(messages, prompt.attention.numpy() if prompt.attention is not None else (), strict=False):
        message.attention = weights_AR.tobytes()
    return messages
