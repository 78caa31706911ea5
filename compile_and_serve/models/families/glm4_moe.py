"""GLM-4.5 and GLM-4.6: attention whose RoPE covers a part of each head. The other parts of a layer are in `deepseek_moe`.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads, E head size, R part of a head with RoPE. Views use -1
for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.families.deepseek_moe import DeepseekMoeConfig, DeepseekMoeModelConfig, register_deepseek_moe
from compile_and_serve.models.families.llama import LlamaAttention

# What a config.json leaves out.
_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "n_shared_experts": 1, "first_k_dense_replace": 1}


class Glm4MoeAttention(LlamaAttention):
    """Llama's attention with RoPE over the first R dimensions of a head, and no bias of the output. qk_norm: heads have norms."""

    def __init__(self, decoder: DecoderConfig, qk_norm: bool) -> None:
        super().__init__(decoder)
        self.o_proj = nn.Linear(decoder.num_attention_heads * self.head_dim, decoder.hidden_size, bias=False)
        if qk_norm:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=decoder.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=decoder.rms_norm_eps)


def read(config: Mapping[str, Any]) -> DeepseekMoeModelConfig:
    """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
    config = {**_DEFAULTS, **config}
    decoder = DecoderConfig.from_dict(config, allows_partial_rope=True)
    return DeepseekMoeModelConfig(
        decoder=decoder,
        moe=DeepseekMoeConfig.read(config, decoder, ("sigmoid", "noaux_tc")),
        layer_cache=KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim),
        make_attention=lambda: Glm4MoeAttention(decoder, bool(config.get("use_qk_norm", False))),
    )


register_deepseek_moe("Glm4MoeForCausalLM", read, {"use_qk_norm": "flag"})
