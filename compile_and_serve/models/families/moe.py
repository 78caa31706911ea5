"""Llama's block with a mixture of experts, which Mixtral, Qwen-MoE and OLMoE share. They differ in attention and routing.

Shape legend: T tokens of the step, D hidden size, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec
from compile_and_serve.models.families.llama import LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.layers import GatedMlp
from compile_and_serve.models.spec import ModelSpec, ShardStyle, TensorPart

MakeAttention = Callable[[DecoderConfig], nn.Module]

MOE_TP_PLAN: Mapping[str, ShardStyle] = {
    **DECODER_TP_PLAN,
    "model.layers.*.mlp.gate": "replicated",
    "model.layers.*.mlp.experts": "experts",
    "model.layers.*.mlp.shared_expert_gate": "replicated",
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """The experts of a config.json.

    top_k: experts of a token. shared_intermediate_size: of the shared expert, 0 without one. renormalize: whether a token's weights add
    up to 1. sparse_layers: which layers have experts; the others have one MLP.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    renormalize: bool = True
    sparse_layers: tuple[bool, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MoeConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        num_experts = positive_int(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
        top_k = positive_int(config, "num_experts_per_tok")
        if top_k > num_experts:
            raise ModelConfigError(f"num_experts_per_tok must be at most the number of experts, {num_experts}, got {top_k}.")
        step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
        return cls(
            hidden_size=positive_int(config, "hidden_size"),
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=positive_int(config, "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"),
            shared_intermediate_size=int(config.get("shared_expert_intermediate_size") or 0),
            renormalize=bool(config.get("norm_topk_prob", False)),
            sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(positive_int(config, "num_hidden_layers"))),
        )


class Experts(nn.Module):
    """The gated MLPs of all experts, stacked; gate rows before up rows."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        hidden, features = config.hidden_size, moe.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(moe.num_experts, 2 * features, hidden))
        self.down_proj = nn.Parameter(torch.empty(moe.num_experts, hidden, features))

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        return experts(x_TD, ids_TK, weights_TK, self.gate_up_proj, self.down_proj)


class MoeMlp(nn.Module):
    """Each token goes through the top_k experts that the router gives the most weight. [T, D] → [T, D]"""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.top_k, self.renormalize = moe.top_k, moe.renormalize
        self.gate = nn.Linear(config.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(config, moe)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, ids_TK = route(self.gate(x_TD), self.top_k, renormalize=self.renormalize)
        return self.experts(x_TD, ids_TK, weights_TK)


class SharedMoeMlp(MoeMlp):
    """As `MoeMlp`, plus a shared expert with a gate of its own (Qwen2-MoE)."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig) -> None:
        super().__init__(config, moe)
        self.shared_expert = GatedMlp(replace(config, intermediate_size=moe.shared_intermediate_size, mlp_bias=False))
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        shared_TD = torch.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)
        return super().forward(x_TD) + shared_TD


class MoeForCausalLM(LlamaForCausalLM):
    """As `LlamaForCausalLM`. make_attention: makes the attention of a layer."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig, make_attention: MakeAttention) -> None:
        moe_mlp = SharedMoeMlp if moe.shared_intermediate_size else MoeMlp
        mlps = (moe_mlp(config, moe) if is_sparse else None for is_sparse in moe.sparse_layers)
        super().__init__(config, (LlamaDecoderLayer(config, make_attention(config), mlp) for mlp in mlps))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How a family's checkpoints name the linears of expert e: `model.layers.0.{block}.experts.{e}.{gate}.weight`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"


def moe_spec(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    make_attention: MakeAttention,
    *,
    always_renormalize: bool = False,
    names: ExpertNames = ExpertNames(),
) -> ModelSpec:
    """The spec of `MoeForCausalLM`. always_renormalize: whatever the config says. Raises `ModelConfigError`."""
    decoder, moe = DecoderConfig.from_dict(config), MoeConfig.from_dict(config)
    if always_renormalize:
        moe = replace(moe, renormalize=True)
    spec = decoder_spec(lambda: MoeForCausalLM(decoder, moe, make_attention), decoder, config, dtype, tp_plan=MOE_TP_PLAN)
    return with_expert_parts(spec, moe, names)


def with_expert_parts(spec: ModelSpec, moe: MoeConfig, names: ExpertNames = ExpertNames(), base: str = "model.layers") -> ModelSpec:
    """The spec of a model whose checkpoints hold each linear of each expert as a tensor of its own. base: the name of its layers."""
    parts: dict[str, TensorPart] = {}
    renamed: dict[str, str | None] = {}
    for layer, is_sparse in enumerate(moe.sparse_layers):
        if not is_sparse:
            continue
        theirs, ours = f"{base}.{layer}.{names.block}", f"{base}.{layer}.mlp"
        for expert in range(moe.num_experts):
            for leaf, parameter, first_row in (
                (names.gate, "gate_up_proj", 0),
                (names.up, "gate_up_proj", moe.intermediate_size),
                (names.down, "down_proj", 0),
            ):
                parts[f"{theirs}.experts.{expert}.{leaf}.weight"] = TensorPart(
                    parameter=f"{ours}.experts.{parameter}",
                    index=expert,
                    first_row=first_row,
                    num_rows=moe.hidden_size if leaf == names.down else moe.intermediate_size,
                )
        if theirs != ours:
            renamed[f"{theirs}.gate.weight"] = f"{ours}.gate.weight"
    return replace(spec, parts=parts, weight_map={**spec.weight_map, **renamed})
