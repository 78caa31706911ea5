"""DeepSeekMoE (arXiv:2401.06066, arXiv:2412.19437): layers with routed and shared experts, which GLM-4-MoE has too.

Shape legend: T tokens of the step, S rows whose logits are needed, D hidden size, E size of cos and sin, X experts, K experts per token,
V vocabulary.

Checkpoints have further layers for multi-token prediction after their last one (section 2.2). Each is a model of its own. At position i
the first one reads the hidden state of token i and the embedding of token i + 1, and predicts token i + 2, as an EAGLE head does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec, LatentCacheSpec
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError, number, positive_int
from compile_and_serve.models.config_fields import DECODER_FIELDS, DEEPSEEK_EXPERT_FIELDS
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.families.moe import MOE_TP_PLAN, Experts, MoeConfig, with_expert_parts
from compile_and_serve.models.layers import GatedMlp, RotaryEmbedding
from compile_and_serve.models.spec import ModelSpec, ShardStyle

Routing = tuple[Literal["softmax", "sigmoid"], Literal["greedy", "group_limited_greedy", "noaux_tc"]]
ROUTINGS: tuple[Routing, ...] = (("softmax", "greedy"), ("softmax", "group_limited_greedy"), ("sigmoid", "noaux_tc"))


DEEPSEEK_TP_PLAN: Mapping[str, ShardStyle] = {
    **MOE_TP_PLAN,
    "model.layers.*.self_attn.q_a_proj": "replicated",
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_a_proj_with_mqa": "replicated",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.mlp.shared_experts.gate_proj": "colwise",
    "model.layers.*.mlp.shared_experts.up_proj": "colwise",
    "model.layers.*.mlp.shared_experts.down_proj": "rowwise",
}
_MTP_TP_PLAN: Mapping[str, ShardStyle] = {
    **DEEPSEEK_TP_PLAN,
    "model.layers.*.embed_tokens": "vocab",
    "model.layers.*.eh_proj": "replicated",
    "model.layers.*.shared_head.head": "vocab",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekMoeConfig(MoeConfig):
    """The experts of a config.json.

    num_shared: number of shared experts, which are one MLP. has_bias: scores get a bias for the choice of experts. expert_scale: factor of
    the routed experts' sum. scoring, num_groups, top_groups, group_best: as in `cas::route`.
    """

    num_shared: int
    scoring: Literal["softmax", "sigmoid"]
    has_bias: bool
    expert_scale: float
    num_groups: int
    top_groups: int
    group_best: int

    @staticmethod
    def read(config: Mapping[str, Any], decoder: DecoderConfig, routing: Routing) -> DeepseekMoeConfig:
        """Read a config.json. routing: scoring_func and topk_method. Raises `ModelConfigError` for a missing or invalid value."""
        scoring, method = routing
        if config.get("norm_topk_prob") and scoring == "softmax":
            raise UnsupportedConfigError("norm_topk_prob is not supported with scoring_func 'softmax': set it to false.")
        if int(config.get("moe_layer_freq") or 1) != 1:
            raise UnsupportedConfigError(f"moe_layer_freq must be 1, got {config['moe_layer_freq']}.")
        num_experts, top_k = positive_int(config, "n_routed_experts"), positive_int(config, "num_experts_per_tok")
        has_groups = method != "greedy"
        num_groups = positive_int(config, "n_group", 1) if has_groups else 1
        top_groups = positive_int(config, "topk_group", 1) if has_groups else 1
        if num_experts % num_groups or top_groups > num_groups or top_k > num_experts // num_groups * top_groups:
            raise ModelConfigError(
                f"{top_k} of {num_experts} experts cannot be chosen from {top_groups} of {num_groups} groups: check "
                "num_experts_per_tok, n_routed_experts, topk_group and n_group."
            )
        num_dense = int(config.get("first_k_dense_replace") or 0)
        return DeepseekMoeConfig(
            hidden_size=decoder.hidden_size,
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=positive_int(config, "moe_intermediate_size"),
            renormalize=scoring == "sigmoid" and bool(config.get("norm_topk_prob", True)),
            sparse_layers=tuple(i >= num_dense for i in range(decoder.num_hidden_layers)),
            num_shared=int(config.get("n_shared_experts") or 0),
            scoring=scoring,
            has_bias=method == "noaux_tc",
            expert_scale=number(config, "routed_scaling_factor", 1.0),
            num_groups=num_groups,
            top_groups=top_groups,
            group_best=2 if method == "noaux_tc" else 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekMoeModelConfig:
    """A config.json of a family with these layers.

    layer_cache: what each layer keeps. make_attention: makes the attention of a layer: forward(x [T, D], cos [T, E], sin [T, E], the
    layer's cache) → [T, D].
    """

    decoder: DecoderConfig
    moe: DeepseekMoeConfig
    layer_cache: KVCacheSpec | LatentCacheSpec
    make_attention: Callable[[], nn.Module]


class Router(nn.Module):
    """Logits of experts: [T, D] → [T, X]. No `nn.Linear`, because quantized checkpoints do not quantize it.

    e_score_correction_bias: float32 [X], None without one; added to scores for the choice only.
    """

    def __init__(self, config: DecoderConfig, moe: DeepseekMoeConfig) -> None:
        super().__init__()
        num_experts = moe.num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts)) if moe.has_bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.weight)


class DeepseekMoe(nn.Module):
    """The experts that the router chooses, and shared experts, which every token goes through."""

    def __init__(self, config: DecoderConfig, moe: DeepseekMoeConfig) -> None:
        super().__init__()
        self.config = moe
        self.gate = Router(config, moe)
        self.experts = Experts(config, moe)
        if moe.num_shared:
            size = moe.intermediate_size * moe.num_shared
            self.shared_experts = GatedMlp(replace(config, intermediate_size=size))

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        """residual + the sum of all experts. [T, D], [T, D] → [T, D]"""
        if self.config.num_shared:
            residual_TD = residual_TD + self.shared_experts(x_TD)
        return residual_TD + self.routed(x_TD)

    def routed(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The sum of the chosen experts. [T, D] → [T, D]"""
        weights_TK, ids_TK = choose_experts(self.gate, x_TD, self.config)
        return self.experts(x_TD, ids_TK, weights_TK)


def choose_experts(gate: Router, x_TD: torch.Tensor, config: DeepseekMoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """→ weights and ids of the experts of each token, as `route` gives them"""
    return route(
        gate(x_TD),
        config.top_k,
        scoring=config.scoring,
        renormalize=config.renormalize,
        scale=config.expert_scale,
        bias_X=gate.e_score_correction_bias,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        group_best=config.group_best,
    )


class DeepseekMoeLayer(LlamaDecoderLayer):
    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_TE, sin_TE, cache)
        return self.mlp(self.post_attention_layernorm(x_TD), x_TD)


class DeepseekMoeForCausalLM(LlamaForCausalLM):
    """As `LlamaForCausalLM`, with a cache per layer as `config.layer_cache` says."""

    def __init__(self, config: DeepseekMoeModelConfig) -> None:
        super().__init__(config.decoder, deepseek_moe_layers(config))


def deepseek_moe_layers(config: DeepseekMoeModelConfig) -> Iterator[LlamaDecoderLayer]:
    """The layers of a decoder: forward(x [T, D], cos [T, E], sin [T, E], the layer's cache) → [T, D]."""
    decoder, moe = config.decoder, config.moe
    for is_sparse in moe.sparse_layers:
        if is_sparse:
            yield DeepseekMoeLayer(decoder, config.make_attention(), DeepseekMoe(decoder, moe))
        else:
            yield LlamaDecoderLayer(decoder, config.make_attention())


class SharedHead(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x_SD))


