"""`StageRunner`: runs the steps of a stage before the last one. It samples nothing, and takes the tokens that the last stage samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.collectives.collectives import Transfer
from compile_and_serve.custom_ops.platforms.protocol import Event
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts, DraftSetup, TargetStep
from compile_and_serve.runtime.runner.base_batch import BatchLayout
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.runner.stages import StageLink
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
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


class ReceivedDrafts(DeviceDrafts):
    """The drafts that the last stage makes."""

    def __init__(self, setup: DraftSetup, stages: StageLink) -> None:
        super().__init__(setup)
        self._stages = stages

    def follow(self, target: TargetStep, *, keeps_state_only: bool = False) -> None: ...

    def _make_drafts(self, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None: ...

    def propose(self, last_tokens: Mapping[str, tuple[int, int]], wanted: Mapping[str, Sequence[int]], *, is_ahead: bool = False) -> None:
        """Wait for the drafts of the step."""
        assert not is_ahead
        self._stages.start_receiving_back(self.drafts).wait()


class StageRunner(ModelRunner):
    """Runs the steps of a stage whose outputs the next stage reads."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.stages is not None
        # A buffer for each step whose tokens may be on their way.
        count = self._config.max_steps_in_flight + 1
        self._sampled = [torch.zeros(self.batch.max_sampled, dtype=torch.int64, device=self.device) for _ in range(count)]
        self._num_receives = 0
        self._arriving: deque[_Arriving] = deque()
        self._awaited_slots: list[int] = []  # of the step's sequences

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        batch, stages = self.batch, self.stages
        assert stages is not None
        for request_id in scheduled.finished_request_ids:
            batch.remove(request_id)
        batch.settle()
        for data in scheduled.new_requests:
            batch.add(data)
        for cached in scheduled.cached_requests:
            batch.append_blocks(cached.request_id, cached.new_block_ids)
        self._awaited_slots = [batch.slot_of(request_id) for request_id in scheduled.num_scheduled_tokens]
        if self._shares_memory or scheduled.last_tokens:
            self._take_tokens()
        if scheduled.last_tokens:
            self._go_on_from(scheduled.last_tokens, scheduled.drafts)
        layout, buffers, tokens = batch.prepare(scheduled)
        assert tokens is not None, "a stage that samples nothing does not advance by itself"
        result = self._run(layout, buffers, tokens)
        self.captures_due += result.is_capture_due
        if (count := len(layout.sampled_ids)) and not layout.has_drafts:
            self._receive_tokens(layout, buffers, count)
        return ComputedStage(scheduled.step, self.platform.record_event())

    def compile_output_kernels(self, dtype: torch.dtype) -> None:
        if self.platform.runs_triton_kernels:
            begin_step(self.decode_step(1))

    def _new_drafter(self, setup: DraftSetup) -> DeviceDrafts:
        assert self.stages is not None
        return ReceivedDrafts(setup, self.stages)

    def _receive_tokens(self, layout: BatchLayout, buffers: StepBuffers, count: int) -> None:
        assert self.stages is not None
        if len(self._arriving) == len(self._sampled):
            self._take_oldest()
        tokens_S = self._sampled[self._num_receives % len(self._sampled)][:count]
        self._num_receives += 1
        slots_S = layout.sampled_slots
        device_slots_S = torch.from_numpy(slots_S) if self._shares_memory else buffers.device["sampled_slots"][:count].clone()
        self._arriving.append(_Arriving(self.stages.start_receiving_back(tokens_S), slots_S, device_slots_S))

    def _take_tokens(self) -> None:
        """Wait for the tokens of earlier steps that the step's sequences need, and for those before them."""
        slots = set(self._awaited_slots)
        needed = [number for number, one in enumerate(self._arriving, 1) if not slots.isdisjoint(one.slots_S.tolist())]
        for _ in range(max(needed, default=0)):
            self._take_oldest()

    def _take_oldest(self) -> None:
        """Keep each arriving token for its sequence's next step."""
        arriving = self._arriving.popleft()
        arriving.transfer.wait()
        if self._shares_memory:
            self.batch.host_last_tokens[arriving.slots_S] = arriving.transfer.tensor.numpy()
        else:
            self.batch.last_tokens.index_copy_(0, arriving.device_slots_S, arriving.transfer.tensor)

    def _go_on_from(self, last_tokens: Mapping[str, tuple[int, int]], drafts: Mapping[str, Sequence[int]]) -> None:
        """Go on from the tokens that were accepted of a step with drafts. last_tokens, drafts: of `SchedulerOutput`."""
        batch = self.batch
        slots = [batch.slot_of(request_id) for request_id in last_tokens]
        self._puts_drafts = bool(drafts) and self.drafter is not None
        if self._puts_drafts:
            assert self.drafter is not None
            self.drafter.propose(last_tokens, drafts)
            drafts = {name: [0] * len(draft) for name, draft in drafts.items()}
        for (request_id, (num_tokens, token)), slot in zip(last_tokens.items(), slots, strict=True):
            batch.correct(slot, num_tokens, token, drafts.get(request_id, ()))
        if drafts:
            return  # the step's inputs come from the host, and the next step is told the last tokens again
        tokens = np.array([token for _, token in last_tokens.values()], dtype=np.int64)
        if self._shares_memory:
            batch.host_last_tokens[slots] = tokens
        else:
            upload = self.platform.upload
            batch.last_tokens.index_copy_(0, upload(np.array(slots, dtype=np.int64)), upload(tokens))

    def _fill_from_device(self, step: Step, layout: BatchLayout, buffers: StepBuffers) -> None:
        self._take_tokens()  # only now: what the host gives the step has been copied meanwhile
        super()._fill_from_device(step, layout, buffers)
        if layout.has_drafts and self._puts_drafts:
            assert self.drafter is not None
            self.drafter.put_drafts(step, layout)

    _puts_drafts = False  # the step's drafts are those that the last stage made
