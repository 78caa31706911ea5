"""A tiny random model of every family that generates, as transformers writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.moe_models import FAMILIES as MOE
from tests.support.moe_models import write_moe
from tests.support.recurrent_models import FAMILIES as RECURRENT
from tests.support.recurrent_models import write_recurrent
from tests.support.transformers_models import write_random_model

__all__ = ["DENSE", "MOE", "RECURRENT", "write_family"]

# Of the families without experts and recurrent state: changes to the sizes.
DENSE: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 16},
    "Qwen2ForCausalLM": {"head_dim": None},
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "Gemma3ForCausalLM": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "Phi3ForCausalLM": {"head_dim": None},  # in transformers' implementation
}


def write_family(folder: Path, architecture: str) -> Path:
    if architecture in MOE:
        return write_moe(folder, architecture)
    if architecture in RECURRENT:
        return write_recurrent(folder, architecture)
    changes = DENSE[architecture]
    without = tuple(name for name, value in changes.items() if value is None)
    return write_random_model(folder, architecture, without=without, **changes)
