"""`ModelSpec`: everything that the rest of the stack needs to know of a model beyond its `forward`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from compile_and_serve.custom_ops.quantization import QuantizedWeight

# How a module's weight [out, in] is cut over tensor-parallel ranks: by its outputs; by its inputs; by the tokens of an embedding
# or of an output head.
ShardStyle = Literal["colwise", "rowwise", "vocab"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps a token."""

    num_kv_heads: int
    head_dim: int

    def of_rank(self, tensor_parallel_size: int) -> KVCacheSpec:
        """What one of the ranks that share the layer keeps: its share of the heads, or one that several ranks keep."""
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // tensor_parallel_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model on the meta device, and what lies outside its `forward`.

    module: `forward(input_ids int64 [T], positions int64 [T], kv_caches list of [N, 2, K, P, E], logits_indices int64 [S])
        → logits [S, V]`; one kv cache a layer, in the order of `kv_cache_specs`.
    config: the checkpoint's config.json.
    kv_cache_specs: one a layer.
    weight_map: checkpoint tensor name → parameter name, where they differ; None: the tensor is not used and may be skipped.
    tp_plan: glob over module names → how its weight is sharded.
    max_model_len: longest sequence that the positions encode.
    buffers: name → value of the buffers that no checkpoint holds (RoPE frequencies); the module's own are on the meta device.
    quantized_weights: parameter name → how the checkpoint holds it, for those that it holds quantized.
    """

    module: nn.Module
    config: Mapping[str, Any]
    kv_cache_specs: tuple[KVCacheSpec, ...]
    vocab_size: int
    max_model_len: int
    weight_map: Mapping[str, str | None] = field(default_factory=dict)
    tp_plan: Mapping[str, ShardStyle] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    quantized_weights: Mapping[str, QuantizedWeight] = field(default_factory=dict)
