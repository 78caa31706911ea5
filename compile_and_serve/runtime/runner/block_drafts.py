"""`BlockDrafts`: all drafts of a sequence from one pass over a block of mask tokens (`models/drafters/dflash.py`).

Shape legend: T tokens of the target's step, S sequences that get drafts, K drafts of a sequence, B = 1 + K tokens of a block, F features of
the target's hidden states, M block-table columns.

The block of a sequence begins at its last token, whose hidden state the target has not computed yet. Its keys and values lie in the slots
of the tokens that the target checks next. The context of these tokens overwrites them after the check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata
from compile_and_serve.custom_ops.moe.expert_load import counting_no_experts
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS, Step
from compile_and_serve.runtime.runner.draft_model import CompiledDrafter
from compile_and_serve.runtime.runner.input_batch import InputBatch
from compile_and_serve.runtime.sampling.ops import argmax_rows


class BlockDrafts:
    """Call `follow` after each step of the target, and `draft` before a step with drafts."""

    def __init__(self, compiled: CompiledDrafter, batch: InputBatch, state: Mapping[str, torch.Tensor]) -> None:
        """state: the keys and values of the drafter."""
        assert compiled.context is not None
        self._model, self._context = compiled.model, compiled.context.model
        self._batch, self._state = batch, state
        self._mask_token = compiled.drafter.mask_token
        self._platform = platform_of(next(iter(state.values())).device)
        ((self._group, self._source),) = compiled.borrowed.items()
        self._backend = compiled.backends[self._group]

    def follow(self, step: Step, hidden_TF: torch.Tensor) -> None:
        """Write the context of the step's tokens."""
        metadata = replace(
            step.metadata[self._source],
            backend=self._backend,
            num_seqs=0,
            max_query_len=1,
            query_start_loc_cpu=None,
            seq_lens_cpu=None,
            row_starts=None,
            row_seq_lens=None,
            row_block_table=None,
        )
        inputs = {HIDDEN_STATES: hidden_TF, "positions": step.inputs["positions"]}
        self._backend.plan(metadata)
        self._context(replace(step, inputs=inputs, state=self._state, metadata={self._group: metadata}))

    def draft(
        self,
        slots_S: torch.Tensor,
        known_S: torch.Tensor,
        counts_S: torch.Tensor,
        tokens_S: torch.Tensor,
        num_drafts: int,
        host: Mapping[str, np.ndarray] | None,
    ) -> torch.Tensor:
        """int64 [S, num_drafts]: the likeliest tokens. A block ends behind the drafts that its sequence was asked for. What is returned
        behind them means nothing.

        All int64 [S]: batch slots, positions of the last tokens, numbers of drafts (0: padding), last tokens. host: the last two of
        `DeviceDrafts._asked` for attention that plans on the host; None: it reads all lengths from the device.
        """
        num_seqs, block = len(slots_S), 1 + num_drafts
        offsets_B = torch.arange(block, device=slots_S.device)
        is_asked_SB = (offsets_B <= counts_S[:, None]) & (counts_S > 0)[:, None]
        positions_SB = known_S[:, None] + torch.minimum(offsets_B, counts_S[:, None])
        lens_S = torch.where(counts_S > 0, known_S + 1 + counts_S, 0).to(torch.int32)
        tokens_SB = torch.full_like(positions_SB, self._mask_token)
        tokens_SB[:, 0] = tokens_S
        table, size = self._batch.tables[self._source], self._batch.tokens_per_page[self._source]
        blocks_SM = table.of_slots(slots_S.clamp(max=self._batch.num_slots - 1))
        mapped_SB = blocks_SM.gather(1, positions_SB // size) * size + positions_SB % size
        most_tokens = table.num_columns * size
        lens_cpu = starts_cpu = None
        if host is not None:
            counts = host["counts"][:num_seqs]
            lens_cpu = np.repeat(host["positions"][:num_seqs] + 1 + counts, block).astype(np.int32)
            starts_cpu = np.arange(num_seqs * block + 1, dtype=np.int32)
            most_tokens = int(lens_cpu.max())
        # Each token is a sequence of its own that reads the whole block.
        metadata = AttentionMetadata(
            backend=self._backend,
            query_start_loc=torch.arange(num_seqs * block + 1, dtype=torch.int32, device=slots_S.device),
            seq_lens=lens_S.repeat_interleave(block, output_size=num_seqs * block),
            block_table=blocks_SM.repeat_interleave(block, dim=0),
            slot_mapping=mapped_SB.masked_fill(~is_asked_SB, -1).flatten(),
            num_seqs=num_seqs * block,
            num_tokens=num_seqs * block,
            max_query_len=1,
            max_seq_len=most_tokens,
            is_causal=False,
            query_start_loc_cpu=starts_cpu,
            seq_lens_cpu=lens_cpu,
        )
        if host is not None:
            self._backend.plan(metadata)
        if host is None:
            rows = (torch.arange(num_seqs, device=slots_S.device)[:, None] * block + offsets_B[1:]).flatten()
        else:  # only of drafts that were asked for, so that there are no more logits than a step of the target has
            is_wanted_SB = (np.arange(block) > 0) & (np.arange(block) <= counts[:, None])
            rows = self._platform.upload(np.flatnonzero(is_wanted_SB), through_pinned=True)
        inputs = {"input_ids": tokens_SB.flatten(), "positions": positions_SB.flatten(), "logits_indices": rows}
        step = Step(
            inputs=inputs,
            state=self._state,
            metadata={self._group: metadata},
            num_tokens=num_seqs * block,
            num_seqs=num_seqs * block,
            padded_tokens=num_seqs * block,
            padded_seqs=num_seqs * block,
            num_rows=len(rows),
            max_query_len=1,
            uses_optional=False,
        )
        with counting_no_experts():
            logits = self._model(step)[LOGITS]
        drafts = argmax_rows(logits)[0]
        if host is None:
            return drafts.view(num_seqs, num_drafts)
        return drafts.new_full((num_seqs, num_drafts), -1).masked_scatter_(is_asked_SB[:, 1:], drafts)
