"""Builds a `ModelSpec` from a checkpoint's config.json, by Hugging Face architecture name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.step import KV_CACHES, WINDOW_CACHES, KVCacheSpec, StateGroup
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, UnsupportedConfigError, WindowedConfig
from compile_and_serve.models.gemma import GemmaConfig, GemmaForCausalLM
from compile_and_serve.models.layers import inverse_frequencies, max_positions
from compile_and_serve.models.llama import LlamaAttention, LlamaForCausalLM
from compile_and_serve.models.mistral import Qwen2ForCausalLM, WindowedForCausalLM, mistral_config, qwen2_config
from compile_and_serve.models.moe import MoeConfig, MoeForCausalLM, OlmoeAttention, Qwen2Attention
from compile_and_serve.models.quantization_config import quantized_weights
from compile_and_serve.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM
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
    "model.layers.*.mlp.experts": "experts",
    "model.layers.*.mlp.shared_expert_gate": "replicated",
    "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
    "model.layers.*.mlp.shared_expert.up_proj": "colwise",
    "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
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
    experts: how checkpoints name the linears of experts; None for a model without experts.
    """

    module: Callable[..., nn.Module]
    default_head_dim: int | None = None
    windowed: Callable[[Mapping[str, Any]], WindowedConfig | GemmaConfig] | None = None
    experts: ExpertNames | None = None


ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(module=LlamaForCausalLM),
    "Qwen3ForCausalLM": Family(module=Qwen3ForCausalLM, default_head_dim=128),
    "MistralForCausalLM": Family(module=WindowedForCausalLM, windowed=mistral_config),
    "Qwen2ForCausalLM": Family(module=Qwen2ForCausalLM, windowed=qwen2_config),
    "Gemma2ForCausalLM": Family(module=GemmaForCausalLM, windowed=GemmaConfig.from_dict),
    "Gemma3ForCausalLM": Family(module=GemmaForCausalLM, windowed=GemmaConfig.from_dict),
    "MixtralForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: LlamaAttention(config)),
        experts=ExpertNames(gate="w1", up="w3", down="w2", block="block_sparse_moe"),
    ),
    "Qwen2MoeForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: Qwen2Attention(config)), experts=ExpertNames()
    ),
    "Qwen3MoeForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: Qwen3Attention(config)),
        experts=ExpertNames(),
    ),
    "OlmoeForCausalLM": Family(
        module=lambda config, moe: MoeForCausalLM(config, moe, lambda: OlmoeAttention(config, moe.clip_qkv)),
        experts=ExpertNames(),
    ),
}


ModelBuilder = Callable[[Mapping[str, Any], torch.dtype], ModelSpec]
_BUILDERS: dict[str, ModelBuilder] = {}


def register_model(architecture: str, build: ModelBuilder) -> None:
    """Have `build(config.json as a dictionary, dtype)` make the models of an architecture. It comes before our own families."""
    _BUILDERS[architecture] = build


def build_model(
    config: Mapping[str, Any], *, dtype: torch.dtype, model_impl: ModelImpl = "auto", requantize: bool = False
) -> ModelSpec:
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
    if requantize and (config.get("quantization_config") or {}).get("quant_method") == "gguf":
        return spec
    return replace(spec, quantized_weights=quantized_weights(config, spec.module))


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
        return _build_windowed(family.module, family.windowed(config), config, dtype)
    decoder = DecoderConfig.from_dict(config, default_head_dim=family.default_head_dim)
    moe = None if family.experts is None else MoeConfig.from_dict(config)
    module = _on_meta(lambda: family.module(decoder) if moe is None else family.module(decoder, moe), dtype)
    layers = range(decoder.num_hidden_layers)
    unused = _unused(decoder)
    parts: dict[str, TensorPart] = {}
    if family.experts is not None and moe is not None:
        parts, renamed = _expert_parts(family.experts, moe)
        unused |= renamed
    return ModelSpec(
        module=module,
        config=config,
        state=(
            full_attention(
                KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim) for _ in layers
            ),
        ),
        vocab_size=decoder.vocab_size,
        max_model_len=max_positions(decoder),
        weight_map=unused,
        parts=parts,
        tp_plan=DECODER_TP_PLAN if moe is None else MOE_TP_PLAN,
        buffers={"model.rotary_emb.inv_freq": inverse_frequencies(decoder.rope, decoder.head_dim)},
    )


def _build_windowed(
    make: Callable[..., nn.Module],
    parsed: WindowedConfig | GemmaConfig,
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> ModelSpec:
    decoder = parsed.decoder if isinstance(parsed, GemmaConfig) else parsed
    module = _on_meta(lambda: make(parsed), dtype)
    layer = KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim)
    has_cap = isinstance(parsed, GemmaConfig) and parsed.attention_cap > 0
    groups = []
    for name in (KV_CACHES, WINDOW_CACHES):
        numbers = decoder.layer_numbers(with_window=name == WINDOW_CACHES)
        if numbers:
            groups.append(
                StateGroup(
                    name=name, layers=(layer,) * len(numbers), window=decoder.windows[numbers[0]],
                    scores=frozenset(["soft_cap"]) if has_cap else frozenset(),
                )
            )  # fmt: skip
    buffers = {
        name: inverse_frequencies(rope, decoder.head_dim)
        for name, rope in (
            ("model.rotary_emb.inv_freq", decoder.rope),
            ("model.window_rotary_emb.inv_freq", decoder.window_rope),
        )
        if name in dict(module.named_buffers())
    }
    return ModelSpec(
        module=module,
        config=config,
        state=tuple(groups),
        vocab_size=decoder.vocab_size,
        max_model_len=max_positions(decoder),
        weight_map=_unused(decoder),
        tp_plan=DECODER_TP_PLAN,
        buffers=buffers,
    )


def _on_meta(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        module = make()
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module.requires_grad_(False).eval()


def _unused(decoder: DecoderConfig) -> dict[str, str | None]:
    """Tensors of a checkpoint that the model does not read."""
    unused: dict[str, str | None] = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(decoder.num_hidden_layers)
    }
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
                (names.gate, "gate_up_proj", 0), (names.up, "gate_up_proj", moe.intermediate_size), (names.down, "down_proj", 0),
            ):  # fmt: skip
                parts[f"{theirs}.experts.{expert}.{leaf}.weight"] = TensorPart(
                    parameter=f"{ours}.experts.{parameter}", index=expert, first_row=first_row,
                    num_rows=moe.hidden_size if leaf == names.down else moe.intermediate_size,
                )  # fmt: skip
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
    from compile_and_serve.models.transformers_model import build_transformers_model

    try:
        spec = build_transformers_model(config, dtype=dtype)
    except ModelConfigError as error:
        if architecture in ARCHITECTURES:
            raise
        raise ModelConfigError(f"{error} Native architectures: {', '.join(ARCHITECTURES)}.") from error
    log.info("%s runs in the transformers package's implementation.", architecture)
    return spec
