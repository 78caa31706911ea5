"""A step that was launched: what the host will make of it once the device is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.runner.input_batch import PromptRows
from compile_and_serve.runtime.sampling.logprobs import RowLogprobs
from compile_and_serve.runtime.sampling.sampler import SamplingPlan
from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT, ModelRunnerOutput

NOT_FINITE = "The model computed logits that are not finite (NaN or infinity) for this request."


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    rows: PromptRows
    logprobs: RowLogprobs


class PendingStep:
    """A launched step; `result` waits for it and may be called once."""

    __slots__ = ("_best", "_errors", "_event", "_logprobs", "_plan", "_prompts", "_sampled_ids", "_tokens", "step")

    def __init__(
        self,
        step: int,
        sampled_ids: list[str],
        tokens: np.ndarray,
        best: np.ndarray,
        plan: SamplingPlan | None,
        logprobs: RowLogprobs | None,
        prompts: list[PromptResult],
        event: torch.cuda.Event | None,
        errors: dict[str, str],
    ) -> None:
        self.step = step
        self._errors = errors
        self._sampled_ids = sampled_ids
        self._tokens = tokens
        self._best = best
        self._plan = plan
        self._logprobs = logprobs
        self._prompts = prompts
        self._event = event

    def result(self) -> ModelRunnerOutput:
        """Wait for the device; what the step sampled."""
        if self._event is not None:
            self._event.synchronize()
        output = ModelRunnerOutput(
            step=self.step,
            sampled_token_ids=dict(zip(self._sampled_ids, self._tokens[:, None].tolist(), strict=True)),
            logprobs={},
            prompt_logprobs={},
            errors=self._errors,
        )
        if self._logprobs is not None:
            assert self._plan is not None
            messages = self._logprobs.to_messages(self._plan.logprob_counts)
            output.logprobs = {
                self._sampled_ids[row]: [message]
                for row, message in zip(self._plan.logprob_rows, messages, strict=True)
            }
        for prompt in self._prompts:
            output.prompt_logprobs[prompt.rows.request_id] = _prompt_messages(prompt)
        finite = np.isfinite(self._best)
        if not finite.all():
            self._report_errors(output, np.flatnonzero(~finite))
        for request_id in self._errors:
            output.sampled_token_ids.pop(request_id, None)
            output.logprobs.pop(request_id, None)
        return output

    def _report_errors(self, output: ModelRunnerOutput, rows: np.ndarray) -> None:
        for row in rows:
            request_id = self._sampled_ids[row]
            output.errors[request_id] = NOTHING_LEFT if self._best[row] == -np.inf else NOT_FINITE
            output.sampled_token_ids.pop(request_id)
            output.logprobs.pop(request_id, None)


def _prompt_messages(prompt: PromptResult) -> list[TokenLogprobs]:
    counts: Sequence[int] = [prompt.rows.count] * len(prompt.rows.targets)
    return prompt.logprobs.to_messages(list(counts))
