"""`DraftRunner`: runs the model that drafts, beside a `ModelRunner`.

Shape legend: T tokens of the target's step, S sequences that get drafts, P passes of the drafter, K draft tokens at most, M block-table
columns, R batch slots.

The drafter's keys and values lie in tensors of their own, under the block ids of one of the target's state groups. So prefix hits,
preemptions and rejected tokens need nothing here: whatever holds for the target's blocks holds for the drafter's.

- `follow`, after each step of the target: the drafter computes the same tokens, so that its cache holds what the target's holds. A head
  reads the hidden state of each token and the token behind it; it keeps the first draft token, and the hidden state to go on from, of the
  row that the device finds to be the last accepted one. While drafting does not pay, it stops behind the last keys and values.
- `propose`, before a step with drafts: one pass of the drafter for each further draft token. A block drafter makes all in one pass.

After steps of decodes alone `follow` is one CUDA graph, and so is `propose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from compile_and_serve.compiler.cudagraphs.work_graphs import Work, WorkGraphs
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.custom_ops.attention.attention import AttentionMetadata
from compile_and_serve.custom_ops.moe.expert_load import counting_no_experts
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS, Step
from compile_and_serve.models.drafters.medusa import DRAFT_TOKENS
from compile_and_serve.runtime.runner.block_drafts import BlockDrafts
from compile_and_serve.runtime.runner.decode_step import DecodeStep
from compile_and_serve.runtime.runner.device_drafts import DeviceDrafts, StepOf, aligned
from compile_and_serve.runtime.runner.draft_model import CompiledDrafter
from compile_and_serve.runtime.runner.input_batch import BatchLayout, InputBatch
from compile_and_serve.runtime.runner.layers_behind import LayersBehind, SequenceRows
from compile_and_serve.runtime.runner.state_memory import PageLayout, allocate_state
from compile_and_serve.runtime.sampling.ops import argmax_rows

_PROPOSE = "propose"


class DraftRunner(DeviceDrafts):
    """The drafts of a compiled model."""

    def __init__(
        self,
        compiled: CompiledDrafter,
        batch: InputBatch,
        num_pages: int,
        device: torch.device,
        dtype: torch.dtype,
        num_drafts: int,
        graphs: WorkGraphs | None,
    ) -> None:
        """num_pages: of the target. dtype: of hidden states. num_drafts: of a sequence, at most. graphs: None: nothing is captured."""
        super().__init__(batch, device, num_drafts)
        self._compiled = compiled
        self._model = compiled.model
        self._groups = {group.name: group for group in compiled.drafter.spec.state}
        self._graphs = graphs
        self._state = _state_of(compiled, batch, num_pages, device)
        self._kind, self._extras = compiled.drafter.kind, compiled.extras
        # By batch slot, then a row for padding sequences. Of heads: the first draft token and the hidden state to go on from.
        num_slots, size = batch.num_slots, compiled.drafter.hidden_size
        self._tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(num_slots + 1, size, dtype=dtype, device=device)
        self._behind = None
        self._block = BlockDrafts(compiled, batch, self._state) if self._kind == "block" else None
        if compiled.behind:
            states = tuple(_state_of(one, batch, num_pages, device) for one in compiled.behind)
            (source,) = compiled.borrowed.values()
            self._behind = LayersBehind(compiled.behind, states, num_slots, num_pages, batch.tokens_per_page[source], self._hidden)
        # What a captured `follow` reads of the step.
        num_rows = 0 if graphs is None else batch.max_sampled
        self._sampled_rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        given = next((one for one in compiled.drafter.target.outputs if one.name == HIDDEN_STATES), None)
        features = 0 if given is None else int(given.dims[1])
        self._hidden_rows = torch.zeros(num_rows, features, dtype=dtype, device=device)
        self._one_row = torch.zeros(1, dtype=torch.int64, device=device)

    @cached_property
    def _writes_state(self) -> Callable[[Step], dict[str, torch.Tensor]] | None:
        """The model as far as it writes state, once it is loaded; None if it has none, is not compiled, or others read what it gives."""
        if not self._groups or self._kind == "block" or self._behind is not None or not isinstance(self._model, CompiledModel):
            return None
        return self._model.writes_state

    def add(self, slot: int, token_ids: np.ndarray) -> None:
        """See `DeviceDrafts.add`."""
        if self._behind is not None:
            self._behind.add(slot)

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

    def follow(
        self,
        step: Step,
        layout: BatchLayout | None,
        outputs: Mapping[str, torch.Tensor],
        sampled: torch.Tensor | None,
        *,
        keeps_state_only: bool = False,
    ) -> None:
        """See `DeviceDrafts.follow`. keeps_state_only: only keys and values need be written."""
        keeps_state_only = keeps_state_only and self._writes_state is not None and step.max_query_len == 1
        if layout is not None and sampled is not None:  # noqa: SIM102
            if self._replay_follow(step, layout, outputs, sampled, keeps_state_only=keeps_state_only):
                return
        if self._block is not None:
            self._block.follow(step, outputs[HIDDEN_STATES])
            return
        metadata = self._metadata_of(step, layout)
        self._plan(metadata)
        if self._kind == "tokens":
            self._run_tokens(step, metadata, keeps_state_only=keeps_state_only)
            return
        rows, slots = step.inputs["logits_indices"][: step.num_seqs], None
        if layout is not None:
            rows = self._one_row
            if sampled is not None and not keeps_state_only:
                rows, slots = self._accepted_rows(step, layout, sampled), self._upload(layout.sampled_slots)
        tokens_T = self._one_row if self._kind == "heads" else self._next_tokens(step, layout, sampled)
        sequences = None
        if self._behind is not None and layout is not None:
            ends = next(iter(metadata.values())).query_start_loc[: len(layout.request_ids) + 1].long()
            sequences = SequenceRows(self._upload(layout.slots_S), ends[:-1], ends[1:] - 1)
            if slots is not None:
                place_of = {name: place for place, name in enumerate(layout.request_ids)}
                sampled_places = self._upload(np.array([place_of[name] for name in layout.sampled_ids]))
                sequences.lasts.index_copy_(0, sampled_places, rows)
        self._run_head(step, metadata, outputs[HIDDEN_STATES], tokens_T, rows, slots, sequences, keeps_state_only=keeps_state_only)

    def _replay_follow(
        self, step: Step, layout: BatchLayout, outputs: Mapping[str, torch.Tensor], sampled: torch.Tensor, *, keeps_state_only: bool
    ) -> bool:
        """Replay the graph of a step of decodes, all of whose tokens are sampled; False where there is none."""
        if self._graphs is None or not layout.is_decode_only or not len(sampled) == layout.num_logits == layout.num_tokens:
            return False
        if self._kind != "tokens":
            # The next replay of any graph may overwrite what the step's graph left.
            num_rows = step.padded_tokens
            if num_rows > len(self._sampled_rows):
                return False
            self._sampled_rows[: len(sampled)].copy_(sampled)
            self._hidden_rows[:num_rows].copy_(outputs[HIDDEN_STATES])
        return self._graphs.replay(_follow_name(step.max_query_len, keeps_state_only), step.padded_seqs, step.addresses)

    def _follow_decodes(self, step: DecodeStep, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool) -> None:
        """`follow` of decodes with as many tokens each, in persistent memory."""
        size, q = step.padded_seqs, step.max_query_len
        if self._block is not None:
            self._block.follow(step, self._hidden_rows[: size * q])
            return
        for one in metadata.values():
            if one.row_seq_lens is not None:
                one.fill_rows(q)
        if self._kind == "tokens":
            self._run_tokens(step, metadata, keeps_state_only=keeps_state_only)
            return
        sampled = self._sampled_rows[: size * q]
        if keeps_state_only:
            self._run_head(step, metadata, self._hidden_rows[: size * q], sampled, self._one_row, None, keeps_state_only=True)
            return
        rows = firsts = torch.arange(size, device=sampled.device) * q
        if q > 1:
            is_right = sampled.view(size, q)[:, :-1] == self.drafts[step.slots]
            rows = firsts + is_right.long().cumprod(dim=1).sum(dim=1)
        sequences = SequenceRows(step.slots, firsts, rows)
        self._run_head(step, metadata, self._hidden_rows[: size * q], sampled, rows, step.slots, sequences)

    def _run_tokens(self, step: Step, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool = False) -> None:
        inputs = {name: step.inputs[name] for name in ("input_ids", "positions")} | {"logits_indices": self._one_row}
        self._run(step, inputs, metadata, num_rows=1, keeps_state_only=keeps_state_only)

    def _run_head(
        self,
        step: Step,
        metadata: Mapping[str, AttentionMetadata],
        hidden_TD: torch.Tensor,
        next_T: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor | None,
        sequences: SequenceRows | None = None,
        *,
        keeps_state_only: bool = False,
    ) -> None:
        """The head's pass over a step. next_T: int64, the token behind each of the step's. rows, slots: int64 [S], where each sequence
        goes on; slots is None where none does. sequences: all of the step, for further layers; None: it is made up.
        """
        if self._kind == "heads":
            if slots is not None:
                self._hidden.index_copy_(0, slots, hidden_TD[rows])
            else:
                self._heads(hidden_TD[rows])  # as a warm-up
            return
        if "fc.weight" in self._extras:
            hidden_TD = F.linear(hidden_TD, self._extras["fc.weight"], self._extras.get("fc.bias"))
        inputs = {"input_ids": next_T, "positions": step.inputs["positions"], "hidden_states": hidden_TD, "logits_indices": rows}
        given = self._run(step, inputs, metadata, num_rows=rows.shape[0], keeps_state_only=keeps_state_only)
        if self._behind is not None:
            first = self._step_like(step, inputs, metadata, num_rows=rows.shape[0])
            with counting_no_experts():
                self._behind.follow(first, given[HIDDEN_STATES], sequences)
        elif slots is not None:
            self._hidden.index_copy_(0, slots, given[HIDDEN_STATES])
        if slots is not None:
            self._tokens.index_copy_(0, slots, self._likeliest(given[LOGITS]))

    def _metadata_of(self, step: Step, layout: BatchLayout | None = None, *, keeps_rows: bool = False) -> dict[str, AttentionMetadata]:
        """The target's, with the drafter's own backends. It says the lengths where only the host's batch knows them.
        keeps_rows: as the target's, attention treats each token as a decode of its own.
        """
        lens_cpu = None if layout is None else self._batch.lengths(layout.slots_S).astype(np.int32)
        metadata = {}
        for name, group in self._groups.items():
            given: AttentionMetadata = step.metadata[self._compiled.borrowed[name]]
            rows: dict[str, Any] = {} if keeps_rows else dict.fromkeys(("row_starts", "row_seq_lens", "row_block_table"))
            metadata[name] = replace(
                given,
                backend=self._compiled.backends[name],
                window=group.window,
                chunked=group.chunked,
                seq_lens_cpu=given.seq_lens_cpu if lens_cpu is None else lens_cpu,
                **rows,
            )
        return metadata

    def _next_tokens(self, step: Step, layout: BatchLayout | None, sampled: torch.Tensor | None) -> torch.Tensor:
        """int64 [T]: the token behind each of the step's. Behind a sampled row that is the sampled one, for the host does not know more."""
        if layout is None or layout.num_decodes == len(layout.request_ids):
            tokens_T = self._one_row.new_zeros(step.padded_tokens)
        else:
            next_T = np.zeros(step.padded_tokens, dtype=np.int64)
            starts = next(iter(step.metadata.values())).query_start_loc_cpu
            ends_S = self._batch.lengths(layout.slots_S)
            for row in range(layout.num_decodes, len(layout.request_ids)):
                begin, count = int(starts[row]), int(starts[row + 1] - starts[row])
                first = int(ends_S[row]) - count + 1
                known = self._batch.known_tokens(layout.request_ids[row])[first : first + count]
                next_T[begin : begin + len(known)] = known
            tokens_T = self._upload(next_T, through_pinned=True)
        if sampled is not None:
            tokens_T.index_copy_(0, step.inputs["logits_indices"][: sampled.shape[0]], sampled)
        return tokens_T

    def _accepted_rows(self, step: Step, layout: BatchLayout, sampled: torch.Tensor) -> torch.Tensor:
        """int64: the token of the step behind which each sampled sequence goes on: that of its last right draft (`accepted_tokens`)."""
        indices = step.inputs["logits_indices"][: sampled.shape[0]]
        if not layout.sampled_counts:
            return indices
        counts = np.array(layout.sampled_counts)
        is_draft_SK = np.zeros((len(counts), self._num_drafts), dtype=np.bool_)
        for row, draft in zip(is_draft_SK, layout.sampled_drafts, strict=True):
            row[: len(draft)] = draft >= 0
        firsts_S = np.cumsum(counts) - counts
        places_SK = np.minimum(firsts_S[:, None] + np.arange(self._num_drafts), len(sampled) - 1)
        drafts_SK = self.drafts[self._upload(layout.sampled_slots)]
        is_right = (sampled[self._upload(places_SK)] == drafts_SK) & self._upload(is_draft_SK)
        return indices[self._upload(firsts_S) + is_right.long().cumprod(dim=1).sum(dim=1)]

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
            self._batch.tables[source].commit()
        if size and self._graphs is not None and self._graphs.replay(_PROPOSE, size):
            return
        assert not is_ahead, "`can_run_ahead` found a graph"
        self._draft(num_seqs, num_drafts, self._asked.host)

    def _draft(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> None:
        """Write `drafts` of the first `num_seqs` sequences that were asked for, up to `num_drafts` each, and -1 behind as many as were.
        host: `_asked` on the host, for attention that plans there; None: it reads all lengths from the device.
        """
        asked = self._asked.device
        slots_S, counts_S = asked["slots"][:num_seqs], asked["counts"][:num_seqs]
        if self._kind in ("tokens", "block"):
            known_S, sampled_S = asked["last_tokens"][:num_seqs], self._batch.last_tokens[slots_S]
            last_S = torch.where(asked["is_ahead"][:num_seqs] > 0, sampled_S, known_S)
            if self._block is None:
                drafts_SK = self._chain(num_seqs, num_drafts, 0, host, last_S, None)
            else:
                positions_S = self._known_positions()[:num_seqs]
                drafts_SK = self._block.draft(slots_S, positions_S, counts_S, last_S, num_drafts, host)
        elif self._kind == "heads":
            drafts_SK = self._heads(self._hidden[slots_S])[:, :num_drafts]
        else:
            first_S = self._tokens[slots_S]
            more_SK = self._chain(num_seqs, num_drafts - 1, 1, host, first_S, self._hidden[slots_S])
            drafts_SK = torch.cat((first_S[:, None], more_SK), dim=1)
        is_wanted = torch.arange(num_drafts, device=slots_S.device) < counts_S[:, None]
        drafts_SK = drafts_SK.masked_fill(~is_wanted, -1)
        self.drafts.index_copy_(0, slots_S, F.pad(drafts_SK, (0, self._num_drafts - num_drafts), value=-1))

    def _heads(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """int64 [S, number of heads]: the drafts of Medusa heads."""
        return self._model(_step_of(len(hidden_SD), {HIDDEN_STATES: hidden_SD}, {}, {}))[DRAFT_TOKENS]

    def _chain(
        self,
        num_seqs: int,
        passes: int,
        num_known: int,
        host: Mapping[str, np.ndarray] | None,
        tokens_S: torch.Tensor,
        hidden_SD: torch.Tensor | None,
    ) -> torch.Tensor:
        """int64 [S, P]: each pass computes one token of each sequence and drafts the next, from the positions of `_asked` on.

        A sequence needs as many passes as it was asked drafts for, less `num_known`. Later ones compute its last token again, and write
        nothing. host: see `_draft`. hidden_SD: what the first pass of a head reads.
        """
        if passes <= 0:
            return tokens_S.new_empty(num_seqs, 0)
        asked = {name: values[: aligned(num_seqs)] for name, values in self._asked.device.items()}
        place_P1 = torch.arange(passes, device=tokens_S.device)[:, None]
        needed = asked["counts"] - num_known
        # Each row begins at a multiple of 16 bytes: compiled kernels take that for granted.
        known = self._known_positions()[: aligned(num_seqs)]
        positions = (known + torch.minimum(place_P1, needed - 1)).clamp_(min=0)
        lens = (positions + 1).masked_fill(asked["counts"] == 0, 0).to(torch.int32)
        lens_cpu = starts_cpu = None
        if host is not None:
            place_cpu = np.minimum(np.arange(passes)[:, None], host["counts"][:num_seqs] - num_known - 1)
            lens_cpu = (host["positions"][:num_seqs] + place_cpu + 1).astype(np.int32)
            starts_cpu = np.arange(num_seqs + 1, dtype=np.int32)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=tokens_S.device)
        rows = torch.arange(num_seqs, device=tokens_S.device)
        slots = asked["slots"].clamp(max=self._batch.num_slots - 1)
        tables, mappings, most_tokens = {}, {}, 0
        for name, source in self._compiled.borrowed.items():
            table, size = self._batch.tables[source], self._batch.tokens_per_page[source]
            tables[name] = table.of_slots(slots)
            blocks = tables[name].gather(1, (positions // size).T).T
            mapped = blocks * size + positions % size
            mappings[name] = mapped.masked_fill(place_P1 >= needed, -1).contiguous()
            most_tokens = max(most_tokens, table.num_columns * size)
        drafts = []
        by_layer = {} if self._behind is None else self._behind.known_hidden(asked["slots"][:num_seqs])
        for i in range(passes):
            metadata = {
                name: AttentionMetadata(
                    backend=self._compiled.backends[name],
                    query_start_loc=starts,
                    seq_lens=lens[i, :num_seqs],
                    block_table=tables[name][:num_seqs],
                    slot_mapping=mappings[name][i, :num_seqs],
                    num_seqs=num_seqs,
                    num_tokens=num_seqs,
                    max_query_len=1,
                    max_seq_len=most_tokens if lens_cpu is None else int(lens_cpu[i].max()),
                    window=group.window,
                    chunked=group.chunked,
                    query_start_loc_cpu=starts_cpu,
                    seq_lens_cpu=None if lens_cpu is None else lens_cpu[i],
                )
                for name, group in self._groups.items()
            }
            inputs = {"input_ids": tokens_S, "positions": positions[i, :num_seqs], "logits_indices": rows}
            if hidden_SD is not None:
                inputs[HIDDEN_STATES] = hidden_SD
            if host is not None:
                self._plan(metadata)
            step = _step_of(num_seqs, inputs, self._state, metadata)
            with counting_no_experts():
                if self._behind is None:
                    given = self._model(step)
                else:
                    given, by_layer = self._behind.draft(num_known + i, step, by_layer)
            tokens_S, hidden_SD = self._likeliest(given[LOGITS]), given.get(HIDDEN_STATES)
            drafts.append(tokens_S)
        return torch.stack(drafts, dim=1)

    def _likeliest(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """int64 [S]: the target's ids of the likeliest tokens."""
        tokens_S, _ = argmax_rows(logits_SV)
        return tokens_S + self._extras["d2t"][tokens_S] if "d2t" in self._extras else tokens_S

    def _plan(self, metadata: Mapping[str, AttentionMetadata]) -> None:
        for name, backend in self._compiled.backends.items():
            backend.plan(metadata[name])

    def _run(
        self,
        like: Step,
        inputs: dict[str, torch.Tensor],
        metadata: Mapping[str, AttentionMetadata],
        *,
        num_rows: int,
        keeps_state_only: bool = False,
    ) -> dict[str, torch.Tensor]:
        model = self._writes_state if keeps_state_only else self._model
        assert model is not None
        with counting_no_experts():
            return model(self._step_like(like, inputs, metadata, num_rows=num_rows))

    def _step_like(self, like: Step, inputs: dict[str, torch.Tensor], metadata: Mapping[str, AttentionMetadata], *, num_rows: int) -> Step:
        return Step(
            inputs=inputs,
            state=self._state,
            metadata=metadata,
            num_tokens=like.num_tokens,
            num_seqs=like.num_seqs,
            padded_tokens=like.padded_tokens,
            padded_seqs=like.padded_seqs,
            num_rows=num_rows,
            max_query_len=like.max_query_len,
            uses_optional=False,
        )


def _state_of(compiled: CompiledDrafter, batch: InputBatch, num_pages: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The keys and values of a drafter, zeroed, by name."""
    state: dict[str, torch.Tensor] = {}
    for group in compiled.drafter.spec.state:
        layout = PageLayout.of([group], batch.tokens_per_page[compiled.borrowed[group.name]], compiled.cache_dtype)
        state |= allocate_state([group], layout, num_pages, 0, dtype=compiled.cache_dtype, device=device)
    return state


def _follow_name(query_len: int, keeps_state_only: bool) -> str:
    return f"follow {query_len}{', state only' if keeps_state_only else ''}"


def _step_of(
    num_tokens: int, inputs: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor], metadata: Mapping[str, AttentionMetadata]
) -> Step:
    """A step of one token of each sequence."""
    return Step(
        inputs=inputs,
        state=state,
        metadata=metadata,
        num_tokens=num_tokens,
        num_seqs=num_tokens,
        padded_tokens=num_tokens,
        padded_seqs=num_tokens,
        num_rows=num_tokens,
        max_query_len=1,
        uses_optional=False,
    )
