"""Splits long prompts into chunks of tokens, for products whose results are much larger than the L2 cache."""

from __future__ import annotations

from itertools import pairwise

_UNIT = 256  # the two tiles of a cluster


def max_chunk_tokens(num_outputs: int) -> int:
    """The most tokens of a chunk of a product with so many outputs. The results of 8192 tokens take at most 320 MiB in bfloat16."""
    return 8192 if num_outputs <= 20480 else 2048


def token_chunks(num_tokens: int, num_outputs: int) -> list[slice]:
    """Split num_tokens into as few chunks of at most `max_chunk_tokens` as possible, of equal size up to `_UNIT`.

    Over 16384 tokens of a layer of Llama-3.1-8B on one H200, CUTLASS' product with SiLU-mul takes 5.75 ms in chunks and 6.17 ms at once.
    Smaller products are faster in larger chunks: 8192 tokens of 1024 inputs and 6144 outputs take 0.14 ms at once and 0.18 ms in chunks of
    2048; of 2560 and 19456, 1.19 and 1.33 ms; of 4096 and 14336, 1.48 and 1.53 ms. The figures are of `benchmarks.ops_gpu_tune --sections
    chunks`, in benchmarks/results/h200-kernels-2026-11-25.jsonl. Chunks also bound the memory of the values between the products.
    Products that write less (qkv, o, down) are faster at once.
    """
    most = max_chunk_tokens(num_outputs)
    unit = min(_UNIT, most)
    units, chunks = -(-num_tokens // unit), -(-num_tokens // most)
    edges = [min(num_tokens, unit * (units * i // chunks)) for i in range(chunks + 1)] if chunks else []
    return [slice(start, end) for start, end in pairwise(edges)]
