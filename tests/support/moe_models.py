"""Tiny mixtures of experts that transformers writes, one for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.transformers_models import SIZES, write_random_model

_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 1}
_LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
# Changes to `SIZES`, where None removes one, and other settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "sliding_window": None},
    "Qwen2MoeForCausalLM": {**_QWEN, "shared_expert_intermediate_size": 80, "norm_topk_prob": False, "head_dim": None},
    "Qwen3MoeForCausalLM": {**_QWEN, "norm_topk_prob": True},
    "OlmoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48, "head_dim": None},
    "DeepseekV2ForCausalLM": {
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "DeepseekV3ForCausalLM": {
        **_LATENT,
        "q_lora_rank": 48,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "rope_parameters": YARN | {"mscale": 1.0},
    },
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
    },
    # from here on, the transformers package's own classes
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "PhimoeForCausalLM": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": None,
        "head_dim": None,
    },
    "GraniteMoeForCausalLM": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "head_dim": None,
        "logits_scaling": 3.0,
    },
    "Llama4ForCausalLM": {
        "num_local_experts": 6,
        "num_experts_per_tok": 1,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 24,
        "no_rope_layers": [1, 1, 0],
        "floor_scale": 8,
    },
}


def write_moe(folder: Path, architecture: str, **changes: Any) -> Path:
    """A folder with a random float32 model of the family."""
    settings = FAMILIES[architecture] | changes
    without = tuple(name for name in SIZES if name in settings and settings[name] is None)
    return write_random_model(folder, architecture, without=without, **settings)
