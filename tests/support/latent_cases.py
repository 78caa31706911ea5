"""Operands for tests of latent attention, and a dense float64 reference without pages."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

SIZES = {"heads": 3, "nope": 16, "rope": 8, "values": 20, "latent": 24}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="test_attention_gpu.py runs the kernels on the GPU")


def arguments(
    tokens: int,
    pages: int,
    page_size: int,
    *,
    heads: int,
    nope: int,
    rope: int,
    values: int,
    latent: int,
    cache_dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, kv_a (both strided), norm weight, cos, sin, kv_b, cache."""
    merged = torch.randn(tokens, heads * (nope + rope) + latent + rope + 5)
    q_THE = merged[:, : heads * (nope + rope)].view(tokens, heads, nope + rope)
    kv_a_TE = merged[:, heads * (nope + rope) : -5]
    angles = torch.rand(tokens, rope // 2).repeat(1, 2) * 6
    cache = torch.randn(pages, page_size, latent + rope).to(cache_dtype)
    return [
        q_THE,
        kv_a_TE,
        torch.randn(latent),
        angles.cos() * 1.1,
        angles.sin() * 1.1,
        torch.randn(heads * (nope + values), latent) * 0.3,
        cache,
    ]


def expanded(args: list[torch.Tensor], scale: float, interleaved: bool, metadata: AttentionMetadata) -> torch.Tensor:
    """float64 attention over every head's keys and values. The cache holds the step's entries already. → [num_tokens, H, V]"""
    q_THE, _, norm_weight, cos, sin, kv_b, cache = (one.double() for one in args)
    heads, latent, rope, size = q_THE.shape[1], len(norm_weight), cos.shape[1], cache.shape[1]
    nope = q_THE.shape[2] - rope
    pairs = q_THE[..., nope:].unflatten(2, (rope // 2, 2) if interleaved else (2, rope // 2))
    first, second = pairs.unbind(3 if interleaved else 2)
    turn = torch.complex(cos[:, None, : rope // 2], sin[:, None, : rope // 2])
    turned = torch.complex(first, second) * turn
    q_rope = torch.cat((turned.real, turned.imag), dim=2)
    outputs = []
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        slots = [int(metadata.block_table[s, t // size]) * size + t % size for t in range(seq_len)]
        entries = cache.flatten(0, 1)[slots]
        kv = (entries[:, :latent] @ kv_b.T).unflatten(1, (heads, -1))
        begin, end = metadata.query_start_loc[s : s + 2].tolist()
        for t in range(begin, end):
            stop = seq_len - (end - 1 - t)
            scores = torch.einsum("hn,khn->hk", q_THE[t, :, :nope], kv[:stop, :, :nope])
            scores = scores + torch.einsum("hr,kr->hk", q_rope[t], entries[:stop, latent:])
            outputs.append(torch.einsum("hk,khv->hv", (scores * scale).softmax(-1), kv[:stop, :, nope:]))
    return torch.stack(outputs)
