"""Batches for attention tests: metadata with shuffled blocks, and a dense float64 reference without pages.

Shape legend: T tokens of the step, S sequences, H query heads, K key/value heads, E head size, N cache blocks, P tokens a block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, AttentionBackend, Scores
from compile_and_serve.custom_ops.attention.int8_cache import int8_parts
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import SCALE_BYTES


@dataclass(frozen=True, kw_only=True)
class Batch:
    """query_lens, seq_lens: one per sequence. padding: further tokens that belong to no sequence."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    padding: int = 0
    block_size: int = 16


BATCHES = {
    "one token": Batch(query_lens=(1,), seq_lens=(1,)),
    "one decode, several key ranges": Batch(query_lens=(1,), seq_lens=(1100,)),
    "decodes": Batch(query_lens=(1,) * 6, seq_lens=(64, 65, 63, 1, 17, 200), padding=2),
    "prefill": Batch(query_lens=(150,), seq_lens=(150,)),
    "chunk after a cached prefix": Batch(query_lens=(70,), seq_lens=(600,), padding=1),
    "mixed": Batch(query_lens=(1, 5, 40, 1), seq_lens=(3, 70, 40, 300), padding=3),
    "odd block size": Batch(query_lens=(1, 9), seq_lens=(50, 20), block_size=5),
    # Kernels take 64 or more keys at a time, which begin inside a block here.
    "many keys in odd blocks": Batch(query_lens=(1, 9, 70), seq_lens=(203, 150, 131), block_size=5),
    "blocks of more keys than a step": Batch(query_lens=(1, 9, 70), seq_lens=(300, 150, 131), block_size=128),
}
DRAFTED_BLOCKS = Batch(query_lens=(5, 1, 8, 3), seq_lens=(5, 33, 700, 300), padding=2)


def make_metadata(
    batch: Batch, backend: AttentionBackend, *, window: int | None = None, chunked: bool = False
) -> tuple[AttentionMetadata, int]:
    """The batch as metadata over shuffled blocks. → (metadata, number of blocks); block 0 belongs to no sequence.

    Blocks that no token of the step reads are block 0, as after they were freed.
    """
    size = batch.block_size
    needed = [-(-length // size) for length in batch.seq_lens]
    num_blocks = sum(needed) + 2
    free = list(range(1, num_blocks))
    random.Random(0).shuffle(free)
    block_table = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    slots: list[int] = []
    starts = [0]
    for s, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        for column in range(needed[s]):
            block_table[s, column] = free.pop()
        slots += [int(block_table[s, t // size]) * size + t % size for t in range(seq_len - query_len, seq_len)]
        starts.append(starts[-1] + query_len)
        block_table[s, : first_visible(seq_len - query_len, window, chunked) // size] = 0
    metadata = AttentionMetadata(
        backend=backend,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.tensor(slots + [-1] * batch.padding),
        num_seqs=len(needed),
        num_tokens=starts[-1],
        max_query_len=max(batch.query_lens),
        max_seq_len=max(batch.seq_lens),
        window=window,
        chunked=chunked,
    )
    return metadata, num_blocks


def not_causal(metadata: AttentionMetadata) -> AttentionMetadata:
    """The batch, in which each new token reads all tokens of its sequence."""
    counts = metadata.query_start_loc.diff()
    return replace(
        metadata,
        query_start_loc=torch.arange(metadata.num_tokens + 1, dtype=torch.int32),
        seq_lens=metadata.seq_lens.repeat_interleave(counts),
        block_table=metadata.block_table.repeat_interleave(counts, dim=0),
        num_seqs=metadata.num_tokens,
        max_query_len=1,
        is_causal=False,
    )


def without_sequences(metadata: AttentionMetadata) -> AttentionMetadata:
    """The batch's keys and values alone, which are only written."""
    return replace(metadata, num_seqs=0, max_query_len=1)


def first_visible(position: int, window: int | None, chunked: bool) -> int:
    """The first token that the token at `position` attends to."""
    if window is None:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


def dense_attention(
    q_THE: torch.Tensor, kv_cache: torch.Tensor, scale: float, metadata: AttentionMetadata, scores: Scores = PLAIN_SCORES
) -> torch.Tensor:
    """float64 attention over a cache that already holds this step's keys and values. → [num_tokens, H, E]"""
    size, group = kv_cache.shape[3], q_THE.shape[1] // kv_cache.shape[2]
    outputs = []
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        slots = [int(metadata.block_table[s, t // size]) * size + t % size for t in range(seq_len)]
        kv = torch.stack([kv_cache[slot // size, :, :, slot % size] for slot in slots]).double()
        k_CHE, v_CHE = (kv[:, i].repeat_interleave(group, dim=1) for i in range(2))
        begin, end = metadata.query_start_loc[s : s + 2].tolist()
        for t in range(begin, end):
            stop = seq_len - (end - 1 - t)
            last = stop + (0 if scores.ahead_T is None else int(scores.ahead_T[t]))
            seen = slice(first_visible(stop - 1, metadata.window, metadata.chunked), last)
            scores_HC = torch.einsum("he,che->hc", q_THE[t].double(), k_CHE[seen]) * scale
            if scores.soft_cap:
                scores_HC = torch.tanh(scores_HC / scores.soft_cap) * scores.soft_cap
            if scores.alibi_slopes_H is not None:
                distance_C = torch.arange(seen.start, last) - (stop - 1)
                scores_HC = scores_HC + scores.alibi_slopes_H.double()[:, None] * distance_C.to(scores_HC.device)
            most_H = scores_HC.amax(1)
            weights_HC = (scores_HC - most_H[:, None]).exp()
            total_H = weights_HC.sum(1) + (0.0 if scores.sinks_H is None else (scores.sinks_H.double() - most_H).exp())
            outputs.append(torch.einsum("hc,che->he", weights_HC / total_H[:, None], v_CHE[seen]))
    return torch.stack(outputs)


def random_int8_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> torch.Tensor:
    """An int8 cache of normal values. → [N, 2, K, P, E + 4]"""
    cache = torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim + SCALE_BYTES, dtype=torch.int8)
    fill_int8_cache(cache)
    return cache


def fill_int8_cache(kv_cache: torch.Tensor) -> None:
    """Set an int8 cache to normal values."""
    values, scales = int8_parts(kv_cache)
    x = torch.randn(values.shape, device=values.device)
    scales.copy_(x.abs().amax(-1) / 127)
    values.copy_((x / scales[..., None]).round())


def dequantized(kv_cache: torch.Tensor) -> torch.Tensor:
    """Keys and values of an int8 cache. → float64 [N, 2, K, P, E]"""
    values, scales = int8_parts(kv_cache)
    return values.double() * scales.double()[..., None]
