"""Tiny random recurrent models of the transformers package."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.transformers_models import write_random_model

_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 2048,
    "head_dim": 32,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}

# Before, transformers' norm of these classes took all groups together, which no published implementation does.
NORM_GROUPS = 2 if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24) else 1

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": NORM_GROUPS,
    "mamba_d_state": 32,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 32,
        "max_position_embeddings": 2048,
        "conv_bias": True,
    },
    "Qwen3_5ForCausalLM": _DELTA_NET,
    "Qwen3NextForCausalLM": {**_DELTA_NET, **_MOE, "mlp_only_layers": [1]},
    "Qwen3_5MoeForCausalLM": {**_DELTA_NET, **_MOE},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": NORM_GROUPS, "state_size": 32},
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {
        **_MAMBA,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 1.5,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
    },
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
        "routed_scaling_factor": 1.5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 32,
        "initializer_range": 0.1,  # squares amplify rounding
        "max_position_embeddings": 2048,
    },
    "MambaForCausalLM": {"state_size": 12},
    "FalconMambaForCausalLM": {"mixer_rms_eps": 1e-5},
    "JambaForCausalLM": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_dt_rank": 8,
        "max_position_embeddings": 2048,
    },
    "Lfm2MoeForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 2048,
    },
    "OlmoHybridForCausalLM": {
        **{key: value for key, value in _DELTA_NET.items() if key != "head_dim"},
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,  # transformers writes the weights of three convolutions of equal sizes
    },
    "KimiLinearForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 2048,
    },
    "FalconH1ForCausalLM": {
        **_MAMBA,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 1.1],
        "mlp_multipliers": [0.8, 1.3],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "embedding_multiplier": 1.4,
        "lm_head_multiplier": 0.8,
    },
}


_WITHOUT_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
# Names of `SIZES` that a class's config does not have.
WITHOUT: dict[str, tuple[str, ...]] = {
    "Lfm2ForCausalLM": ("head_dim",),
    "BambaForCausalLM": ("head_dim",),
    "GraniteMoeHybridForCausalLM": ("head_dim",),
    "NemotronHForCausalLM": ("num_hidden_layers",),
    "FalconH1ForCausalLM": ("head_dim",),
    **dict.fromkeys(("JambaForCausalLM", "OlmoHybridForCausalLM", "Lfm2MoeForCausalLM", "KimiLinearForCausalLM"), ("head_dim",)),
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM"), _WITHOUT_ATTENTION),
    "Mamba2ForCausalLM": ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
}


def write_recurrent(folder: Path, architecture: str) -> Path:
    """A folder with a random float32 model."""
    without = WITHOUT.get(architecture, ())
    return write_random_model(folder, architecture, without=without, **FAMILIES[architecture])
