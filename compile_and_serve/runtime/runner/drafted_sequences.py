"""`DraftedSequences`: brings sequences to where their accepted drafts end, and gets their next drafts, before a step is laid out.

A step may run ahead: which drafts the step before accepted is then known on the device alone. Where graphs cannot compute such a step, the
host waits for the tokens of the step before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import StepInput
from compile_and_serve.runtime.drafting.acceptance import chances_of
from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts
from compile_and_serve.runtime.runner.input_batch import BatchLayout, InputBatch
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from compile_and_serve.runtime.sampling.decode_step import ACCEPT, REJECT, advances_on_device
from compile_and_serve.runtime.sampling.sampler import Sampler
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput


class DraftedSequences:
    """For each step call `take_in`, then `laid_out` and `launched` if it has drafts.

    runs_ahead: the host does not know what the step before gained. are_on_device: only the device knows the step's drafts.
    """

    def __init__(
        self,
        batch: InputBatch,
        sampler: Sampler,
        inputs: Sequence[StepInput],
        drafter: DeviceDrafts | None,
        graphs: CudaGraphRunner | None,
        query_len: int,
        acceptance_rate: float | None,
        device: torch.device,
    ) -> None:
        """inputs: of the model. drafter: on the device; None: the scheduler drafts. graphs: of steps whose sequences have `query_len`
        tokens each. acceptance_rate: of `SpeculativeConfig`.
        """
        self.runs_ahead = self.are_on_device = False
        self._batch, self._sampler, self._drafter, self._graphs = batch, sampler, drafter, graphs
        self._query_len, self._acceptance_rate = query_len, acceptance_rate
        self._advances_on_device = advances_on_device(inputs)
        self._platform = platform_of(device)
        self._drafts: dict[int, np.ndarray] = {}  # slot → its last drafts, while it is not known which were accepted
        self._last_step: PendingStep | None = None  # with drafts
        self._new_tokens_are_valid = False  # it ran in a graph that filled `batch.num_new_tokens`

    def forget(self, slot: int) -> None:
        """The slot's request is gone."""
        self._drafts.pop(slot, None)

    def take_in(self, scheduled: SchedulerOutput, grammar_slots: Collection[int]) -> None:
        """Go on from the tokens that were accepted. grammar_slots: of requests with structured output."""
        self.runs_ahead = scheduled.is_ahead and self._can_run_ahead(scheduled)
        last_tokens: Mapping[str, tuple[int, int]] = scheduled.last_tokens
        if scheduled.is_ahead and not self.runs_ahead:
            assert self._last_step is not None
            new_tokens = self._last_step.wait_for_tokens()
            last_tokens = {name: (count + len(new_tokens[name]), new_tokens[name][-1]) for name, (count, _) in last_tokens.items()}
        if last_tokens:
            self._go_on_from(last_tokens, scheduled.drafts, grammar_slots)

    def laid_out(self, step: int, layout: BatchLayout, buffers: StepBuffers) -> None:
        """A step with drafts lies in `buffers`. step: its number."""
        self._drafts |= dict(zip(layout.sampled_slots.tolist(), layout.sampled_drafts, strict=True))
        if self._acceptance_rate is not None:
            chances = chances_of(step, sum(layout.sampled_counts))
            buffers.host["verdicts"][: len(chances)] = np.where(chances < self._acceptance_rate, ACCEPT, REJECT)

    def launched(self, pending: PendingStep, *, sampled_in_graph: bool) -> None:
        """A step with drafts was launched. sampled_in_graph: and its tokens were sampled by the graph that ran the model."""
        self._last_step = pending
        self._new_tokens_are_valid = sampled_in_graph and self._drafter is not None

    def _can_run_ahead(self, scheduled: SchedulerOutput) -> bool:
        """Whether graphs can compute the step without the host knowing what the step before gained."""
        graphs, drafter, q, num_seqs = self._graphs, self._drafter, self._query_len, len(scheduled.last_tokens)
        if not (
            scheduled.drafts
            and self._new_tokens_are_valid
            and self._advances_on_device
            and self._batch.can_run_ahead(scheduled.last_tokens)
        ):
            return False
        assert graphs is not None
        assert drafter is not None
        size = graphs.padded_size(num_seqs * q, num_seqs, q)
        return (
            size is not None and graphs.captured_graph(num_seqs) is not None and drafter.can_run_ahead(len(scheduled.drafts), size // q, q)
        )

    def _go_on_from(
        self, last_tokens: Mapping[str, tuple[int, int]], new_drafts: Mapping[str, list[int]], grammar_slots: Collection[int]
    ) -> None:
        """last_tokens, new_drafts: of `SchedulerOutput`. In a step that runs ahead the device adds what the step before gained."""
        batch, sampler = self._batch, self._sampler
        slots = [batch.slot_of(request_id) for request_id in last_tokens]
        self.are_on_device = False
        if self._drafter is not None and new_drafts:
            self._drafter.propose(last_tokens, new_drafts, is_ahead=self.runs_ahead)
            if not set(slots).isdisjoint(grammar_slots) or sampler.needs_history(slots):
                assert not self.runs_ahead, "a step that runs ahead has logits that depend on earlier tokens"
                new_drafts = self._drafter.known_drafts(new_drafts)
            else:
                self.are_on_device = True
                new_drafts = {name: [0] * len(draft) for name, draft in new_drafts.items()}
        num_outputs: dict[int, int] = {}
        new_tokens: dict[int, list[int]] = {}
        for (request_id, (num_tokens, token)), slot in zip(last_tokens.items(), slots, strict=True):
            batch.correct(slot, num_tokens, token, new_drafts.get(request_id, ()))
            num_outputs[slot] = num_tokens - batch.num_prompt_tokens(request_id)
            drafts = self._drafts.pop(slot, None)
            if drafts is not None and not self.runs_ahead:
                count = num_outputs[slot] - int(sampler.num_outputs[slot])
                new_tokens[slot] = [*drafts[: count - 1].tolist(), token]
        sampler.take(num_outputs, new_tokens)
        if new_drafts:
            return  # the step's inputs come from the host, and the next step is told the last tokens again
        tokens = np.array([token for _, token in last_tokens.values()], dtype=np.int64)
        if self._platform.shares_host_memory:
            batch.host_last_tokens[slots] = tokens
        else:
            upload = self._platform.upload
            batch.last_tokens.index_copy_(0, upload(np.array(slots, dtype=np.int64)), upload(tokens))
