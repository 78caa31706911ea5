"""gpt-oss: layers that alternate between a window and full attention, attention sinks, and experts with a clamped SwiGLU and biases.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads in attention and experts per token in the MLP,
E head size, X experts, F intermediate size of an expert. Views use -1 for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.step import KV_CACHES, ScoreFeature
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.custom_ops.weight_functions import Expression
from compile_and_serve.models.config import ModelConfigError, WindowedConfig
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer
from compile_and_serve.models.families.mistral import WindowedForCausalLM
from compile_and_serve.models.families.moe import MoeConfig
from compile_and_serve.models.layers import apply_rope
from compile_and_serve.models.quantization.mxfp4 import mxfp4_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssConfig:
    """limit: of the experts' activations."""

    decoder: WindowedConfig
    moe: MoeConfig
    limit: float
    scores: frozenset[ScoreFeature] = frozenset(["sinks"])

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GptOssConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        known = {"attention_bias": True, "sliding_window": 128, "max_position_embeddings": 131072, **config}
        if "num_experts_per_tok" not in config and "experts_per_token" in config:
            known["num_experts_per_tok"] = config["experts_per_token"]
        return cls(
            decoder=WindowedConfig.read(known, has_window=lambda layer: layer % 2 == 0, default_head_dim=64),
            moe=MoeConfig.from_dict(known),
            limit=float(config.get("swiglu_limit") or 7.0),
        )


class GptOssAttention(LlamaAttention):
    """Llama's attention with biases, and a sink for each query head."""

    def __init__(self, config: WindowedConfig, group: str = KV_CACHES) -> None:
        super().__init__(config, group)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q_THE = self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        k_TKE = self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale, self.group, sinks_H=self.sinks)
        return self.o_proj(out_THE.flatten(1))


class GptOssExperts(nn.Module):
    """The gated MLPs of all experts, stacked; gate rows before up rows."""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        num_experts, hidden, features = config.moe.num_experts, config.moe.hidden_size, config.moe.intermediate_size
        self.limit = config.limit
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * features, hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * features))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, features))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden))

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return experts(
            x_TD,
            ids_TK,
            weights_TK,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_bias,
            self.down_proj_bias,
            activation="clamped_swiglu",
            limit=self.limit,
        )


class GptOssMlp(nn.Module):
    """Each token goes through the top_k experts; their weights are the softmax over their logits. [T, D] → [T, D]"""

    def __init__(self, config: GptOssConfig) -> None:
        super().__init__()
        self.top_k = config.moe.top_k
        self.router = nn.Linear(config.moe.hidden_size, config.moe.num_experts)
        self.experts = GptOssExperts(config)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = route(self.router(x_TD), self.top_k)
        return self.experts(x_TD, ids_TK, weights_TK)


class GptOssForCausalLM(WindowedForCausalLM):
    """As `WindowedForCausalLM`."""

    def __init__(self, config: GptOssConfig) -> None:
        decoder = config.decoder
        super().__init__(decoder, lambda group: LlamaDecoderLayer(decoder, GptOssAttention(decoder, group), GptOssMlp(config)))


def stored_weights(config: Mapping[str, Any], module: nn.Module) -> dict[str, StoredWeight]:
    """How a checkpoint holds the experts: gate and up rows alternate, and unquantized matrices are [inputs, outputs].

    Raises `ModelConfigError` for another quantization than MXFP4, and for sizes that are not whole blocks of it.
    """
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "mxfp4"):
        raise ModelConfigError(f"The checkpoint is quantized with {method!r}, but gpt-oss is supported with 'mxfp4' only.")
    stored: dict[str, StoredWeight] = {}
    for name, parameter in module.named_parameters():
        leaf = name.rpartition(".experts.")[2]
        is_gate_up, shape = leaf.startswith("gate_up_proj"), tuple(parameter.shape)
        if leaf in ("gate_up_proj", "down_proj") and method == "mxfp4":
            stored[name] = mxfp4_experts(name, shape, rows_alternate=is_gate_up)
        elif leaf in ("gate_up_proj", "down_proj", "gate_up_proj_bias"):
            value: Expression = name
            if leaf != "gate_up_proj_bias":
                value, shape = ("swap_inputs_and_outputs", name), (shape[0], shape[2], shape[1])
            tensor = StoredTensor(name=name, shape=shape, dtype=parameter.dtype)
            stored[name] = ArrangedWeight(value=("deinterleave_rows", value) if is_gate_up else value, tensors=(tensor,))
    return stored
