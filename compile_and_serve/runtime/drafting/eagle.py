"""Drafts of an EAGLE-1 head (arXiv:2401.15077), which reads the target's last hidden state."""

from __future__ import annotations

import torch

from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.drafters.eagle import eagle
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.hidden_drafts import HiddenDrafts
from compile_and_serve.runtime.weights.joined import drafter_config, drafter_shapes


class Eagle(HiddenDrafts):
    """An EAGLE head."""

    @classmethod
    def build_model(cls, config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec:
        """See `DeviceDrafts`."""
        return eagle(drafter_config(config), target, drafter_shapes(config), dtype=dtype)
