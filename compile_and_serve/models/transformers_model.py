"""Builds a `ModelSpec` from an unmodified decoder class of the transformers package.

transformers' `AttentionInterface` routes attention to our attention op, at which the captured graph is split. The KV caches
are ours, positions are passed in, and there is no mask. All other code of the class is captured unchanged. A dry run on the
meta device finds the shape of every attention layer. It also detects anything but causal softmax attention, so that an
unsupported model is refused before anything is compiled.

Shape legend: T tokens of the step, S rows whose logits are needed, H query heads, K key/value heads, E head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.step import KVCacheSpec
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.spec import ModelSpec, ShardStyle, full_attention

ATTENTION = "compile_and_serve"  # our name in transformers' AttentionInterface
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the others' frequencies depend on the sequence length
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_DRY_TOKENS = 3


class TransformersModel(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache per layer, logits_indices int64 [S]) → logits [S, V].

    Its children are those of the transformers model, so that parameters have the checkpoint's names.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self._forward = model.forward

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        out = self._forward(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=logits_indices,
            kv_caches=kv_caches,
        )  # fmt: skip
        return out.logits[0]


def build_transformers_model(config: Mapping[str, Any], *, dtype: torch.dtype) -> ModelSpec:
    """Build the class that a config.json names on the meta device, with its parameters in `dtype`.

    Raises `ModelConfigError` if transformers lacks the class, or if the class needs more than causal softmax attention.
    """
    name = config["architectures"][0]
    model = _instantiate(name, config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.requires_grad_(False).eval()
    parameters = dict(model.named_parameters())
    unused: dict[str, str | None] = dict.fromkeys(n for n in model.all_tied_weights_keys if n not in parameters)
    unused |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": None for i in range(model.config.num_hidden_layers)}
    buffers = _buffer_values(name, model)
    module = TransformersModel(model).eval()
    return ModelSpec(
        module=module,
        # The computation also depends on the package's version, so the version is part of the artifacts' key.
        config={**config, "model_impl": f"transformers {transformers.__version__}"},
        state=(full_attention(_attention_layers(name, module, model.config)),),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_model_len=int(model.config.max_position_embeddings),
        weight_map=unused,
        tp_plan=_tp_plan(model),
        buffers=buffers,
    )


def _instantiate(name: str, config: Mapping[str, Any]) -> PreTrainedModel:
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise _unsupported(name, f"transformers {transformers.__version__} has no such model")
    cls: Any = found
    if not cls.can_generate() or not cls._supports_attention_backend:
        raise _unsupported(name, "the class does not allow its attention to be replaced")
    AttentionInterface.register(ATTENTION, _attention_forward)
    try:
        hf_config = cls.config_class.from_dict(dict(config))
        _check_config(name, hf_config)
        hf_config._attn_implementation = ATTENTION
        with torch.device("meta"):
            model = cls(hf_config)
        model.tie_weights()
    except ModelConfigError:
        raise
    except Exception as error:  # transformers raises many kinds of errors for an invalid config
        raise ModelConfigError(f"transformers cannot build {name} from this config: {_first_line(error)}") from error
    return model


def _check_config(name: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise _unsupported(name, "it has an encoder")
    if config.get_text_config() is not config:
        raise _unsupported(name, "it takes more than text")
    if any((getattr(config, field, None) or 0) > 1 for field in _EXPERTS):
        raise _unsupported(name, "it is a mixture of experts")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise _unsupported(name, f"its RoPE type is {rope_type!r}, but only {', '.join(ROPE_TYPES)} are supported")


def _buffer_values(name: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The values that transformers gives to buffers outside the checkpoint. Each buffer is on the CPU only while it is set."""
    values: dict[str, torch.Tensor] = {}
    persistent = model.state_dict().keys()
    for prefix, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        names = {leaf: f"{prefix}.{leaf}" if prefix else leaf for leaf in buffers}
        if not buffers:
            continue
        if kept := next((full for full in names.values() if full in persistent), None):
            raise _unsupported(name, f"its checkpoint contains the buffer {kept}")
        for leaf, buffer in buffers.items():
            module._buffers[leaf] = torch.full_like(buffer, float("nan"), device="cpu")
        model._init_weights(module)
        for leaf, buffer in buffers.items():
            values[names[leaf]] = module.get_buffer(leaf)
            module._buffers[leaf] = buffer
            if values[names[leaf]].isnan().any():
                raise _unsupported(name, f"transformers does not initialize its buffer {names[leaf]}")
    return values


