"""Which fields of a config.json a family reads, and what it makes of the others: they change no number, or the config is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from compile_and_serve.models.config import ModelConfigError, UnsupportedConfigError

_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a positive integer", lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0),
    "integer": ("an integer", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "number": ("a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "object": ("a JSON object", lambda value: isinstance(value, dict)),
    "class list": ("a list of class names", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value)),
}


def _fields(**kinds: str) -> dict[str, str]:
    """Field → its kind, a key of `_KINDS`, from names by kind."""
    return {name: kind.replace("_", " ") for kind, names in kinds.items() for name in names.split()}


DECODER_FIELDS = _fields(
    size="vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings",
    number="rms_norm_eps rope_theta partial_rotary_factor",
    flag="attention_bias mlp_bias tie_word_embeddings use_sliding_window",
    text="hidden_act",
    object="rope_parameters rope_scaling",
)
WINDOW_FIELDS = _fields(integer="sliding_window", number="rope_local_base_freq", list="layer_types")
EXPERT_FIELDS = _fields(
    integer="num_experts num_local_experts num_experts_per_tok decoder_sparse_step moe_intermediate_size shared_expert_intermediate_size",
    flag="norm_topk_prob",
    list="mlp_only_layers",
)
DEEPSEEK_EXPERT_FIELDS = _fields(
    integer="n_routed_experts num_experts_per_tok n_group topk_group first_k_dense_replace moe_layer_freq n_shared_experts "
    "moe_intermediate_size",
    number="routed_scaling_factor",
    flag="norm_topk_prob",
)
LATENT_FIELDS = _fields(
    integer="q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim", text="scoring_func topk_method", flag="rope_interleave"
)
# Of every config, whatever the family.
_COMMON = _fields(class_list="architectures", text="model_type")

# Fields of transformers' classes that change no number of a model that generates; quantization_config is checked by its format.
NO_EFFECT = frozenset(
    """
    transformers_version dtype torch_dtype use_cache return_dict output_attentions output_hidden_states output_router_logits
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    id2label label2id num_labels problem_type classifier_dropout chunk_size_feed_forward pretraining_tp auto_map quantization_config
    initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop router_aux_loss_coef router_jitter_noise
    max_window_layers num_mtp_layers num_nextn_predict_layers cache_implementation initial_context_length aux_loss_alpha seq_aux ep_size
    """.split()  # max_window_layers: without `use_sliding_window`, which families read
)


def check_fields(config: Mapping[str, Any], fields: Mapping[str, str], architecture: str) -> None:
    """Check the types of the fields that a family reads, and that none of the other fields changes a number.

    A field that neither the family nor transformers' config class has changes none, nor does one with the class's default.
    Raises `ModelConfigError` for a wrong type, and `UnsupportedConfigError` for a field that the family does not read.
    """
    for name, kind in {**fields, **_COMMON}.items():
        expected, is_right = _KINDS[kind]
        if config.get(name) is not None and not is_right(config[name]):
            raise ModelConfigError(f"{name} in the model's config must be {expected}, got {config[name]!r:.100}.")
    ignored = {*fields, *_COMMON, *NO_EFFECT}
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        ignored.add("sliding_window")  # there is none, or it is switched off
    others = [name for name in config if name not in ignored and name[0] != "_"]
    if not others or (config_class := _config_class(config, architecture)) is None:
        return
    known = {one.name for one in dataclasses.fields(config_class)}
    for name in others:
        if name in known and _differs_from_default(config_class, config, name):
            raise UnsupportedConfigError(f"{name} is {config[name]!r:.100}, which the native {architecture} does not read.")


def _config_class(config: Mapping[str, Any], architecture: str) -> Any:
    """transformers' config class; None if it has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes a second

    own = str(config.get("model_type"))
    if own in CONFIG_MAPPING and architecture.lower().startswith(own.replace("_", "") + "for"):
        return CONFIG_MAPPING[own]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # takes seconds

    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if architecture == (names if isinstance(names, str) else names[0]) and model_type in CONFIG_MAPPING:
            return CONFIG_MAPPING[model_type]
    return None


def _differs_from_default(config_class: Any, config: Mapping[str, Any], name: str) -> bool:
    """Whether transformers' config would be another one without the field."""
    without = {key: value for key, value in config.items() if key != name}
    try:
        given, default = (getattr(config_class.from_dict(dict(one)), name, None) for one in (config, without))
    except Exception as error:  # transformers raises many kinds of errors for an invalid config
        lines = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ModelConfigError(f"transformers cannot read the model's config: {lines}.") from error
    return bool(given != default)
