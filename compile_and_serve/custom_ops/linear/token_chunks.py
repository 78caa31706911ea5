"""Splits long prompts into chunks of tokens, for products whose results are much larger than the L2 cache."""

from __future__ import annotations

from itertools import pairwise

MAX_CHUNK_TOKENS = 2048
_UNIT = 256  # the two tiles of a cluster


def token_chunks(num_tokens: int) -> list[slice]:
    """Split num_tokens into as few chunks of at most MAX_CHUNK_TOKENS as possible, of equal size up to `_UNIT`.

    Over 16384 tokens of a layer of Llama-3.1-8B on one H200, CUTLASS' product with SiLU-mul takes 5.74 ms in chunks and 6.49 ms at once
    (`benchmarks.ops_gpu_tune --sections chunks`; benchmarks/results/h200-kernels-2026-11-22.jsonl). Chunks also bound the memory of the
    values between the products. Products that write less (qkv, o, down) are faster at once.
    """
    unit = min(_UNIT, MAX_CHUNK_TOKENS)
    units, chunks = -(-num_tokens // unit), -(-num_tokens // MAX_CHUNK_TOKENS)
    edges = [min(num_tokens, unit * (units * i // chunks)) for i in range(chunks + 1)] if chunks else []
    return [slice(start, end) for start, end in pairwise(edges)]
