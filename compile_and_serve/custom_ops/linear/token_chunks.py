"""Splits long prompts into chunks of tokens, for products whose results are much larger than the L2 cache."""

from __future__ import annotations

from itertools import pairwise

CHUNK_TOKENS, LARGE_CHUNK_TOKENS = 2048, 8192
_UNIT = 256  # the two tiles of a cluster
_FEW_VALUES = 50 << 20  # of a weight: 100 MiB in bfloat16


def bfloat16_chunk_tokens(num_values: int) -> int:
    """The most tokens of a chunk of a bfloat16 product with SiLU-mul, whose weight has so many values.

    Small products are faster in large chunks. On one H200, in µs, with the faster of CUTLASS' kernels (`benchmarks.ops_gpu_tune --sections
    chunks`; benchmarks/results/h200-kernels-2026-11-25.jsonl):

        tokens  inputs  outputs  chunks of 2048  chunks of 8192
         16384    4096    28672            5754  6171 (all at once)
         16384    4096    14336            2913  2996
         16384    2560    19456            2629  2442
         16384    2048    12288            1321  1193
          8192    1024     6144             180   139

    The results of 8192 tokens with 19456 outputs take 304 MiB.
    """
    return LARGE_CHUNK_TOKENS if num_values <= _FEW_VALUES else CHUNK_TOKENS


def token_chunks(num_tokens: int, max_tokens: int) -> list[slice]:
    """Split num_tokens into as few chunks of at most max_tokens as possible, of equal size up to `_UNIT`.

    Chunks also bound the memory of the values between two products. Products that write less (qkv, o, down) are faster at once.
    """
    unit = min(_UNIT, max_tokens)
    units, chunks = -(-num_tokens // unit), -(-num_tokens // max_tokens)
    edges = [min(num_tokens, unit * (units * i // chunks)) for i in range(chunks + 1)] if chunks else []
    return [slice(start, end) for start, end in pairwise(edges)]
