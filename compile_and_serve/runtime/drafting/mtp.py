"""Drafts of the layers for multi-token prediction that DeepSeek-V3's checkpoints bring."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from compile_and_serve.custom_ops.moe.expert_load import counting_no_experts
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.step import HIDDEN_STATES, Step
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.drafters.mtp import mtp
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.device_drafts import DraftSetup, TargetLayout
from compile_and_serve.runtime.drafting.hidden_drafts import HiddenDrafts, SequenceRows
from compile_and_serve.runtime.drafting.later_layers import LaterLayers
from compile_and_serve.runtime.sampling_params import SamplingParams


class Mtp(HiddenDrafts):
    """One layer drafts as an EAGLE head does. `LaterLayers` has the others."""

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec:
        """See `DeviceDrafts`."""
        assert config.speculative is not None
        return mtp(target, dtype=dtype, num_tokens=config.speculative.num_speculative_tokens)

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        self._later_layers = None
        layers = self._compiled.behind
        if layers:
            (source,) = self._compiled.borrowed.values()
            states = tuple(setup.allocate_state(one) for one in layers)
            batch = setup.batch
            self._later_layers = LaterLayers(layers, states, batch.num_slots, setup.num_pages, batch.tokens_per_page[source], self._hidden)

    def _can_skip_outputs(self) -> bool:
        return self._later_layers is None

    def add(self, slot: int, token_ids: np.ndarray, params: SamplingParams, num_prompt: int) -> None:
        """See `DeviceDrafts.add`."""
        super().add(slot, token_ids, params, num_prompt)
        if self._later_layers is not None:
            self._later_layers.add(slot)

    def _sequences(
        self, metadata: Mapping[str, AttentionMetadata], layout: TargetLayout, rows: torch.Tensor, *, has_sampled: bool
    ) -> SequenceRows | None:
        if self._later_layers is None:
            return None
        ends = next(iter(metadata.values())).query_start_loc[: len(layout.request_ids) + 1].long()
        sequences = SequenceRows(self._upload(layout.slots_S), ends[:-1], ends[1:] - 1)
        if has_sampled:
            place_of = {name: place for place, name in enumerate(layout.request_ids)}
            sampled_places = self._upload(np.array([place_of[name] for name in layout.sampled_ids]))
            sequences.lasts.index_copy_(0, sampled_places, rows)
        return sequences

    def _keep_hidden(
        self, step: Step, given: Mapping[str, torch.Tensor], slots: torch.Tensor | None, sequences: SequenceRows | None
    ) -> None:
        if self._later_layers is None:
            super()._keep_hidden(step, given, slots, sequences)
            return
        with counting_no_experts():
            self._later_layers.follow(step, given[HIDDEN_STATES], sequences)

    def _pass_model(self, slots_S: torch.Tensor) -> Callable[[int, Step], dict[str, torch.Tensor]]:
        later_layers = self._later_layers
        if later_layers is None:
            return super()._pass_model(slots_S)
        by_layer = later_layers.known_hidden(slots_S)

        def draft(number: int, step: Step) -> dict[str, torch.Tensor]:
            nonlocal by_layer
            given, by_layer = later_layers.draft(number, step, by_layer)
            return given

        return draft
