"""All drafts of a sequence from one pass over a block of mask tokens (`models/drafters/dflash.py`).

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

from compile_and_serve.custom_ops.moe.expert_load import counting_no_experts
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata, StepLengths
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS, POSITIONS, Step
from compile_and_serve.models.drafters.dflash import dflash
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.device_drafts import DraftSetup, TargetStep
from compile_and_serve.runtime.drafting.model_drafts import ModelDrafts
from compile_and_serve.runtime.sampling.decode_step import DecodeStep
from compile_and_serve.runtime.weights.joined import drafter_config


class DFlash(ModelDrafts):
    """Following the target is writing the context of its tokens."""

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec:
        """See `DeviceDrafts`."""
        return dflash(drafter_config(config), target, dtype=dtype)

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        assert self._compiled.context is not None
        self._context = self._compiled.context.model
        self._mask_token = self._compiled.drafter.mask_token
        ((self._group, self._source),) = self._compiled.borrowed.items()
        self._backend = self._compiled.backends[self._group]

    def _can_skip_outputs(self) -> bool:
        return False  # the model that follows is another one

    def _follow_step(self, target: TargetStep, *, keeps_state_only: bool) -> None:
        self._write_context(target.step, target.outputs[HIDDEN_STATES])

    def _follow_decodes(self, step: DecodeStep, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool) -> None:
        self._write_context(step, self._hidden_rows[: step.padded_tokens])

    def _write_context(self, step: Step, hidden_TF: torch.Tensor) -> None:
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
        inputs = {HIDDEN_STATES: hidden_TF, POSITIONS.name: step.inputs[POSITIONS.name]}
        self._backend.plan(metadata)
        self._context(replace(step, inputs=inputs, state=self._state, metadata={self._group: metadata}))

    def _new_drafts(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> torch.Tensor:
        """A block ends behind the drafts that its sequence was asked for."""
        slots_S, counts_S = (self._asked.device[name][:num_seqs] for name in ("slots", "counts"))
        known_S, tokens_S = self._known_positions()[:num_seqs], self._last_tokens(num_seqs)
        block = 1 + num_drafts
        offsets_B = torch.arange(block, device=slots_S.device)
        is_asked_SB = (offsets_B <= counts_S[:, None]) & (counts_S > 0)[:, None]
        positions_SB = known_S[:, None] + torch.minimum(offsets_B, counts_S[:, None])
        lens_S = torch.where(counts_S > 0, known_S + 1 + counts_S, 0).to(torch.int32)
        tokens_SB = torch.full_like(positions_SB, self._mask_token)
        tokens_SB[:, 0] = tokens_S
        table, size = self._batch.token_tables[self._source], self._batch.tokens_per_page[self._source]
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
        num_tokens = num_seqs * block
        lengths = StepLengths(
            query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32, device=slots_S.device),
            seq_lens=lens_S.repeat_interleave(block, output_size=num_tokens),
            num_seqs=num_tokens,
            num_tokens=num_tokens,
            max_query_len=1,
            max_seq_len=most_tokens,
            is_causal=False,
            query_start_loc_cpu=starts_cpu,
            seq_lens_cpu=lens_cpu,
        )
        pages = {self._group: (blocks_SM.repeat_interleave(block, dim=0), mapped_SB.masked_fill(~is_asked_SB, -1).flatten())}
        if host is None:
            rows = (torch.arange(num_seqs, device=slots_S.device)[:, None] * block + offsets_B[1:]).flatten()
        else:  # only of drafts that were asked for, so that there are no more logits than a step of the target has
            is_wanted_SB = (np.arange(block) > 0) & (np.arange(block) <= counts[:, None])
            rows = self._upload(np.flatnonzero(is_wanted_SB), through_pinned=True)
        inputs = self._inputs(tokens_SB.flatten(), positions_SB.flatten(), rows)
        step = self._build_step(lengths, pages, inputs, num_rows=len(rows), plans=host is not None)
        with counting_no_experts():
            logits = self._model(step)[LOGITS]
        drafts = self._choose(logits, slots_S[rows // block], positions_SB.flatten()[rows])
        if host is None:
            return drafts.view(num_seqs, num_drafts)
        return drafts.new_full((num_seqs, num_drafts), -1).masked_scatter_(is_asked_SB[:, 1:], drafts)
