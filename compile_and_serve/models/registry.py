"""Builds a `ModelSpec` from a checkpoint's config.json, by Hugging Face architecture name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.step import KV_CACHES, WINDOW_CACHES, KVCacheSpec, ScoreFeature, StateGroup
from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError, WindowedConfig
from compile_and_serve.models.families.deepseek import DeepseekConfig
from compile_and_serve.models.families.deepseek_moe import DeepseekMoeForCausalLM, DeepseekMoeModelConfig
from compile_and_serve.models.families.gemma import GemmaConfig, GemmaForCausalLM
from compile_and_serve.models.families.glm4_moe import Glm4MoeConfig
from compile_and_serve.models.families.gpt_oss import GptOssConfig, GptOssForCausalLM
from compile_and_serve.models.families.gpt_oss import stored_weights as stored_gpt_oss_weights
from compile_and_serve.models.families.llama import LlamaAttention, LlamaForCausalLM
from compile_and_serve.models.families.mistral import Qwen2ForCausalLM, WindowedForCausalLM, mistral_config, qwen2_config
from compile_and_serve.models.families.moe import MoeConfig, MoeForCausalLM, OlmoeAttention, Qwen2Attention
from compile_and_serve.models.families.qwen3 import Qwen3Attention, Qwen3ForCausalLM
from compile_and_serve.models.layers import inverse_frequencies, max_positions
from compile_and_serve.models.quantization.stored_weights import with_stored_weights
from compile_and_serve.models.spec import ModelSpec, ShardStyle, TensorPart, full_attention

log = logging.getLogger(__name__)

ModelImpl = Literal["auto", "transformers"]

DECODER_TP_PLAN: Mapping[str, ShardStyle] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}
MOE_TP_PLAN: Mapping[str, ShardStyle] = {
    **DECODER_TP_PLAN,
    "model.layers.*.mlp.gate": "replicated",
    "model.layers.*.mlp.router": "replicated",
    "model.layers.*.mlp.experts": "experts",
    "model.layers.*.mlp.shared_expert_gate": "replicated",
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
}
DEEPSEEK_MOE_TP_PLAN: Mapping[str, ShardStyle] = {
    **MOE_TP_PLAN,
    "model.layers.*.self_attn.q_a_proj": "replicated",
    "model.layers.*.self_attn.q_b_proj": "colwise",
    "model.layers.*.self_attn.kv_a_proj_with_mqa": "replicated",
    "model.layers.*.self_attn.kv_b_proj": "colwise",
    "model.layers.*.mlp.shared_experts.gate_proj": "colwise",
    "model.layers.*.mlp.shared_experts.up_proj": "colwise",
    "model.layers.*.mlp.shared_experts.down_proj": "rowwise",
}
MTP_TP_PLAN: Mapping[str, ShardStyle] = {
    **DEEPSEEK_MOE_TP_PLAN,
    "model.layers.*.embed_tokens": "vocab",
    "model.layers.*.eh_proj": "replicated",
    "model.layers.*.shared_head.head": "vocab",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """How a family's checkpoints name the linears of expert e: `model.layers.0.{block}.experts.{e}.{gate}.weight`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    block: str = "mlp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture: its module class and its config's defaults.

    module: is called with the decoder's config, and with a `MoeConfig` if there are experts.
    default_head_dim: None means hidden_size / num_attention_heads.
    windowed: reads the config.json of a family whose layers may have a window; `module` is then called with its result alone.
    stored: how checkpoints hold the parameters that they hold in another form, quantized ones included.
    deepseek_moe: reads the config.json of a family with DeepSeek's layers; `module` is then called with its result alone.
    experts: how checkpoints name the linears of experts; None for a model without experts.
    """

    module: Callable[..., nn.Module]
    default_head_dim: int | None = None
    windowed: Callable[[Mapping[str, Any]], WindowedConfig | GemmaConfig | GptOssConfig] | None = None
    stored: Callable[[Mapping[str, Any], nn.Module], Mapping[str, StoredWeight]] | None = None
    deepseek_moe: Callable[[Mapping[str, Any]], DeepseekMoeModelConfig] | None = None
    experts: ExpertNames | None = None


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(module=LlamaForCausalLM),
    "Qwen3ForCausalLM": Family(module=Qwen3ForCausalLM, default_head_dim=128),
    "MistralForCausalLM": Family(module=WindowedForCausalLM, windowed=mistral_config),
    "Qwen2ForCausalLM": Family(module=Qwen2ForCausalLM, windowed=qwen2_config),
    "Gemma2ForCausalLM": Family(module=GemmaForCausalLM, windowed=GemmaConfig.from_dict),
    "Gemma3ForCausalLM": Family(module=GemmaForCausalLM, windowed=GemmaConfig.from_dict),
    "GptOssForCausalLM": Family(module=GptOssForCausalLM, windowed=GptOssConfig.from_dict, stored=stored_gpt_oss_weights),
    "MixtralForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: LlamaAttention(config)),
        experts=ExpertNames(gate="w1", up="w3", down="w2", block="block_sparse_moe"),
    ),
    "Qwen2MoeForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: Qwen2Attention(config)), experts=ExpertNames()
    ),
    "Qwen3MoeForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: Qwen3Attention(config)), experts=ExpertNames()
    ),
    "OlmoeForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: OlmoeAttention(config, moe.clip_qkv)), experts=ExpertNames()
    ),
    "DeepseekV2ForCausalLM": Family(module=DeepseekMoeForCausalLM, deepseek_moe=DeepseekConfig.from_dict, experts=ExpertNames()),
    "DeepseekV3ForCausalLM": Family(module=DeepseekMoeForCausalLM, deepseek_moe=DeepseekConfig.from_dict, experts=ExpertNames()),
    "Glm4MoeForCausalLM": Family(module=DeepseekMoeForCausalLM, deepseek_moe=Glm4MoeConfig.from_dict, experts=ExpertNames()),
}


ModelBuilder = Callable[[Mapping[str, Any], torch.dtype], ModelSpec]
_BUILDERS: dict[str, ModelBuilder] = {}


def register_model(architecture: str, build: ModelBuilder) -> None:
    """Have `build(config.json as a dictionary, dtype)` make the models of an architecture. It comes before our own families."""
    _BUILDERS[architecture] = build


def is_registered(architecture: str) -> bool:
    """Whether `register_model` was called for an architecture."""
    return architecture in _BUILDERS


def build_model(config: Mapping[str, Any], *, dtype: torch.dtype, model_impl: ModelImpl = "auto", requantize: bool = False) -> ModelSpec:
    """Build the module of a config.json on the meta device, with its parameters in `dtype`.

    A builder of `register_model` comes first and makes the whole spec, `quantized_weights` included; model_impl then has no effect.
    requantize: a .gguf file's blocks are dequantized, because the model will be quantized to another format.
    model_impl: "transformers" uses the transformers package's class; "auto" does so only without a native implementation of the config.
    Raises `ModelConfigError` for a config without an architecture, an unsupported architecture, invalid sizes, or an
    unsupported quantization.
    """
    architecture = architecture_of(config)
    if architecture in _BUILDERS:
        return _BUILDERS[architecture](config, dtype)
    if model_impl == "transformers" or architecture not in ARCHITECTURES:
        spec = _build_with_transformers(config, architecture, dtype)
    else:
        spec = _build_native_or_else(config, architecture, dtype)
    return spec if spec.quantized_weights else with_stored_weights(spec, requantize=requantize)


def _build_native_or_else(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> ModelSpec:
    """The native model, or transformers' class for a config that only it can run (another RoPE, say). A wrong config is an error."""
    try:
        return _build_native(config, architecture, dtype)
    except UnsupportedConfigError as native:
        try:
            spec = _build_with_transformers(config, architecture, dtype)
        except ModelConfigError:
            raise native from None
        log.info("The native %s is not used: %s", architecture, native)
        return spec


