"""`DraftRunner`: runs the model that drafts, beside a `ModelRunner`.

Shape legend: T tokens of the target's step, S sequences that get drafts, P passes of the drafter, M block-table columns.

The drafter's keys and values lie in tensors of their own, under the block ids of one of the target's state groups. So prefix hits,
preemptions and rejected tokens need nothing here: whatever holds for the target's blocks holds for the drafter's.

- `follow`, after each step of the target: the drafter computes the same tokens, so that its cache holds what the target's holds. A head
  reads the hidden state of each token and the token behind it; it keeps the first draft token, and the hidden state to go on from, of the
  row that the device finds to be the last accepted one. `follow` never waits for the device.
- `propose`, before a step with drafts: one pass of the drafter for each further draft token. The host waits for the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS, Step
from compile_and_serve.models.drafters import DRAFT_TOKENS
from compile_and_serve.runtime.runner.draft_model import CompiledDrafter
from compile_and_serve.runtime.runner.input_batch import BatchLayout, InputBatch
from compile_and_serve.runtime.runner.state_memory import PageLayout, allocate_state


class DraftRunner:
    """Call `follow` after each step of the target, and `propose` before steps with drafts."""

    def __init__(
        self, compiled: CompiledDrafter, batch: InputBatch, num_pages: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """num_pages: of the target. dtype: of hidden states."""
        self._compiled = compiled
        self._model = compiled.model
        self._groups = {group.name: group for group in compiled.drafter.spec.state}
        self._batch = batch
        self._platform = platform_of(device)
        self._state: dict[str, torch.Tensor] = {}
        for group in self._groups.values():
            size = batch.tokens_per_page[compiled.borrowed[group.name]]
            layout = PageLayout.of([group], size, compiled.cache_dtype)
            self._state |= allocate_state([group], layout, num_pages, 0, dtype=compiled.cache_dtype, device=device)
        self._kind, self._extras = compiled.drafter.kind, compiled.extras
        # Of heads: for each batch slot, the first draft token and the hidden state to go on from.
        size = compiled.drafter.hidden_size
        self._tokens = torch.zeros(batch.num_slots, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(batch.num_slots, size, dtype=dtype, device=device)
        self._one_row = torch.zeros(1, dtype=torch.int64, device=device)

    def follow(
        self, step: Step, layout: BatchLayout | None, outputs: Mapping[str, torch.Tensor], sampled: torch.Tensor | None
    ) -> None:
        """Compute the tokens of the target's step that was launched last.

        layout: of the step; None: it is made up. outputs: of the step. sampled: int64, the token of each sampled row; None: no row is.
        """
        if self._kind == "tokens":
            inputs = {name: step.inputs[name] for name in ("input_ids", "positions")}
            self._run(step, inputs | {"logits_indices": self._one_row}, self._metadata_of(step, layout), num_rows=1)
            return
        hidden_TD = outputs[HIDDEN_STATES]
        rows, slots = self._one_row, None
        if layout is not None and sampled is not None:
            rows, slots = self._accepted_rows(step, layout, sampled), self._upload(layout.sampled_slots)
        if self._kind == "heads":
            if slots is not None:
                self._hidden.index_copy_(0, slots, hidden_TD[rows])
            elif layout is None:  # a warm-up
                self._heads(hidden_TD[: self._batch.num_slots])
            return
        if "fc.weight" in self._extras:
            hidden_TD = F.linear(hidden_TD, self._extras["fc.weight"], self._extras.get("fc.bias"))
        inputs = {
            "input_ids": self._next_tokens(step, layout, sampled), "positions": step.inputs["positions"],
            "hidden_states": hidden_TD, "logits_indices": rows,
        }  # fmt: skip
        given = self._run(step, inputs, self._metadata_of(step, layout), num_rows=rows.shape[0])
        if slots is not None:
            self._hidden.index_copy_(0, slots, given[HIDDEN_STATES])
            self._tokens.index_copy_(0, slots, self._likeliest(given[LOGITS]))

    def _metadata_of(self, step: Step, layout: BatchLayout | None) -> dict[str, AttentionMetadata]:
        """The target's, with the drafter's own backends. It says the lengths where only the host's batch knows them."""
        lens_cpu = None if layout is None else self._batch.lengths(layout.slots_S).astype(np.int32)
        metadata = {}
        for name, group in self._groups.items():
            given: AttentionMetadata = step.metadata[self._compiled.borrowed[name]]
            metadata[name] = replace(
                given, backend=self._compiled.backends[name], window=group.window, chunked=group.chunked,
                seq_lens_cpu=given.seq_lens_cpu if lens_cpu is None else lens_cpu,
                row_starts=None, row_seq_lens=None, row_block_table=None,
            )  # fmt: skip
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
        drafts_SD = np.full((len(counts), int(counts.max()) - 1), -1, dtype=np.int64)
        for row, draft in zip(drafts_SD, layout.sampled_drafts, strict=True):
            row[: len(draft)] = draft
        firsts_S = np.cumsum(counts) - counts
        places_SD = np.minimum(firsts_S[:, None] + np.arange(drafts_SD.shape[1]), len(sampled) - 1)
        is_right = sampled[self._upload(places_SD)] == self._upload(drafts_SD)
        return indices[self._upload(firsts_S) + is_right.long().cumprod(dim=1).sum(dim=1)]

    def propose(
        self, last_tokens: Mapping[str, tuple[int, int]], wanted: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Draft tokens of each sequence. last_tokens: of `SchedulerOutput`. wanted: sequence → as many entries as tokens are wanted.

        Behind a token where a draft has to end there are only -1.
        """
        batch = self._batch
        slots_S = np.array([batch.slot_of(name) for name in wanted], dtype=np.int64)
        known_S = np.array([last_tokens[name][0] for name in wanted], dtype=np.int64)
        counts_S = np.array([len(draft) for draft in wanted.values()], dtype=np.int64)
        if self._kind == "tokens":
            last_S = self._upload(np.array([last_tokens[name][1] for name in wanted], dtype=np.int64))
            drafts_SD = self._chain(slots_S, known_S - 1, counts_S, last_S, None)
        elif self._kind == "heads":
            drafts_SD = self._heads(self._hidden[self._upload(slots_S)])
        else:
            slots = self._upload(slots_S)
            first_S = self._tokens[slots]
            more_SD = self._chain(slots_S, known_S - 1, counts_S - 1, first_S, self._hidden[slots])
            drafts_SD = torch.cat((first_S[:, None], more_SD), dim=1)
        drafts = {}
        for name, draft, count in zip(wanted, drafts_SD.cpu().tolist(), counts_S.tolist(), strict=True):
            ends = batch.draft_ends(name)
            end = next((i for i in range(count) if draft[i] in ends), count)
            drafts[name] = draft[:end] + [-1] * (count - end)
        return drafts

    def _heads(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """int64 [S, number of heads]: the drafts of Medusa heads."""
        return self._model(_step_of(len(hidden_SD), {HIDDEN_STATES: hidden_SD}, {}, {}))[DRAFT_TOKENS]

    def _chain(
        self, slots_S: np.ndarray, first_S: np.ndarray, counts_S: np.ndarray, tokens_S: torch.Tensor, hidden_SD: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        """int64 [S, D]: each pass computes one token of each sequence and drafts the next. first_S: position of the first pass.
        counts_S: passes that each sequence needs. Later ones of a sequence compute its last token again, and write nothing.
        hidden_SD: what the first pass of a head reads.
        """
        num_seqs, passes = len(slots_S), int(counts_S.max())
        if passes == 0:
            return tokens_S.new_empty(num_seqs, 0)
        place_P1 = np.arange(passes)[:, None]
        positions_PS = first_S + np.minimum(place_P1, counts_S - 1)
        positions = self._upload_rows(positions_PS)
        lens_PS = (positions_PS + 1).astype(np.int32)
        lens, starts_cpu = self._upload_rows(lens_PS), np.arange(num_seqs + 1, dtype=np.int32)
        starts, rows = self._upload(starts_cpu), self._upload(np.arange(num_seqs, dtype=np.int64))
        tables, mappings = {}, {}
        for name, source in self._compiled.borrowed.items():
            table, size = self._batch.tables[source], self._batch.tokens_per_page[source]
            mapped_PS = table.slot_table[slots_S, positions_PS // size].astype(np.int64) * size + positions_PS % size
            mappings[name] = self._upload_rows(np.where(place_P1 < counts_S, mapped_PS, -1))
            tables[name] = table.of_slots(slots_S)
        drafts = []
        for i in range(passes):
            metadata = {
                name: AttentionMetadata(
                    backend=self._compiled.backends[name], query_start_loc=starts, seq_lens=lens[i], block_table=tables[name],
                    slot_mapping=mappings[name][i], num_seqs=num_seqs, num_tokens=num_seqs, max_query_len=1,
                    max_seq_len=int(lens_PS[i].max()), window=group.window, chunked=group.chunked,
                    query_start_loc_cpu=starts_cpu, seq_lens_cpu=lens_PS[i],
                )
                for name, group in self._groups.items()
            }  # fmt: skip
            inputs = {"input_ids": tokens_S, "positions": positions[i], "logits_indices": rows}
            if hidden_SD is not None:
                inputs[HIDDEN_STATES] = hidden_SD
            self._plan(metadata)
            given = self._model(_step_of(num_seqs, inputs, self._state, metadata))
            tokens_S, hidden_SD = self._likeliest(given[LOGITS]), given.get(HIDDEN_STATES)
            drafts.append(tokens_S)
        return torch.stack(drafts, dim=1)

    def _likeliest(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """int64 [S]: the target's ids of the likeliest tokens."""
        tokens_S = logits_SV.argmax(dim=-1)
        return tokens_S + self._extras["d2t"][tokens_S] if "d2t" in self._extras else tokens_S

    def _plan(self, metadata: Mapping[str, AttentionMetadata]) -> None:
        for name, backend in self._compiled.backends.items():
            backend.plan(metadata[name])

    def _run(
        self, like: Step, inputs: dict[str, torch.Tensor], metadata: Mapping[str, AttentionMetadata], *, num_rows: int
    ) -> dict[str, torch.Tensor]:
        self._plan(metadata)
        return self._model(
            Step(
                inputs=inputs, state=self._state, metadata=metadata, num_tokens=like.num_tokens, num_seqs=like.num_seqs,
                padded_tokens=like.padded_tokens, padded_seqs=like.padded_seqs, num_rows=num_rows,
                max_query_len=like.max_query_len, uses_optional=False,
            )
        )  # fmt: skip

    def _upload(self, array: np.ndarray, *, through_pinned: bool = False) -> torch.Tensor:
        return self._platform.upload(np.ascontiguousarray(array), through_pinned=through_pinned)

    def _upload_rows(self, array_PS: np.ndarray) -> torch.Tensor:
        """The array on the device, where each row begins at a multiple of 16 bytes: compiled kernels take that for granted."""
        num_rows, length = array_PS.shape
        padded = np.zeros((num_rows, -(-length // 4) * 4), dtype=array_PS.dtype)
        padded[:, :length] = array_PS
        return self._upload(padded)[:, :length]


def _step_of(
    num_tokens: int, inputs: dict[str, torch.Tensor], state: Mapping[str, torch.Tensor],
    metadata: Mapping[str, AttentionMetadata],
) -> Step:  # fmt: skip
    """A step of one token of each sequence."""
    return Step(
        inputs=inputs, state=state, metadata=metadata, num_tokens=num_tokens, num_seqs=num_tokens, padded_tokens=num_tokens,
        padded_seqs=num_tokens, num_rows=num_tokens, max_query_len=1, uses_optional=False,
    )  # fmt: skip
