"""`DraftRunner`: runs the model that drafts, beside a `ModelRunner`.

Shape legend: T tokens of the target's step, S sequences that get drafts, P passes of the drafter, M block-table columns.

The drafter's keys and values lie in tensors of their own, under the block ids of one of the target's state groups. So prefix hits,
preemptions and rejected tokens need nothing here: whatever holds for the target's blocks holds for the drafter's.

- `follow`, after each step of the target: the drafter computes the same tokens, so that its cache holds what the target's holds. It
  never waits for the device.
- `propose`, before a step with drafts: one pass of the drafter for each place of the drafts. The host waits for the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import LOGITS, Step
from compile_and_serve.runtime.runner.draft_model import CompiledDrafter
from compile_and_serve.runtime.runner.input_batch import BatchLayout, InputBatch
from compile_and_serve.runtime.runner.state_memory import PageLayout, allocate_state


class DraftRunner:
    """Call `follow` after each step of the target, and `propose` before steps with drafts."""

    def __init__(self, compiled: CompiledDrafter, batch: InputBatch, num_pages: int, device: torch.device) -> None:
        """num_pages: of the target."""
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
        self._one_row = torch.zeros(1, dtype=torch.int64, device=device)

    def follow(self, step: Step, layout: BatchLayout | None) -> None:
        """Compute the tokens of the target's step that was launched last. layout: of the step; None: it is made up."""
        lens_cpu = None if layout is None else self._batch.lengths(layout.slots_S)
        metadata = {}
        for name, group in self._groups.items():
            given: AttentionMetadata = step.metadata[self._compiled.borrowed[name]]
            metadata[name] = replace(
                given, backend=self._compiled.backends[name], window=group.window, chunked=group.chunked,
                seq_lens_cpu=given.seq_lens_cpu if lens_cpu is None else lens_cpu.astype(np.int32),
                row_starts=None, row_seq_lens=None, row_block_table=None,
            )  # fmt: skip
        inputs = {name: step.inputs[name] for name in ("input_ids", "positions")}
        self._run(step, inputs | {"logits_indices": self._one_row}, metadata, num_rows=1)

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
        tokens_S = self._upload(np.array([last_tokens[name][1] for name in wanted], dtype=np.int64))
        drafts_SD = self._chain(slots_S, known_S - 1, counts_S, tokens_S).cpu().numpy()
        drafts = {}
        for name, draft, count in zip(wanted, drafts_SD.tolist(), counts_S.tolist(), strict=True):
            ends = batch.draft_ends(name)
            end = next((i for i in range(count) if draft[i] in ends), count)
            drafts[name] = draft[:end] + [-1] * (count - end)
        return drafts

    def _chain(
        self, slots_S: np.ndarray, first_S: np.ndarray, counts_S: np.ndarray, tokens_S: torch.Tensor
    ) -> torch.Tensor:
        """int64 [S, D]: each pass computes one token of each sequence and drafts the next. first_S: position of the first pass.
        counts_S: passes that each sequence needs. Later ones of a sequence compute its last token again, and write nothing.
        """
        num_seqs, passes = len(slots_S), int(counts_S.max())
        place_P1 = np.arange(passes)[:, None]
        positions_PS = first_S + np.minimum(place_P1, counts_S - 1)
        positions = self._upload(positions_PS)
        lens_PS = (positions_PS + 1).astype(np.int32)
        lens, starts_cpu = self._upload(lens_PS), np.arange(num_seqs + 1, dtype=np.int32)
        starts, rows = self._upload(starts_cpu), self._upload(np.arange(num_seqs, dtype=np.int64))
        tables, mappings = {}, {}
        for name, source in self._compiled.borrowed.items():
            table, size = self._batch.tables[source], self._batch.tokens_per_page[source]
            mapped_PS = table.slot_table[slots_S, positions_PS // size].astype(np.int64) * size + positions_PS % size
            mappings[name] = self._upload(np.where(place_P1 < counts_S, mapped_PS, -1))
            columns = int(positions_PS.max()) // size + 1
            tables[name] = self._upload(table.slot_table[slots_S, :columns])
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
            step = Step(
                inputs={}, state={}, metadata={}, num_tokens=num_seqs, num_seqs=num_seqs, padded_tokens=num_seqs,
                padded_seqs=num_seqs, num_rows=num_seqs, max_query_len=1,
            )  # fmt: skip
            inputs = {"input_ids": tokens_S, "positions": positions[i], "logits_indices": rows}
            tokens_S = self._run(step, inputs, metadata, num_rows=num_seqs)[LOGITS].argmax(-1)
            drafts.append(tokens_S)
        return torch.stack(drafts, dim=1)

    def _run(
        self, like: Step, inputs: dict[str, torch.Tensor], metadata: Mapping[str, AttentionMetadata], *, num_rows: int
    ) -> dict[str, torch.Tensor]:
        for name, backend in self._compiled.backends.items():
            backend.plan(metadata[name])
        return self._model(
            Step(
                inputs=inputs, state=self._state, metadata=metadata, num_tokens=like.num_tokens, num_seqs=like.num_seqs,
                padded_tokens=like.padded_tokens, padded_seqs=like.padded_seqs, num_rows=num_rows,
                max_query_len=like.max_query_len, uses_optional=False,
            )
        )  # fmt: skip

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        array = np.ascontiguousarray(array)
        return torch.from_numpy(array) if self._platform.shares_host_memory else self._platform.upload(array)
