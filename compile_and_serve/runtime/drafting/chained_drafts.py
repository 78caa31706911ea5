"""Drafts that a model makes one after another.

Shape legend: T tokens of the target's step, S sequences that get drafts, P passes of the drafter, M block-table columns, V vocabulary,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np
import torch

from compile_and_serve.custom_ops.moe.expert_load import counting_no_experts
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS, Step
from compile_and_serve.runtime.drafting.device_drafts import aligned
from compile_and_serve.runtime.drafting.model_drafts import ModelDrafts


class ChainedDrafts(ModelDrafts):
    """One pass of the model for each draft token. tokens_ahead: what it computes at position p is about token p + tokens_ahead."""

    tokens_ahead: ClassVar[int]

    def _pass_model(self, slots_S: torch.Tensor) -> Callable[[int, Step], dict[str, torch.Tensor]]:
        """What makes the drafts of a chain, one after another: the number of the draft and a step of one token of each sequence → outputs.
        slots_S: the batch slots.
        """
        return lambda number, step: self._model(step)

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
        pages, most_tokens = {}, 0
        for name, source in self._compiled.borrowed.items():
            table, size = self._batch.token_tables[source], self._batch.tokens_per_page[source]
            table_SM = table.of_slots(slots)
            blocks = table_SM.gather(1, (positions // size).T).T
            mapped = blocks * size + positions % size
            pages[name] = table_SM[:num_seqs], mapped.masked_fill(place_P1 >= needed, -1).contiguous()
            most_tokens = max(most_tokens, table.num_columns * size)
        drafts = []
        model = self._pass_model(asked["slots"][:num_seqs])
        for i in range(passes):
            lengths = StepLengths(
                query_start_loc=starts,
                seq_lens=lens[i, :num_seqs],
                num_seqs=num_seqs,
                num_tokens=num_seqs,
                max_query_len=1,
                max_seq_len=most_tokens if lens_cpu is None else int(lens_cpu[i].max()),
                query_start_loc_cpu=starts_cpu,
                seq_lens_cpu=None if lens_cpu is None else lens_cpu[i],
            )
            of_pass = {name: (table_SM, mapped[i, :num_seqs]) for name, (table_SM, mapped) in pages.items()}
            inputs = self._inputs(tokens_S, positions[i, :num_seqs], rows, hidden_SD)
            step = self._build_step(lengths, of_pass, inputs, num_rows=num_seqs, plans=host is not None)
            with counting_no_experts():
                given = model(num_known + i, step)
            hidden_SD = given.get(HIDDEN_STATES)
            tokens_S = self._choose(given[LOGITS], asked["slots"][:num_seqs], positions[i, :num_seqs] + self.tokens_ahead)
            drafts.append(tokens_S)
        return torch.stack(drafts, dim=1)
