"""Tiny random models and one step of them, for tests that need no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from compile_and_serve.compiler.capture.capture import CapturedGraph, capture
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.mesh import TENSOR, Mesh
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec, LatentCacheSpec
from compile_and_serve.custom_ops.step import DECODER_INPUTS, LOGITS, Step, running
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec

BLOCK_SIZE = 16
PAGE_SIZES = {KV_CACHES: BLOCK_SIZE}


def tiny_config(architecture: str = "LlamaForCausalLM", layers: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **changes,
    }


def tiny_spec(architecture: str = "LlamaForCausalLM", layers: int = 2, dtype: torch.dtype = torch.float32, **changes: Any) -> ModelSpec:
    return build_model(tiny_config(architecture, layers, **changes), dtype=dtype)


def fill(model: Model, seed: int = 0, rank: int = 0, mesh: Mesh | None = None) -> None:
    """Random weights of a rank, the same for every model with the same parameters, through the transforms. mesh: None: of tensors."""
    sources = {}
    for name, spec in sorted(model.source_specs.items()):
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        scale, shift = (0.1, 1.0) if "norm" in name else (0.2, 0.0)
        sources[name] = (torch.randn(spec.shape, generator=generator) * scale + shift).to(spec.dtype)
    coordinates = {TENSOR: rank} if mesh is None else mesh.coordinates(rank)
    for transform in model.transforms:
        model.assign(transform.target, transform.fn(*(sources[source] for source in transform.sources), coordinates=coordinates))
    model.finish_loading()


def zero_state(
    groups: Sequence[StateGroup], num_pages: int, tokens_per_page: Mapping[str, int], dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """State tensors by name, each an allocation of its own: [num_pages, …] of zeros. dtype: of the KV cache."""
    state: dict[str, torch.Tensor] = {}
    for group in groups:
        layout = group.layout(tokens_per_page.get(group.name, 1), dtype)
        pages = num_pages + num_pages * layout.pages_per_slot  # so many slots, and padding
        state |= {name: torch.zeros((pages, *one.shape), dtype=one.dtype, device=device) for name, one in layout.tensors.items()}
        state |= layout.column_tensors(device or torch.device("cpu"))
    return state


def caches(spec: ModelSpec, dtype: torch.dtype, num_blocks: int = 8, tensor_parallel_size: int = 1) -> dict[str, torch.Tensor]:
    """One rank's state by name."""
    groups = [group.of_rank(Mesh(tensor=tensor_parallel_size)) for group in spec.state]
    return zero_state(groups, num_blocks, PAGE_SIZES, dtype)


def tiny_step(tokens: list[int], start: int, state: Mapping[str, torch.Tensor], backend: AttentionBackend | None = None) -> Step:
    """One sequence's next tokens, with `start` tokens in the cache already; every token's logits are wanted."""
    backends = {} if backend is None else {KV_CACHES: backend}
    count = len(tokens)
    groups = [StateGroup(name=KV_CACHES, layers=tuple(map(_layer, state.values())))]
    return make_step(
        DECODER_INPUTS,
        groups,
        [(start, count)],
        state=state,
        tokens_per_page=PAGE_SIZES,
        backends=backends,
        token_ids=np.array(tokens, dtype=np.int64),
        row_indices=np.arange(count),
    )


def step(
    model: Model | CudaGraphRunner,
    tokens: list[int],
    start: int,
    state: Mapping[str, torch.Tensor],
    backend: AttentionBackend | None = None,
) -> torch.Tensor:
    """Logits [tokens, V] of `tiny_step`."""
    made = tiny_step(tokens, start, state, backend)
    with torch.no_grad():
        return (model.run(made).outputs if isinstance(model, CudaGraphRunner) else model(made))[LOGITS]


def _layer(cache: torch.Tensor) -> KVCacheSpec | LatentCacheSpec:
    if cache.dim() == 3:
        return LatentCacheSpec(latent_size=cache.shape[2], rope_size=0)
    return KVCacheSpec(num_kv_heads=cache.shape[2], head_dim=cache.shape[4])


def capture_decoder(module: nn.Module, dtype: torch.dtype, heads: Sequence[tuple[int, int]] = (), **options: Any) -> CapturedGraph:
    """Capture a module that takes a decoder's inputs. heads: (K, E) of each layer's KV cache."""
    layers = tuple(KVCacheSpec(num_kv_heads=count, head_dim=size) for count, size in heads)
    return capture(module, DECODER_INPUTS, [StateGroup(name=KV_CACHES, layers=layers)], dtype, **options)


def capture_spec(spec: ModelSpec, dtype: torch.dtype, **options: Any) -> CapturedGraph:
    """Capture a model as `compile_model` does."""
    return capture(spec.module, spec.inputs, spec.state, dtype, **options)


def plain_logits(spec: ModelSpec, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits at every position of a sequence, in one pass of the plain module over state of that dtype. → [T, V]"""
    count = len(tokens)
    sizes = {group.name: count for group in spec.state}
    made = make_step(
        spec.inputs,
        spec.state,
        [(0, count)],
        state=zero_state(spec.state, 1, sizes, dtype),
        tokens_per_page=sizes,
        token_ids=np.array(tokens, dtype=np.int64),
        row_indices=np.arange(count),
    )
    arguments = {group.name: group.argument(made.state) for group in spec.state}
    with torch.no_grad(), running(made.metadata):
        return spec.module(**made.inputs, **arguments)