class MtpLayer(DeepseekMoeLayer):
    """A layer of the family, with experts, and what comes before and after it."""

    def __init__(self, config: DeepseekMoeModelConfig) -> None:
        decoder = config.decoder
        super().__init__(decoder, config.make_attention(), DeepseekMoe(decoder, config.moe))
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.enorm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.hnorm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * decoder.hidden_size, decoder.hidden_size, bias=False)
        self.shared_head = SharedHead(decoder)

    def joined(self, input_ids_T: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """The layer's input. [T, D]"""
        return self.eh_proj(torch.cat((self.enorm(self.embed_tokens(input_ids_T)), self.hnorm(hidden_TD)), dim=-1))


class MtpModel(nn.Module):
    """The layer under the name that it has in the checkpoint."""

    def __init__(self, config: DeepseekMoeModelConfig, number: int) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(config.decoder)
        self.layers = nn.ModuleDict({str(number): MtpLayer(config)})


class MtpForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], hidden_states [T, D], kv_caches, logits_indices int64 [S]) → logits [S, V] and
    hidden states [S, D].

    number: of the layer in the checkpoint. is_only: there is no other one, which would read the hidden states of all tokens, [T, D].
    """

    def __init__(self, config: DeepseekMoeModelConfig, number: int, *, is_only: bool) -> None:
        super().__init__()
        self.model = MtpModel(config, number)
        self.is_only = is_only

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (layer,) = self.model.layers.values()
        assert isinstance(layer, MtpLayer)
        x_TD = layer.joined(input_ids, hidden_states)
        cos_TE, sin_TE = self.model.rotary_emb(positions, x_TD.dtype)
        hidden_TD = layer(x_TD, cos_TE, sin_TE, kv_caches[0])
        hidden_SD = hidden_TD[logits_indices]
        return layer.shared_head(hidden_SD), hidden_SD if self.is_only else hidden_TD


def register_deepseek_moe(
    architecture: str, read: Callable[[Mapping[str, Any]], DeepseekMoeModelConfig], fields: Mapping[str, str]
) -> None:
    """Register an architecture with these layers. read: reads a config.json; raises `ModelConfigError`. fields: of its own."""

    def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
        parsed = read(config)
        return deepseek_moe_spec(DeepseekMoeForCausalLM, parsed, config, dtype)

    def build_mtp_layer(config: Mapping[str, Any], dtype: torch.dtype, number: int, is_only: bool) -> ModelSpec:
        parsed = read(config)
        moe = replace(parsed.moe, sparse_layers=tuple(i == number for i in range(number + 1)))
        make = partial(MtpForCausalLM, number=number, is_only=is_only)
        return deepseek_moe_spec(make, replace(parsed, moe=moe), config, dtype, num_layers=1, tp_plan=_MTP_TP_PLAN)

    register_model(
        architecture,
        build,
        features=("full attention", "experts"),
        build_mtp_layer=build_mtp_layer,
        fields={**DECODER_FIELDS, **DEEPSEEK_EXPERT_FIELDS, **fields},
    )


def deepseek_moe_spec(
    make: Callable[[DeepseekMoeModelConfig], nn.Module],
    parsed: DeepseekMoeModelConfig,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    num_layers: int | None = None,
    tp_plan: Mapping[str, ShardStyle] = DEEPSEEK_TP_PLAN,
) -> ModelSpec:
    """The spec of `make(parsed)`. config: the whole config.json. num_layers: of the module; None: all of the decoder's."""
    state = StateGroup(name=KV_CACHES, layers=(parsed.layer_cache,) * (num_layers or parsed.decoder.num_hidden_layers))
    spec = decoder_spec(lambda: make(parsed), parsed.decoder, config, dtype, state=[state], tp_plan=tp_plan)
    widen_choice_biases(spec.module)
    return with_expert_parts(spec, parsed.moe)


def widen_choice_biases(module: nn.Module) -> None:
    """Make the routers' biases float32: they decide between close scores."""
    for name, parameter in module.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data = parameter.data.float()
