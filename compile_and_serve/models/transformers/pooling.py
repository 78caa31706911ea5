"""Any model of the transformers package that pools: encoders, decoders without their output head, and classifiers of both.

The base model computes hidden states of the step's packed tokens. The rest of a class is its head: it runs on the rows that are pooled,
each as a sequence of one token. Which row of a sequence its head reads is found out with random weights.

Shape legend: T tokens of the step, L rows that are pooled, D hidden size, C classes, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from compile_and_serve.custom_ops.attention.sequence_mean import sequence_mean
from compile_and_serve.custom_ops.step import CLASS_LOGITS, HIDDEN_STATES, ROWS, StepOutput
from compile_and_serve.models.encoder_layers import TOKEN_TYPES
from compile_and_serve.models.pooling_spec import classifier_pooling
from compile_and_serve.models.spec import ModelSpec, PoolingSpec
from compile_and_serve.models.transformers.attention import RunningForward, Unsupported
from compile_and_serve.models.transformers.model import build

HeadPooling = Literal["cls", "last", "mean"]
_CLASSIFIES, _CLASSIFIES_TOKENS, _MASKED = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"
_PROBES = 5  # tokens of the sequence that a head is tried on


class _GivenRows(nn.Module):
    """Stands for the base model in the head: gives back rows [L, D] as sequences of one token each, or a whole sequence [1, B, D]."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(base, "pooler", None)
        self.pooler_activation = getattr(base, "pooler_activation", None)
        self.rows: Any = None

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        pooled = None
        if isinstance(self.pooler, nn.Linear):  # ALBERT's
            pooled = self.pooler(self.rows[:, 0])
            pooled = pooled if self.pooler_activation is None else self.pooler_activation(pooled)
        elif self.pooler is not None:
            pooled = self.pooler(self.rows)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.rows, pooler_output=pooled)


class _Head:
    """A class without its base model: rows → logits. Its parameters are those of the class's modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self.given = _GivenRows(base)
        self.model = copy.copy(model)
        self.model._modules = {name: self.given if child is base else child for name, child in model._modules.items()}
        text = model.config.get_text_config()
        if text.pad_token_id is None:
            text.pad_token_id = 0  # classes refuse several sequences without one
        self.token = int(text.pad_token_id == 0)  # any but that of padding

    def __call__(self, rows_LBD: torch.Tensor) -> torch.Tensor:
        self.given.rows = rows_LBD
        ids_LB = torch.full(rows_LBD.shape[:2], self.token, dtype=torch.int64, device=rows_LBD.device)
        logits = self.model.forward(input_ids=ids_LB).logits
        self.given.rows = None  # or the captured forward would return them, too
        return logits


class PooledTransformersModel(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], logits_indices int64 [L], …) → hidden states, class logits or weights of tokens.

    Its children are those of the transformers model, so that parameters have the checkpoint's names.
    """

    def __init__(self, model: PreTrainedModel, running: RunningForward, position_offset: int) -> None:
        super().__init__()
        base: Any = model.base_model
        name = type(model).__name__
        has_head = base is not model and name.endswith((_CLASSIFIES, _CLASSIFIES_TOKENS, _MASKED))
        for child_name, child in model.named_children():
            if has_head or base is model or child is base:
                self.add_module(child_name, child)
        self._base_forward = base.forward
        self._head = _Head(model) if has_head else None
        self._is_masked = name.endswith(_MASKED)
        self.head_pooling: HeadPooling | None = _head_pooling(model) if name.endswith(_CLASSIFIES) else None
        self.hidden_size = int(model.config.get_text_config().hidden_size)
        self._running = running
        self._position_offset = position_offset
        parameters = inspect.signature(base.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self.takes_types = "token_type_ids" in parameters and (getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self._options = {"use_cache": False} if "use_cache" in parameters else {}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        rope_length: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        **caches: Any,
    ) -> torch.Tensor:
        if self._position_offset:
            positions = positions + self._position_offset
        running = self._running
        running.caches, running.positions, running.rope_lengths, running.num_calls = caches, positions, rope_length, 0
        options: dict[str, Any] = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = positions[None]
        if token_types is not None:
            options["token_type_ids"] = token_types[None]
        hidden_TD = self._base_forward(input_ids=input_ids[None], **options).last_hidden_state[0]
        running.caches, running.positions, running.rope_lengths, running.num_calls = {}, None, None, 0
        if self.head_pooling == "mean":
            hidden_TD = sequence_mean(hidden_TD)
        rows_LD = hidden_TD[logits_indices]
        if self._head is None:
            return rows_LD
        logits = self._head(rows_LD[:, None])
        if self._is_masked:
            return torch.log1p(F.relu(logits[:, 0]))
        return logits[:, 0] if logits.dim() == 3 else logits


def _head_pooling(model: PreTrainedModel) -> HeadPooling:
    """Which row of a sequence a classifier's head reads: it is tried on the CPU, with random weights. Raises `Unsupported`."""
    tried = copy.copy(model)
    tried._modules = dict(model._modules)
    base: Any = model.base_model
    stub: Any = nn.Module()
    stub.pooler = getattr(base, "pooler", None)
    stub.pooler_activation = getattr(base, "pooler_activation", None)
    for name, child in model._modules.items():
        part = copy.deepcopy(stub if child is base else child)
        if part is None:
            continue
        part = part.to_empty(device="cpu").float()
        for tensor in (*part.parameters(), *part.buffers()):
            if tensor.is_floating_point():
                tensor.data = torch.randn(tensor.shape)
        tried._modules[name] = part
    tried.base_model_prefix = model.base_model_prefix
    head = _Head(tried)
    rows_1BD = torch.randn(1, _PROBES, int(model.config.get_text_config().hidden_size))
    with torch.no_grad():
        whole = head(rows_1BD)
        found: dict[HeadPooling, torch.Tensor] = {"cls": rows_1BD[:, :1], "last": rows_1BD[:, -1:], "mean": rows_1BD.mean(1, keepdim=True)}
        for pooling, row_11D in found.items():
            if whole.shape == (1, model.config.num_labels) and torch.allclose(head(row_11D), whole, rtol=1e-4, atol=1e-4):
                return pooling
    raise Unsupported("its head reads neither the first, nor the last, nor the mean of a sequence's hidden states")


def build_pooled(config: Mapping[str, Any], dtype: torch.dtype, code_folder: Path | None = None) -> ModelSpec:
    """Build the class that a config.json names for embeddings or classes, as `build` does for text. Raises `ModelConfigError`."""
    spec = build(config, dtype, code_folder, pooled=PooledTransformersModel)
    module, name = spec.module, str(config["architectures"][0])
    assert isinstance(module, PooledTransformersModel)
    both_ways = not spec.state
    if name.endswith(_MASKED):
        pooling = PoolingSpec(kind="embed", width=spec.vocab_size, pooling="max", is_normalized=False)
    elif name.endswith(_CLASSIFIES_TOKENS):
        pooling = replace(classifier_pooling(config), pooling="all")
    elif module.head_pooling is not None:
        pooling = replace(classifier_pooling(config), pooling="last" if module.head_pooling == "last" else "cls")
    else:
        pooling = PoolingSpec(kind="embed", width=module.hidden_size, pooling="mean" if both_ways else "last")
    return replace(
        spec,
        inputs=(*spec.inputs, TOKEN_TYPES) if module.takes_types else spec.inputs,
        outputs=(StepOutput(name=CLASS_LOGITS if pooling.kind == "classify" else HIDDEN_STATES, dims=(ROWS, pooling.width)),),
        pooling=pooling,
        whole_prompts=both_ways,
    )
