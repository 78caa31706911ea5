"""Tiny random models and one step of them, for tests that need no checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend, AttentionMetadata, attention_metadata
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec

BLOCK_SIZE = 16


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


def tiny_spec(
    architecture: str = "LlamaForCausalLM", layers: int = 2, dtype: torch.dtype = torch.float32, **changes: Any
) -> ModelSpec:
    return build_model(tiny_config(architecture, layers, **changes), dtype=dtype)


def fill(model: Model, seed: int = 0, rank: int = 0) -> None:
    """Random weights, the same for every model with the same parameters, through the model's transforms."""
    sources = {}
    for name, spec in sorted(model.source_specs.items()):
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        scale, shift = (0.1, 1.0) if "norm" in name else (0.2, 0.0)
        sources[name] = (torch.randn(spec.shape, generator=generator) * scale + shift).to(spec.dtype)
    for transform in model.transforms:
        model.assign(transform.target, transform.fn(*(sources[source] for source in transform.sources), rank=rank))
    model.finish_loading()


def caches(
    spec: ModelSpec, dtype: torch.dtype, num_blocks: int = 8, tensor_parallel_size: int = 1
) -> list[torch.Tensor]:
    """One rank's."""
    kept = [kv.of_rank(tensor_parallel_size) for kv in spec.kv_cache_specs]
    shapes = [(num_blocks, 2, kv.num_kv_heads, BLOCK_SIZE, kv.head_dim) for kv in kept]
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def step(
    model: Model, tokens: list[int], start: int, kv_caches: list[torch.Tensor], backend: AttentionBackend | None = None
) -> torch.Tensor:
    """Logits [tokens, V] of one sequence's next tokens, with `start` tokens in the cache already."""
    count = len(tokens)
    metadata = AttentionMetadata(
        backend=backend or TorchAttention(),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([start + count], dtype=torch.int32),
        block_table=torch.arange(kv_caches[0].shape[0], dtype=torch.int32)[None],
        slot_mapping=torch.arange(start, start + count),
        num_seqs=1,
        num_tokens=count,
        max_query_len=count,
        max_seq_len=start + count,
    )
    positions = torch.arange(start, start + count)
    metadata.backend.plan(metadata)
    with attention_metadata(metadata), torch.no_grad():
        return model(torch.tensor(tokens), positions, kv_caches, torch.arange(count))
