"""Drafts of an EAGLE-3 head (arXiv:2503.01840), which reads hidden states of three of the target's layers."""

from __future__ import annotations

import torch

from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.drafters.eagle import eagle3
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.hidden_drafts import HiddenDrafts
from compile_and_serve.runtime.weights.joined import drafter_config, drafter_shapes


class Eagle3(HiddenDrafts):
    """An EAGLE-3 head."""

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec:
        """See `DeviceDrafts`."""
        return eagle3(drafter_config(config), target, drafter_shapes(config), dtype=dtype)
