"""Drafts of a draft model: a smaller decoder with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.step import INPUT_IDS, POSITIONS, Step
from compile_and_serve.models.drafters.draft_model import draft_model
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.chained_drafts import ChainedDrafts
from compile_and_serve.runtime.drafting.device_drafts import TargetStep
from compile_and_serve.runtime.sampling.decode_step import DecodeStep
from compile_and_serve.runtime.weights.joined import drafter_config


class DraftModel(ChainedDrafts):
    """It needs nothing of the target but its tokens."""

    reads_hidden = False
    tokens_ahead = 1

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec:
        """See `DeviceDrafts`."""
        return draft_model(drafter_config(config), target, dtype=dtype, model_impl=config.model.model_impl)

    def _follow_step(self, target: TargetStep, *, keeps_state_only: bool) -> None:
        metadata = self._metadata_of(target.step, target.layout)
        self._plan(metadata)
        self._run_tokens(target.step, metadata, keeps_state_only=keeps_state_only)

    def _follow_decodes(self, step: DecodeStep, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool) -> None:
        self._fill_rows(step, metadata)
        self._run_tokens(step, metadata, keeps_state_only=keeps_state_only)

    def _run_tokens(self, step: Step, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool) -> None:
        inputs = self._inputs(step.inputs[INPUT_IDS.name], step.inputs[POSITIONS.name], self._one_row)
        self._run(self._step_like(step, inputs, metadata, num_rows=1), keeps_state_only=keeps_state_only)

    def _new_drafts(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> torch.Tensor:
        return self._chain(num_seqs, num_drafts, 0, host, self._last_tokens(num_seqs), None)
