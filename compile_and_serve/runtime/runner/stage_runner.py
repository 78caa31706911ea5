"""`StageRunner`: runs the steps of a stage before the last one. It samples nothing, and takes the tokens that the last stage samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.collectives.collectives import Transfer
from compile_and_serve.custom_ops.platform import Event
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.sampling.decode_step import begin_step
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput


class ComputedStage(PendingStep):
    """A launched step of a stage that answers nothing; `result` waits for it."""

    def __init__(self, step: int, event: Event | None) -> None:
        self.step = step
        self._event = event

    def result(self) -> ModelRunnerOutput:
        """Wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return ModelRunnerOutput(step=self.step, sampled_token_ids={}, logprobs={}, prompt_logprobs={}, errors={})


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Tokens that the last stage samples. slots_S: of their sequences, on the host and on the device."""

    transfer: Transfer
    slots_S: np.ndarray
    device_slots_S: torch.Tensor


class StageRunner(ModelRunner):
    """Runs the steps of a stage whose outputs the next stage reads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.stages is not None
        self._sampled_S = torch.zeros(self.batch.max_sampled, dtype=torch.int64, device=self.device)
        self._arriving: _Arriving | None = None

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        batch, stages = self.batch, self.stages
        assert stages is not None
        self._take_tokens()
        for request_id in scheduled.finished_request_ids:
            batch.remove(request_id)
        batch.settle()
        for data in scheduled.new_requests:
            batch.add(data)
        for cached in scheduled.cached_requests:
            batch.append_blocks(cached.request_id, cached.new_block_ids)
        layout, buffers, tokens = batch.prepare(scheduled)
        assert tokens is not None, "a stage that samples nothing does not advance by itself"
        result = self._run(layout, buffers, tokens)
        self.captures_due += result.is_capture_due
        if count := len(layout.sampled_ids):
            transfer = stages.start_receiving_tokens(self._sampled_S[:count])
            self._arriving = _Arriving(transfer, layout.sampled_slots, buffers.device["sampled_slots"][:count])
        return ComputedStage(scheduled.step, self.platform.record_event())

    def compile_output_kernels(self, dtype: torch.dtype) -> None:
        if self.platform.runs_triton_kernels:
            begin_step(self.decode_step(1))

    def _take_tokens(self) -> None:
        """Wait for the tokens of the step before, where the last stage sampled any, and keep each for its sequence's next step."""
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        arriving.transfer.wait()
        if self._shares_memory:
            self.batch.host_last_tokens[arriving.slots_S] = arriving.transfer.tensor.numpy()
        else:
            self.batch.last_tokens.index_copy_(0, arriving.device_slots_S, arriving.transfer.tensor)
