"""Long prompts in chunks of tokens, for products whose results are far larger than what reads them next can find in a cache."""

from __future__ import annotations

from itertools import pairwise

MAX_CHUNK_TOKENS = 2048
_UNIT = 256  # two tiles of tokens of a product: the two of a cluster


def token_chunks(num_tokens: int) -> list[slice]:
    """num_tokens, from 0 up, in as few chunks of at most MAX_CHUNK_TOKENS as there can be, equal up to `_UNIT`s.

    Of Llama-3.1-8B's layer over 16384 tokens on one H200 (`benchmarks.ops_gpu_tune --sections chunks`; h200-kernels-2026-11-22.jsonl in
    benchmarks/results): CUTLASS' product with SiLU-mul takes 5.74 ms in chunks and 6.49 at once, cuBLASLt's and a kernel behind it
    6.09 and 6.06; the MLP of float8 5.08 and 5.36. What writes less is faster at once: qkv, o and down of bfloat16. And the values
    between the products take less memory.
    """
    unit = min(_UNIT, MAX_CHUNK_TOKENS)
    units, chunks = -(-num_tokens // unit), -(-num_tokens // MAX_CHUNK_TOKENS)
    edges = [min(num_tokens, unit * (units * i // chunks)) for i in range(chunks + 1)] if chunks else []
    return [slice(start, end) for start, end in pairwise(edges)]
