"""`distance_attention` against sums over pairs of tokens in float64."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.attention import distance_attention as file
from compile_and_serve.custom_ops.attention.distance_attention import distance_attention
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import running
from compile_and_serve.models.families.t5 import buckets

HEADS, SIZE, PAGE, FARTHEST = 3, 8, 4, 6
LENGTHS, NEW = [11, 3, 1], [1, 3, 1]  # of each sequence, and how many of its tokens are in the step


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_each_distance_has_its_bias(num_padding: int, cache_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes and a prompt together, more of them than are gathered at once; nothing is written for padding."""
    monkeypatch.setattr(file, "_TOKENS_AT_ONCE", 2)
    size = SIZE + 4 if cache_dtype == torch.int8 else SIZE
    cache = torch.zeros(9, 2, HEADS, PAGE, size, dtype=cache_dtype)
    if cache_dtype == torch.float32:
        cache.fill_(torch.nan)
    table = torch.tensor([[5, 2, 7], [3, 0, 0], [8, 0, 0]], dtype=torch.int32)
    columns_F, bias_HR = buckets(6, FARTHEST, both_ways=False), torch.randn(HEADS, 6)
    tokens = [torch.randn(3, length, HEADS, SIZE) for length in LENGTHS]

    def run(begins: list[int], ends: list[int], padding: int) -> torch.Tensor:
        given = torch.cat([one[:, begin:end] for one, begin, end in zip(tokens, begins, ends, strict=True)], dim=1)
        given = torch.cat([given, torch.randn(3, padding, HEADS, SIZE)], dim=1)
        places = [torch.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        slots = torch.cat([table[i, one // PAGE].long() * PAGE + one % PAGE for i, one in enumerate(places)])
        counts = torch.tensor([0, *(len(one) for one in places)])
        metadata = AttentionMetadata(
            backend=None,
            block_table=table,
            slot_mapping=torch.cat([slots, torch.full((padding,), -1)]),
            query_start_loc=counts.cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            num_seqs=3,
            num_tokens=len(slots),
            max_query_len=int(counts.max()),
            max_seq_len=max(ends),
        )
        with running({KV_CACHES: metadata}):
            return distance_attention(given[0], given[1], given[2], cache, 0.5, columns_F, bias_HR)

    before = [length - new for length, new in zip(LENGTHS, NEW, strict=True)]
    run([0, 0, 0], before, 0)
    last = cache[-1].clone()
    out_THE = run(before, LENGTHS, num_padding)
    if cache_dtype == torch.float32:  # an int8 page has its scales behind its values
        assert torch.equal(cache[-1, :, :, 1:].nan_to_num(), last[:, :, 1:].nan_to_num())
    assert out_THE.isfinite().all()
    first = 0
    for one, length, new in zip(tokens, LENGTHS, NEW, strict=True):
        q, k, v = one.double()
        distance = torch.arange(length) - torch.arange(length)[:, None]
        bias = bias_HR.double()[:, columns_F[distance.clamp(-FARTHEST, FARTHEST) + FARTHEST]]
        scores = torch.einsum("ihe,jhe->hij", q, k) * 0.5 + bias
        wanted = torch.einsum("hij,jhe->ihe", scores.masked_fill(distance > 0, -torch.inf).softmax(-1), v)[-new:]
        tolerance = 0.1 if cache_dtype == torch.int8 else 1e-5
        torch.testing.assert_close(out_THE[first : first + new].double(), wanted, atol=tolerance, rtol=tolerance)
        first += new


def test_buckets_are_those_of_transformers() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-128, 129)
    for both_ways in (False, True):
        wanted = T5Attention._relative_position_bucket(distances, both_ways, 32, 128)
        assert torch.equal(buckets(32, 128, both_ways=both_ways), wanted)