def _build_native(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> ModelSpec:
    family = ARCHITECTURES[architecture]
    if family.windowed is not None:
        spec = _build_windowed(family.module, family.windowed(config), config, dtype)
        return spec if family.stored is None else replace(spec, quantized_weights=family.stored(config, spec.module))
    if family.deepseek_moe is not None and family.experts is not None:
        return deepseek_moe_spec(family.module, family.deepseek_moe(config), family.experts, config, dtype)
    decoder = DecoderConfig.from_dict(config, default_head_dim=family.default_head_dim)
    state = full_attention([kv_cache_of(decoder)] * decoder.num_hidden_layers)
    if family.experts is None:
        module = on_meta(lambda: family.module(decoder), dtype)
        return decoder_spec(module, decoder, config, [state], DECODER_TP_PLAN)
    moe = MoeConfig.from_dict(config)
    module = on_meta(lambda: family.module(decoder, moe), dtype)
    return decoder_spec(module, decoder, config, [state], MOE_TP_PLAN, (family.experts, moe))


def _build_windowed(
    make: Callable[..., nn.Module], parsed: WindowedConfig | GemmaConfig | GptOssConfig, config: Mapping[str, Any], dtype: torch.dtype
) -> ModelSpec:
    decoder = parsed if isinstance(parsed, WindowedConfig) else parsed.decoder
    layer = kv_cache_of(decoder)
    scores = frozenset[ScoreFeature]() if isinstance(parsed, WindowedConfig) else parsed.scores
    groups = []
    for name in (KV_CACHES, WINDOW_CACHES):
        numbers = decoder.layer_numbers(with_window=name == WINDOW_CACHES)
        if numbers:
            groups.append(StateGroup(name=name, layers=(layer,) * len(numbers), window=decoder.windows[numbers[0]], scores=scores))
    tp_plan = MOE_TP_PLAN if isinstance(parsed, GptOssConfig) else DECODER_TP_PLAN
    return decoder_spec(on_meta(lambda: make(parsed), dtype), decoder, config, groups, tp_plan)


def deepseek_moe_spec(
    make: Callable[..., nn.Module],
    parsed: DeepseekMoeModelConfig,
    names: ExpertNames,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    number: int | None = None,
) -> ModelSpec:
    """The spec of a module with DeepSeek's layers. number: of its only layer, which has experts; None: all layers of the config."""
    decoder, moe = parsed.decoder, parsed.moe
    num_layers, tp_plan = decoder.num_hidden_layers, DEEPSEEK_MOE_TP_PLAN
    if number is not None:
        num_layers, tp_plan = 1, MTP_TP_PLAN
        moe = replace(moe, sparse_layers=tuple(i == number for i in range(number + 1)))
    module = on_meta(lambda: make(parsed), dtype)
    for name, parameter in module.named_parameters():
        if name.endswith("e_score_correction_bias"):  # it decides between close scores
            parameter.data = parameter.data.float()
    state = StateGroup(name=KV_CACHES, layers=(parsed.layer_cache,) * num_layers)
    return decoder_spec(module, decoder, config, [state], tp_plan, (names, moe))


def kv_cache_of(decoder: DecoderConfig) -> KVCacheSpec:
    """What each layer of a decoder keeps."""
    return KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim)


