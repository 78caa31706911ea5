"""`ModelSpec`: everything that the rest of the stack needs to know of a model beyond its `forward`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.mesh import AlongAxis, ColwiseParts
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec
from compile_and_serve.custom_ops.step import DECODER_INPUTS, LOGITS, StepInput, StepOutput
from compile_and_serve.custom_ops.step_data import LengthRegimes
from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.custom_ops.stored_weight import TensorPart as TensorPart

# How a module's weight [out, in] is cut over the ranks of the tensor axis (`AlongAxis` names another axis, `ColwiseParts` says what several
# outputs in one are): by its outputs; by its inputs;
# by the tokens of an embedding or of an output head; "experts": each expert's intermediate features, of the stacked weights of experts;
# "replicated": not at all.
ShardStyle = Literal["colwise", "rowwise", "vocab", "experts", "replicated"]


class ShardedModule(nn.Module, ABC):
    """A module that says itself how its linears are sharded."""

    @abstractmethod
    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        """By the linears' names in the module."""


def full_attention(layers: Iterable[KVCacheSpec]) -> StateGroup:
    """The state of layers that attend to every earlier token; the argument `kv_caches` of a model's `forward`."""
    return StateGroup(name=KV_CACHES, layers=tuple(layers))


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingSpec:
    """What a model computes of whole prompts, in place of next tokens. Its first output is pooled.

    kind: "embed" pools hidden states, "classify" the logits of classes. width: features of a row of that output.
    activation: turns pooled class logits into scores. labels: names of the classes. pooling: which rows become the result, unless the
    checkpoint's files or the options say otherwise; "all": of a classifier of tokens. is_normalized: embeddings get length 1.
    """

    kind: Literal["embed", "classify"]
    width: int
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    labels: tuple[str, ...] = ()
    pooling: Literal["last", "mean", "cls", "max", "all"] = "last"
    is_normalized: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model on the meta device, and what lies outside its `forward`.

    module: its `forward` takes each input and each state group by name and returns the outputs in order (one alone: the tensor).
        Plain decoders: `forward(input_ids int64 [T], positions int64 [T], kv_caches one [N, 2, K, P, E] a layer, logits_indices
        int64 [L]) → logits [L, V]`.
    config: the checkpoint's config.json.
    state: groups of layers that keep something from step to step.
    inputs, outputs: what a step takes and gives; the first output is the logits, or what `pooling` says.
    pooling: None for a model that generates tokens.
    whole_prompts: a token of a prompt may read those behind it, so that a step computes all of a prompt or none, and no other prompt can
        share its beginning.
    weight_map: checkpoint tensor name → parameter name, where they differ; None: the tensor is not used and may be skipped.
    parts: checkpoint tensor name → the part of a parameter that it is. A checkpoint has either the parameter or all of its parts.
    tp_plan: glob over module names → how its weight is sharded.
    max_model_len: longest sequence that the positions encode.
    buffers: name → value of the buffers that no checkpoint holds (RoPE frequencies); the module's own are on the meta device.
    quantized_weights: parameter name → how the checkpoint holds it, for those that it holds quantized or in another order.
    length_regimes: None: a token's keys and values follow from those before it alone, however long the sequence is.
    encoder: the model beside this one that computes the rows of media items: its first output is ("tokens", D), a row for each token of
        an item, and fills this model's state group of the kind `ENCODER_ROWS`. This model reads it by the input `ENCODER_ROW`. Or it fills
        a group of the kind `CrossAttention`: a row then has the keys and values of each layer, one layer behind the other. The encoder
        keeps no state; its inputs read arrays of media items; it has no tokens (`input_ids` are 0). max_model_len: tokens of the longest
        item. Both read one checkpoint, in which each knows the other's tensors (`weight_map`: None).
    decoder_start: tokens with which the decoder begins, of a model whose encoder reads the prompt (as the array `SOURCE_IDS`). Empty: the
        prompt is the decoder's.
    leading_rows: of an encoder: rows that its steps have before those of each item, such as a class token, whose outputs are dropped.
    eager_reason: of an encoder that runs as it is written, on one item at a time: why, as a clause. It takes tensors by name, which
        `whole_items.unpacked` gives, and returns a row for each token of the item. None: it is compiled.
    """

    module: nn.Module
    config: Mapping[str, Any]
    state: tuple[StateGroup, ...]
    vocab_size: int
    max_model_len: int
    weight_map: Mapping[str, str | None] = field(default_factory=dict)
    parts: Mapping[str, TensorPart] = field(default_factory=dict)
    tp_plan: Mapping[str, ShardStyle | AlongAxis | ColwiseParts] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quantized_weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    inputs: tuple[StepInput, ...] = DECODER_INPUTS
    outputs: tuple[StepOutput, ...] = (StepOutput(name=LOGITS),)
    pooling: PoolingSpec | None = None
    whole_prompts: bool = False
    leading_rows: int = 0
    length_regimes: LengthRegimes | None = None
    encoder: ModelSpec | None = None
    decoder_start: tuple[int, ...] = ()
    eager_reason: str | None = None

    @property
    def paged_state(self) -> tuple[StateGroup, ...]:
        """The groups whose state lies in pages of the pool."""
        return tuple(group for group in self.state if group.kind.unit != "rows")

    @property
    def cross_group(self) -> StateGroup | None:
        """The group that the encoder fills, where layers read it by cross-attention."""
        return next((group for group in self.state if group.kind.unit == "items"), None)

    @property
    def row_group(self) -> StateGroup:
        """The group that the encoder fills."""
        return next(group for group in self.state if group.kind.unit == "rows")
