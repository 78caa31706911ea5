"""Drafts of Medusa heads: one pass over the hidden state of each sequence's last token makes all of them.

Shape legend: T tokens of the target's step, S sequences that get drafts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from compile_and_serve.custom_ops.state.metadata import AttentionMetadata, StepLengths
from compile_and_serve.custom_ops.step import HIDDEN_STATES, Step
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.drafters.medusa import DRAFT_TOKENS, medusa
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.device_drafts import TargetLayout
from compile_and_serve.runtime.drafting.hidden_drafts import HiddenDrafts, SequenceRows
from compile_and_serve.runtime.weights.joined import drafter_config


class Medusa(HiddenDrafts):
    """The heads keep nothing of the tokens before: following the target is keeping its hidden states. They give tokens, no distribution."""

    draws = False

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec:
        """See `DeviceDrafts`."""
        return medusa(drafter_config(config), target, dtype=dtype)

    def _next_tokens(self, step: Step, layout: TargetLayout | None, sampled: torch.Tensor | None) -> torch.Tensor:
        return self._one_row  # nobody reads them

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
        if slots is not None:
            self._hidden.index_copy_(0, slots, hidden_TD[rows])
        else:
            self._heads(hidden_TD[rows])  # as a warm-up

    def _new_drafts(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> torch.Tensor:
        return self._heads(self._hidden[self._asked.device["slots"][:num_seqs]])[:, :num_drafts]

    def _heads(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """int64 [S, number of heads]: the drafts."""
        num_seqs, unread = len(hidden_SD), self._one_row.expand(len(hidden_SD))
        lengths = StepLengths(
            query_start_loc=unread, seq_lens=unread, num_seqs=num_seqs, num_tokens=num_seqs, max_query_len=1, max_seq_len=1
        )
        return self._model(self._build_step(lengths, {}, {HIDDEN_STATES: hidden_SD}, num_rows=num_seqs))[DRAFT_TOKENS]
