"""BERT and the encoders with its layers: RoBERTa, XLM-RoBERTa, DistilBERT, MPNet, ELECTRA; their classifiers and masked-LM heads.

They have no state: prompts are computed whole. A class without a head gives hidden states, a masked LM gives SPLADE's sparse embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.step import CLASS_LOGITS, DECODER_INPUTS, HIDDEN_STATES, ROWS, StepOutput
from compile_and_serve.models.config import ModelConfigError, UnsupportedConfigError, positive_int
from compile_and_serve.models.decoder_spec import on_meta
from compile_and_serve.models.encoder_layers import (
    ACTIVATIONS,
    TOKEN_TYPES,
    ClassifierHead,
    EncoderConfig,
    SparseHead,
    TextEncoder,
    distance_buckets,
)
from compile_and_serve.models.families import register_model
from compile_and_serve.models.meta_device import meta_device
from compile_and_serve.models.pooling_spec import classifier_pooling
from compile_and_serve.models.spec import ModelSpec, PoolingSpec, ShardStyle

# Our module → transformers' in BERT's layers.
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
_ATTENTION = {"query": "q", "key": "k", "value": "v", "attention_output": "o"}
_BASE = {
    "embeddings.words": "embeddings.word_embeddings",
    "embeddings.positions": "embeddings.position_embeddings",
    "embeddings.types": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_LM_HEAD = {"head.dense": "lm_head.dense", "head.norm": "lm_head.layer_norm"}
_DENSE_CLASSES = {"head.dense": "classifier.dense", "head.classes": "classifier.out_proj"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """How a model type names what BERT has, in config.json (`fields`) and in checkpoints.

    classes_by: the activation in the head of classes. pads_positions: positions begin behind that of the padding token. head_bias: of the
    masked LM's decoder, whose weight is the embedding's. has_types: tokens of the second text of a pair have another type.
    """

    base: str
    layers: str = "encoder.layer"
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    names: Mapping[str, str] = field(default_factory=lambda: _BASE)
    classes: Mapping[str, str] = field(default_factory=lambda: _DENSE_CLASSES)
    classes_by: str = "tanh"
    tokens_head: Mapping[str, str] = field(default_factory=lambda: _LM_HEAD)
    head_bias: str = "lm_head.bias"
    fields: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    pads_positions: bool = False
    num_buckets_field: str | None = None
    has_types: bool = True


_BERT = _Kind(
    base="bert",
    classes={"head.dense": "bert.pooler.dense", "head.classes": "classifier"},
    tokens_head={"head.dense": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.LayerNorm"},
    head_bias="cls.predictions.bias",
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "hidden_act": "gelu"},
)
_ROBERTA = replace(_BERT, base="roberta", classes=_DENSE_CLASSES, tokens_head=_LM_HEAD, head_bias="lm_head.bias", pads_positions=True)
_ELECTRA = replace(
    _BERT,
    base="electra",
    classes=_DENSE_CLASSES,
    classes_by="gelu",
    tokens_head={},
    names={**_BASE, "projection": "embeddings_project"},
    defaults={**_BERT.defaults, "embedding_size": 128},
)
_MPNET = _Kind(
    base="mpnet",
    layer={**_LAYER, **{ours: f"attention.attn.{theirs}" for ours, theirs in _ATTENTION.items()}, "attention_norm": "attention.LayerNorm"},
    names={**_BASE, "distance_bias": "encoder.relative_attention_bias"},
    defaults={"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "hidden_act": "gelu", "pad_token_id": 1}
    | {"relative_attention_num_buckets": 32},
    pads_positions=True,
    num_buckets_field="relative_attention_num_buckets",
    has_types=False,
)
_DISTILBERT = _Kind(
    base="distilbert",
    layers="transformer.layer",
    layer={
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "attention_output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "intermediate": "ffn.lin1",
        "output": "ffn.lin2",
        "output_norm": "output_layer_norm",
    },
    classes={"head.dense": "pre_classifier", "head.classes": "classifier"},
    classes_by="relu",
    tokens_head={"head.dense": "vocab_transform", "head.norm": "vocab_layer_norm"},
    head_bias="vocab_projector.bias",
    fields={"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    | {"hidden_act": "activation"},
    defaults={"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "activation": "gelu"},
    has_types=False,
)

_TP_PLAN: Mapping[str, ShardStyle] = {
    **{f"layers.*.{name}": "colwise" for name in ("query", "key", "value", "intermediate")},
    **{f"layers.*.{name}": "rowwise" for name in ("attention_output", "output")},
}


def _config(kind: _Kind, given: Mapping[str, Any]) -> EncoderConfig:
    config = {**kind.defaults, **{name: value for name, value in given.items() if value is not None}}

    def size(name: str, *, at_least: int = 1) -> int:
        field_name = kind.fields.get(name, name)
        value = config.get(field_name)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise ModelConfigError(f"{field_name} in the model's config must be an integer of at least {at_least}, got {value!r:.100}.")
        return value

    for name, wanted in (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False)):
        if config.get(name, wanted) != wanted:
            raise UnsupportedConfigError(f"{name} is {config[name]!r:.100}, but encoders are supported only with {wanted!r}.")
    activation = config.get(kind.fields.get("hidden_act", "hidden_act"))
    if activation not in ACTIVATIONS:
        raise UnsupportedConfigError(f"The activation {activation!r:.100} is not supported: expected one of {', '.join(ACTIVATIONS)}.")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if hidden % heads:
        raise ModelConfigError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}.")
    first = size("pad_token_id", at_least=0) + 1 if kind.pads_positions else 0
    return EncoderConfig(
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        embedding_size=size("embedding_size") if kind is _ELECTRA else hidden,
        num_positions=size("max_position_embeddings", at_least=first + 1),
        first_position=first,
        num_token_types=size("type_vocab_size", at_least=0) if kind.has_types else 0,
        eps=float(config["layer_norm_eps"]),
        activation=str(activation),
        num_buckets=size(kind.num_buckets_field, at_least=8) if kind.num_buckets_field else 0,
    )


def _new_head(kind: _Kind, head_of: str, sizes: EncoderConfig, config: Mapping[str, Any]) -> tuple[nn.Module, PoolingSpec, dict[str, str]]:
    """→ the head, what is pooled of its outputs, and all modules' names in checkpoints"""
    names = dict(kind.names)
    if head_of == "ForMaskedLM":
        pooling = PoolingSpec(kind="embed", width=sizes.vocab_size, pooling="max", is_normalized=False)
        return SparseHead(sizes), pooling, {**names, **kind.tokens_head}
    if head_of == "ColBERT":
        late = nn.Linear(sizes.hidden_size, positive_int(config, "dim", 128), bias=False)
        return late, PoolingSpec(kind="embed", width=late.out_features, pooling="all"), {**names, "head": "linear"}
    if head_of == "Model":
        return nn.Identity(), PoolingSpec(kind="embed", width=sizes.hidden_size, pooling="mean"), names
    of_tokens = head_of == "ForTokenClassification"
    pooling = replace(classifier_pooling(config), pooling="all" if of_tokens else "cls")
    names.update({"head.classes": "classifier"} if of_tokens else kind.classes)
    return ClassifierHead(sizes.hidden_size, pooling.width, None if of_tokens else kind.classes_by), pooling, names


