"""`StageRunner`: runs the steps of a stage before the last one. It samples nothing, and takes the tokens that the last stage samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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


@dataclass(slots=True)
class Arriving:
    """Tokens that the last stage samples. slots_S: of their sequences, on the host and on the device. transfer: None until it has begun."""

    tokens_S: torch.Tensor
    slots_S: np.ndarray
    device_slots_S: torch.Tensor
    transfer: Transfer | None = None


class ArrivingTokens:
    """The tokens that a stage expects of the last one, in the order of steps."""

    def __init__(self, stages: StageLink, *, max_steps: int, max_sampled: int, device: torch.device, begins_at_once: bool) -> None:
        """max_steps, max_sampled: whose tokens may be on their way, of a step. begins_at_once: receives cost nothing while they wait.

        On CUDA a receive that has begun takes a multiprocessor until the tokens come, which products of other steps want meanwhile. It
        begins with the last step before the one that the tokens are for.
        """
        self._stages, self._begins_at_once = stages, begins_at_once
        self._buffers = [torch.zeros(max_sampled, dtype=torch.int64, device=device) for _ in range(max_steps)]
        self._num_expected = 0
        self._queue: deque[Arriving] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the oldest have to be taken before others can be expected."""
        return len(self._queue) == len(self._buffers)

    def expect(self, slots_S: np.ndarray, device_slots_S: torch.Tensor) -> None:
        """The step that was launched samples a token for each of these sequences."""
        assert not self.is_full
        num_due = len(self._queue) + 1 - self._stages.num_steps_behind
        for one in list(self._queue)[: max(0, num_due)]:
            self._begin(one)
        tokens_S = self._buffers[self._num_expected % len(self._buffers)][: len(slots_S)]
        self._num_expected += 1
        self._queue.append(Arriving(tokens_S, slots_S, device_slots_S))
        if self._begins_at_once:
            self._begin(self._queue[-1])

    def take(self, slots: Collection[int] | None = None) -> Iterator[Arriving]:
        """Those that sequences in these slots need, and all before them, once they are there. slots: None is all."""
        wanted = None if slots is None else set(slots)
        needed = [number for number, one in enumerate(self._queue, 1) if wanted is None or not wanted.isdisjoint(one.slots_S.tolist())]
        for _ in range(max(needed, default=0)):
            yield self.take_oldest()

    def take_oldest(self) -> Arriving:
        """Those of the oldest step, once they are there: on CUDA, for what follows on the stream."""
        arriving = self._queue.popleft()
        self._begin(arriving).wait()
        return arriving

    def _begin(self, arriving: Arriving) -> Transfer:
        if arriving.transfer is None:
            arriving.transfer = self._stages.start_receiving_back(arriving.tokens_S)
        return arriving.transfer


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
        self._arriving = ArrivingTokens(
            self.stages,
            max_steps=self._config.max_steps_in_flight + 1,
            max_sampled=self.batch.max_sampled,
            device=self.device,
            begins_at_once=self._shares_memory,
        )
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
            self._keep(*self._arriving.take(self._awaited_slots))
        if scheduled.last_tokens:
            self._go_on_from(scheduled.last_tokens, scheduled.drafts)
        layout, buffers, tokens = batch.prepare(scheduled)
        assert tokens is not None, "a stage that samples nothing does not advance by itself"
        result = self._run(layout, buffers, tokens)
        self.captures_due += result.is_capture_due
        if (count := len(layout.sampled_ids)) and not layout.has_drafts:
            self._expect_tokens(layout, buffers, count)
        return ComputedStage(scheduled.step, self.platform.record_event())

    def compile_output_kernels(self, dtype: torch.dtype) -> None:
        if self.platform.runs_triton_kernels:
            begin_step(self.decode_step(1))

    def _new_drafter(self, setup: DraftSetup) -> DeviceDrafts:
        assert self.stages is not None
        return ReceivedDrafts(setup, self.stages)

    def _expect_tokens(self, layout: BatchLayout, buffers: StepBuffers, count: int) -> None:
        if self._arriving.is_full:
            self._keep(self._arriving.take_oldest())
        slots_S = layout.sampled_slots
        device_slots_S = torch.from_numpy(slots_S) if self._shares_memory else buffers.device["sampled_slots"][:count].clone()
        self._arriving.expect(slots_S, device_slots_S)

    def _keep(self, *arrived: Arriving) -> None:
        """Keep each token for its sequence's next step."""
        for one in arrived:
            if self._shares_memory:
                self.batch.host_last_tokens[one.slots_S] = one.tokens_S.numpy()
            else:
                self.batch.last_tokens.index_copy_(0, one.device_slots_S, one.tokens_S)

    def _go_on_from(self, last_tokens: Mapping[str, tuple[int, int]], drafts: Mapping[str, Sequence[int]]) -> None:
        """Go on from the tokens that were accepted of a step with drafts. last_tokens, drafts: of `SchedulerOutput`."""
        batch = self.batch
        slots = [batch.slot_of(request_id) for request_id in last_tokens]
        self._puts_drafts = bool(drafts) and self.drafter is not None
        if self._puts_drafts:
            assert self.drafter is not None
            self._keep(*self._arriving.take())  # they come before the drafts
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
        self._keep(*self._arriving.take(self._awaited_slots))  # only now: what the host gives the step has been copied meanwhile
        super()._fill_from_device(step, layout, buffers)
        if layout.has_drafts and self._puts_drafts:
            assert self.drafter is not None
            self.drafter.put_drafts(step, layout)

    _puts_drafts = False  # the step's drafts are those that the last stage made