def decoder_spec(
    module: nn.Module,
    decoder: DecoderConfig,
    config: Mapping[str, Any],
    state: Sequence[StateGroup],
    tp_plan: Mapping[str, ShardStyle],
    experts: tuple[ExpertNames, MoeConfig] | None = None,
) -> ModelSpec:
    """The spec of a module with a decoder's inputs. experts: their names in the checkpoint, and which layers have them."""
    parts, renamed = ({}, {}) if experts is None else _expert_parts(*experts)
    ropes = {"model.rotary_emb.inv_freq": decoder.rope}
    if isinstance(decoder, WindowedConfig):
        ropes["model.window_rotary_emb.inv_freq"] = decoder.window_rope
    names = [name for name, _ in module.named_buffers()]
    return ModelSpec(
        module=module,
        config=config,
        state=tuple(state),
        vocab_size=decoder.vocab_size,
        max_model_len=max_positions(decoder),
        weight_map={**_unused(decoder), **renamed},
        parts=parts,
        tp_plan=tp_plan,
        buffers={name: inverse_frequencies(rope, decoder.rope_size) for name, rope in ropes.items() if name in names},
    )


def on_meta(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """`make()` on the meta device, with its parameters in `dtype`."""
    with torch.device("meta"):
        module = make()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.requires_grad_(False).eval()


def _unused(decoder: DecoderConfig) -> dict[str, str | None]:
    """Tensors of a checkpoint that the model does not read."""
    unused: dict[str, str | None] = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(decoder.num_hidden_layers)}
    if decoder.tie_word_embeddings:
        unused["lm_head.weight"] = None
    return unused


def _expert_parts(names: ExpertNames, moe: MoeConfig) -> tuple[dict[str, TensorPart], dict[str, str]]:
    """Checkpoint tensors that are parts of the stacked weights, and those that only have another name."""
    parts, renamed = {}, {}
    for layer, is_sparse in enumerate(moe.sparse_layers):
        if not is_sparse:
            continue
        theirs, ours = f"model.layers.{layer}.{names.block}", f"model.layers.{layer}.mlp"
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
    return parts, renamed


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names. Raises `ModelConfigError` if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelConfigError(
            'The model\'s config names no architecture: expected "architectures" to be one of '
            f"{', '.join(ARCHITECTURES)}, or another decoder of the transformers package."
        )
    return names[0]


def _build_with_transformers(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> ModelSpec:
    # Imported here because importing transformers takes seconds.
    from compile_and_serve.models.transformers.model import build_transformers_model

    spec = build_transformers_model(config, dtype=dtype)
    log.info("%s runs in the transformers package's implementation.", architecture)
    return spec