def _build(kind: _Kind, head_of: str, config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    """head_of: "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification" or "ColBERT"."""
    sizes = _config(kind, config)
    with meta_device():
        head, pooling, names = _new_head(kind, head_of, sizes, config)
    module = on_meta(partial(TextEncoder, sizes, head), dtype)
    assert isinstance(module, TextEncoder)
    if isinstance(head, SparseHead):
        head.decoder.weight = module.embeddings.words.weight
    has_types = sizes.num_token_types > 0
    return ModelSpec(
        module=module,
        config=config,
        state=(),
        vocab_size=sizes.vocab_size,
        max_model_len=sizes.num_positions - sizes.first_position,
        weight_map=_weight_map(kind, module, names),
        tp_plan={} if sizes.num_buckets else _TP_PLAN,
        buffers={"distance_buckets": distance_buckets(sizes.num_buckets)} if sizes.num_buckets else {},
        inputs=(*DECODER_INPUTS, TOKEN_TYPES) if has_types else DECODER_INPUTS,
        outputs=(StepOutput(name=CLASS_LOGITS if pooling.kind == "classify" else HIDDEN_STATES, dims=(ROWS, pooling.width)),),
        pooling=pooling,
        whole_prompts=True,
    )


def _weight_map(kind: _Kind, module: nn.Module, names: Mapping[str, str]) -> dict[str, str | None]:
    """The checkpoint's names, with the base model's prefix and without it, and those that old checkpoints have for norms."""
    # Parts of a checkpoint that the model does not read.
    unused = [f"{prefix}{name}" for prefix in ("", f"{kind.base}.") for name in ("embeddings.position_ids", "pooler.dense.weight")]
    unused += [name.replace("weight", "bias") for name in unused if name.endswith("weight")]
    unused += ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.bias", "lm_head.decoder.weight"]
    unused += ["lm_head.decoder.bias", "lm_head.bias", "vocab_projector.weight", "vocab_projector.bias"]
    unused += [f"{kind.tokens_head[name]}.{leaf}" for name in kind.tokens_head for leaf in ("weight", "bias")]
    unused += ["cls.seq_relationship.weight", "cls.seq_relationship.bias"]
    found: dict[str, str | None] = dict.fromkeys(unused)
    for parameter, _ in module.named_parameters():
        part, _, leaf = parameter.rpartition(".")
        if part.startswith("layers."):
            _, number, name = part.split(".")
            theirs = f"{kind.layers}.{number}.{kind.layer[name]}"
        elif part == "head.decoder":
            found[kind.head_bias] = parameter
            continue
        else:
            theirs = names[part]
        spellings = [theirs, f"{kind.base}.{theirs}"] if not part.startswith("head.") else [theirs, theirs.removeprefix(f"{kind.base}.")]
        for spelling in spellings:
            found[f"{spelling}.{leaf}"] = parameter
            if theirs.endswith("LayerNorm"):
                found[f"{spelling}.{'gamma' if leaf == 'weight' else 'beta'}"] = parameter
    return found


for _kind, _prefixes in (
    (_BERT, ("Bert",)),
    (_ROBERTA, ("Roberta", "XLMRoberta")),
    (_DISTILBERT, ("DistilBert",)),
    (_MPNET, ("MPNet",)),
    (_ELECTRA, ("Electra",)),
):
    for _prefix in _prefixes:
        for _head in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"):
            if _head != "ForMaskedLM" or _kind.tokens_head:
                register_model(f"{_prefix}{_head}", partial(_build, _kind, _head), features=("attention both ways",))

register_model("HF_ColBERT", partial(_build, _BERT, "ColBERT"), features=("attention both ways",))