def _tp_plan(model: PreTrainedModel) -> dict[str, ShardStyle]:
    """The config's own plan with full names, plus the vocabulary's. Empty if it needs more than colwise and rowwise linears."""
    plan = {
        pattern: style
        for pattern, style in (model.config.base_model_tp_plan or {}).items()
        if not style.startswith(("replicated", "embedding"))  # modules outside the plan are replicated
    }
    if not plan or any(style not in ("colwise", "rowwise") for style in plan.values()):
        return {}
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        **{f"{model.base_model_prefix}.{pattern}": style for pattern, style in plan.items()},
        **{name: "vocab" for name, module in model.named_modules() if module in vocabulary},
    }


def _attention_forward(
    module: nn.Module,
    q_1HTE: torch.Tensor,
    k_1KTE: torch.Tensor,
    v_1KTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. → [1, T, H, E]"""
    caches = kwargs.get("kv_caches")
    if caches is None:
        raise _unsupported(type(module).__name__, "its arguments do not reach its attention")
    if isinstance(caches, _DryRun):
        return caches.record(module, q_1HTE, k_1KTE, v_1KTE, attention_mask, kwargs), None
    scale = q_1HTE.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_THE, k_TKE, v_TKE = q_1HTE.transpose(1, 2)[0], k_1KTE.transpose(1, 2)[0], v_1KTE.transpose(1, 2)[0]
    return attention(q_THE, k_TKE, v_TKE, caches[module.layer_idx], scale)[None], None


class _DryRun:
    """Replaces the KV caches while the model runs on the meta device, and records the shape of each attention layer."""

    def __init__(self, name: str, max_len: int) -> None:
        self._name, self._max_len = name, max_len
        self.layers: dict[int, KVCacheSpec] = {}

    def record(
        self,
        module: nn.Module,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        attention_mask: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Check one call of attention and record its shape. → an uninitialized output [1, T, H, E]"""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        window = kwargs.get("sliding_window")
        causal = kwargs.get("is_causal")
        if window is not None and window < self._max_len:
            raise _unsupported(self._name, f"layer {layer} attends to a sliding window of {window} tokens")
        if kwargs.get("softcap") is not None:
            raise _unsupported(self._name, f"layer {layer} caps its attention scores")
        if kwargs.get("s_aux") is not None:
            raise _unsupported(self._name, f"layer {layer} has attention sinks")
        if attention_mask is not None:
            raise _unsupported(self._name, f"layer {layer} uses an attention mask")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _unsupported(self._name, f"layer {layer} attends to later tokens")
        if layer in self.layers:
            raise _unsupported(self._name, f"layer {layer} attends more than once")
        head_dim = q_1HTE.shape[3]
        if k_1KTE.shape != v_1KTE.shape or k_1KTE.shape[3] != head_dim:
            raise _unsupported(self._name, f"the heads of layer {layer}'s queries, keys and values differ in size")
        self.layers[layer] = KVCacheSpec(num_kv_heads=k_1KTE.shape[1], head_dim=head_dim)
        return torch.empty_like(q_1HTE.transpose(1, 2))


def _attention_layers(name: str, module: TransformersModel, config: PreTrainedConfig) -> tuple[KVCacheSpec, ...]:
    dry_run = _DryRun(name, config.max_position_embeddings)
    ids = torch.zeros(_DRY_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            module(ids, ids, dry_run, ids[:1])
    except ModelConfigError:
        raise
    except Exception as error:  # raised by the class's own code
        raise _unsupported(name, f"a dry run failed with {_first_line(error)}") from error
    if sorted(dry_run.layers) != list(range(config.num_hidden_layers)):
        raise _unsupported(
            name, f"only {len(dry_run.layers)} of its {config.num_hidden_layers} layers are attention layers"
        )
    layers = tuple(dry_run.layers[i] for i in range(config.num_hidden_layers))
    if len(set(layers)) > 1:
        raise _unsupported(name, "its layers differ in the number or size of their heads")
    return layers


def _unsupported(name: str, reason: str) -> ModelConfigError:
    return ModelConfigError(f"{name} cannot run in the transformers package's implementation: {reason}.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
