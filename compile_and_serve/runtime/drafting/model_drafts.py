"""`ModelDrafts`: drafts of a compiled model that runs beside the target.

Shape legend: T tokens of the target's step, S sequences that get drafts, K draft tokens at most, R batch slots.

The drafter's keys and values lie in tensors of their own, under the block ids of one of the target's state groups. So prefix hits,
preemptions and rejected tokens need nothing here: whatever holds for the target's blocks holds for the drafter's.

- `follow`, after each step of the target: the drafter computes the same tokens, so that its cache holds what the target's holds. While
  drafting does not pay, it stops behind the last keys and values.
- `propose`, before a step with drafts: the drafts are made.

After steps of decodes alone `follow` is one CUDA graph, and so is `propose`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.work_graphs import Work
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.custom_ops.moe.expert_load import counting_no_experts
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata, StepLengths
from compile_and_serve.custom_ops.step import HIDDEN_STATES, INPUT_IDS, LOGITS_INDICES, POSITIONS, Step
from compile_and_serve.custom_ops.step_builder import build_step
from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts, DraftSetup, StepOf, TargetLayout, TargetStep
from compile_and_serve.runtime.drafting.draft_sampling import DraftSampling
from compile_and_serve.runtime.sampling.decode_step import DecodeStep
from compile_and_serve.runtime.sampling.ops import argmax_rows
from compile_and_serve.runtime.sampling_params import SamplingParams

_PROPOSE = "propose"


class ModelDrafts(DeviceDrafts):
    """A subclass says how the model follows the target, and how it drafts.

    reads_hidden: whether it reads the target's hidden states and sampled tokens. draws: whether drafts may be drawn from the drafter's
    distribution; else they are its likeliest tokens.
    """

    reads_hidden: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        batch, device, compiled = setup.batch, setup.device, setup.compiled
        assert compiled is not None
        self._compiled, self._model, self._extras = compiled, compiled.model, compiled.extras
        self._groups = compiled.drafter.spec.state
        self._graphs = setup.graphs
        self._state = setup.allocate_state(compiled)
        self._sampling: DraftSampling | None = None
        if self.draws and setup.config.draft_sample_method == "probabilistic":
            self._sampling = DraftSampling(batch.num_slots, compiled.drafter.target.vocab_size, device)
        # What a captured `follow` reads of the step.
        num_rows = 0 if setup.graphs is None else batch.max_sampled
        self._sampled_rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        given = next((one for one in compiled.drafter.target.outputs if one.name == HIDDEN_STATES), None)
        features = 0 if given is None else int(given.dims[1])
        self._hidden_rows = torch.zeros(num_rows, features, dtype=compiled.hidden_dtype, device=device)
        self._one_row = torch.zeros(1, dtype=torch.int64, device=device)

    def page_parts(self) -> dict[str, list[torch.Tensor]]:
        parts: dict[str, list[torch.Tensor]] = {}
        for group in self._groups:
            tensors = [self._state[name] for name in group.tensor_names]
            parts.setdefault(self._compiled.borrowed[group.name], []).extend(tensors)
        return parts

    @abstractmethod
    def _follow_step(self, target: TargetStep, *, keeps_state_only: bool) -> None:
        """`follow` of any step."""

    @abstractmethod
    def _follow_decodes(self, step: DecodeStep, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool) -> None:
        """`follow` of decodes with as many tokens each, in persistent memory: what is captured. metadata: of `_metadata_of`."""

    @abstractmethod
    def _new_drafts(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> torch.Tensor:
        """int64 [S, num_drafts]: drafts of the first `num_seqs` sequences of `_asked`. What is behind the drafts that a sequence was asked
        for means nothing. host: see `_draft`.
        """

    @cached_property
    def _writes_state(self) -> Callable[[Step], dict[str, torch.Tensor]] | None:
        """The model as far as it writes state, once it is loaded; None if it has none, is not compiled, or others read what it gives."""
        if not self._groups or not self._can_skip_outputs() or not isinstance(self._model, CompiledModel):
            return None
        return self._model.writes_state

    def _can_skip_outputs(self) -> bool:
        """Whether nothing of what the model gives is needed while drafting is off."""
        return True

    def work(self, size: int, plain_step: StepOf, drafted_step: StepOf | None) -> Iterator[Work]:
        """See `DeviceDrafts.work`."""
        step = plain_step(size)
        if self._writes_state is not None:
            yield self._follow_work(step, keeps_state_only=True)
        if self._writes_state is None or drafted_step is not None:
            yield self._follow_work(step, keeps_state_only=False)
        if drafted_step is not None:
            self._ask([], [], size)
            yield Work(name=_PROPOSE, run=lambda: self._draft(size, self._num_drafts, None))
            yield self._follow_work(drafted_step(size), keeps_state_only=False)

    def _follow_work(self, step: DecodeStep, *, keeps_state_only: bool) -> Work:
        metadata = self._metadata_of(step, keeps_rows=True)
        run = partial(self._follow_decodes, step, metadata, keeps_state_only=keeps_state_only)
        return Work(name=_follow_name(step.max_query_len, keeps_state_only), run=run, addresses=step.addresses)

    def follow(self, target: TargetStep, *, keeps_state_only: bool = False) -> None:
        """See `DeviceDrafts.follow`. keeps_state_only: only keys and values need be written."""
        keeps_state_only = keeps_state_only and self._writes_state is not None and target.step.max_query_len == 1
        if not self._replay_follow(target, keeps_state_only=keeps_state_only):
            self._follow_step(target, keeps_state_only=keeps_state_only)

    def _replay_follow(self, target: TargetStep, *, keeps_state_only: bool) -> bool:
        """Replay the graph of a step of decodes, all of whose tokens are sampled; False where there is none."""
        step, layout, sampled = target.step, target.layout, target.sampled
        if layout is None or sampled is None:
            return False
        if self._graphs is None or not layout.is_decode_only or not len(sampled) == layout.num_logits == layout.num_tokens:
            return False
        if self.reads_hidden:
            # The next replay of any graph may overwrite what the step's graph left.
            num_rows = step.padded_tokens
            if num_rows > len(self._sampled_rows):
                return False
            self._sampled_rows[: len(sampled)].copy_(sampled)
            self._hidden_rows[:num_rows].copy_(target.outputs[HIDDEN_STATES])
        return self._graphs.replay(_follow_name(step.max_query_len, keeps_state_only), step.padded_seqs, step.addresses)

    def can_run_ahead(self, num_drafted: int, size: int, query_len: int) -> bool:
        """Whether there are graphs of `propose` and `follow`, which read lengths from the device."""
        graphs, padded = self._graphs, self._padded_size(num_drafted)
        if graphs is None or not padded:
            return False
        return graphs.holds(_PROPOSE, padded) and graphs.holds(_follow_name(query_len, False), size)

    def _padded_size(self, num_drafted: int) -> int:
        return 0 if self._graphs is None else self._graphs.padded_size(num_drafted) or 0

    def _make_drafts(self, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        for source in self._compiled.borrowed.values():
            self._batch.token_tables[source].commit()
        if size and self._graphs is not None and self._graphs.replay(_PROPOSE, size):
            return
        assert not is_ahead, "`can_run_ahead` found a graph"
        self._draft(num_seqs, num_drafts, self._asked.host)

    def _draft(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> None:
        """Write `drafts` of the first `num_seqs` sequences of `_asked`, up to `num_drafts` each.
        host: `_asked` on the host, for attention that plans there; None: it reads all lengths from the device.
        """
        self._write_drafts(self._new_drafts(num_seqs, num_drafts, host))

    def _metadata_of(self, step: Step, layout: TargetLayout | None = None, *, keeps_rows: bool = False) -> dict[str, AttentionMetadata]:
        """The target's, with the drafter's own backends. It says the lengths where only the host's batch knows them.
        keeps_rows: as the target's, attention treats each token as a decode of its own.
        """
        lens_cpu = None if layout is None else self._batch.lengths(layout.slots_S).astype(np.int32)
        metadata = {}
        for group in self._groups:
            given: AttentionMetadata = step.metadata[self._compiled.borrowed[group.name]]
            backend = self._compiled.backends[group.name]
            own = group.kind.metadata(given, (given.block_table, given.slot_mapping), backend)
            if lens_cpu is not None:
                own.seq_lens_cpu = lens_cpu
            if keeps_rows:
                own.row_starts, own.row_seq_lens, own.row_block_table = given.row_starts, given.row_seq_lens, given.row_block_table
            metadata[group.name] = own
        return metadata

    def _fill_rows(self, step: Step, metadata: Mapping[str, AttentionMetadata]) -> None:
        for one in metadata.values():
            if one.row_seq_lens is not None:
                one.fill_rows(step.max_query_len)

    def _choose(self, logits_SV: torch.Tensor, slots_S: torch.Tensor, places_S: torch.Tensor) -> torch.Tensor:
        """int64 [S]: drafts, as the target's ids. slots_S, places_S: int64, batch slot and number of the draft in its sequence."""
        if self._sampling is not None:
            return self._sampling.draw(logits_SV, slots_S, places_S, self._token_ids)
        tokens_S, _ = argmax_rows(logits_SV)
        return tokens_S if self._token_ids is None else self._token_ids[tokens_S]

    @cached_property
    def _token_ids(self) -> torch.Tensor | None:
        """int64: the target's id of each draft token; None: they are the same."""
        offsets = self._extras.get("d2t")
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def add(self, slot: int, token_ids: np.ndarray, params: SamplingParams, num_prompt: int) -> None:
        """See `DeviceDrafts.add`."""
        if self._sampling is not None:
            self._sampling.add(slot, params, num_prompt)

    def _plan(self, metadata: Mapping[str, AttentionMetadata]) -> None:
        for name, backend in self._compiled.backends.items():
            backend.plan(metadata[name])

    def _inputs(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, hidden_states: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Those inputs that the model takes. rows: whose logits are wanted."""
        values = {INPUT_IDS.name: input_ids, POSITIONS.name: positions, LOGITS_INDICES.name: rows}
        if hidden_states is not None:
            values[HIDDEN_STATES] = hidden_states
        return {one.name: values[one.name] for one in self._compiled.drafter.spec.inputs}

    def _step_like(self, like: Step, inputs: dict[str, torch.Tensor], metadata: Mapping[str, AttentionMetadata], *, num_rows: int) -> Step:
        return replace(like, inputs=inputs, state=self._state, metadata=metadata, num_rows=num_rows, uses_optional=False)

    def _build_step(
        self,
        lengths: StepLengths,
        pages: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        inputs: dict[str, torch.Tensor],
        *,
        num_rows: int,
        plans: bool = False,
    ) -> Step:
        """A step of drafts: see `build_step`."""
        given: dict[str, Any] = {"backends": self._compiled.backends, "state": self._state, "uses_optional": False}
        return build_step(self._groups, lengths, pages=pages, inputs=inputs, num_rows=num_rows, plans=plans, **given)

    def _run(self, step: Step, *, keeps_state_only: bool = False) -> dict[str, torch.Tensor]:
        model = self._writes_state if keeps_state_only else self._model
        assert model is not None
        with counting_no_experts():
            return model(step)


def _follow_name(query_len: int, keeps_state_only: bool) -> str:
    return f"follow {query_len}{', state only' if keeps_state_only else ''}"
