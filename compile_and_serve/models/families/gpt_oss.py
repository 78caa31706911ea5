"""gpt-oss: layers that alternate between a window and full attention, attention sinks, and experts with a clamped SwiGLU and biases.

Shape legend: T tokens of the step, D hidden size, H query heads, K key/value heads in attention and experts per token in the MLP,
E head size, X experts, F intermediate size of an expert. Views use -1 for head counts, so that sharded projections need no change here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.state.kind import ScoreFeature
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.custom_ops.weight_functions import Expression
from compile_and_serve.models.config import ModelConfigError, WindowedConfig
from compile_and_serve.models.config_fields import DECODER_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer
from compile_and_serve.models.families.mistral import WindowedForCausalLM
from compile_and_serve.models.families.moe import MoeConfig
from compile_and_serve.models.quantization.mxfp4 import mxfp4_experts
from compile_and_serve.models.spec import ModelSpec, ShardStyle

# What a config.json leaves out.
_DEFAULTS = {"attention_bias": True, "sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_TP_PLAN: Mapping[str, ShardStyle] = {**DECODER_TP_PLAN, "model.layers.*.mlp.router": "replicated", "model.layers.*.mlp.experts": "experts"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GptOssConfig:
    """limit: of the experts' activations."""

    decoder: WindowedConfig
    moe: MoeConfig
    limit: float

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GptOssConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        known = {**_DEFAULTS, **config}
        if not any(config.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
            known["rope_parameters"] = _ROPE
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


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    parsed = GptOssConfig.from_dict(config)
    decoder, scores = parsed.decoder, frozenset[ScoreFeature](["sinks"])
    make_layer = lambda group: LlamaDecoderLayer(decoder, GptOssAttention(decoder, group), GptOssMlp(parsed))  # noqa: E731
    make = partial(WindowedForCausalLM, decoder, make_layer)
    spec = decoder_spec(make, decoder, config, dtype, scores=scores, tp_plan=_TP_PLAN)
    return replace(spec, quantized_weights=_stored_weights(config, spec.module))


def _stored_weights(config: Mapping[str, Any], module: nn.Module) -> dict[str, StoredWeight]:
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


_FIELDS = {**DECODER_FIELDS, **WINDOW_FIELDS, **EXPERT_FIELDS, "experts_per_token": "integer", "swiglu_limit": "number"}
register_model("GptOssForCausalLM", build, features=("full attention", "sliding windows", "experts"), fields=_FIELDS)
