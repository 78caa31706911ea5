"""`cross_attention` on each backend, against torch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.attention.cpu_backend import CpuAttention
from compile_and_serve.custom_ops.attention.cross_attention import cross_attention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.state.cross import CROSS_CACHES, CrossAttention
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import running
from compile_and_serve.runtime.runner.cross_encoder import write_rows

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 4


def _backend(name: str) -> AttentionBackend:
    if name == "triton":
        triton = pytest.importorskip("triton")
        from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention

        if not triton.knobs.runtime.interpret:
            pytest.skip("Triton's interpreter is off")
        return TritonAttention()
    if name == "cpu":
        if not load_cpu_kernels():
            pytest.skip("there is no C++ compiler")
        return CpuAttention()
    return TorchAttention()


@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [3, 1, 2]])
def test_tokens_read_the_rows_of_their_request(name: str, query_lens: list[int]) -> None:
    """Rows that are no multiple of a page, a request without rows, and padding."""
    backend = _backend(name)
    rows = [9, 0, 6]
    num_padding = 0 if max(query_lens) == 1 else 2
    num_tokens = sum(query_lens) + num_padding
    q_THE = torch.randn(num_tokens, HEADS, SIZE)
    cache = torch.full((8, 2, KV_HEADS, PAGE, SIZE), torch.nan)
    table = torch.tensor([[5, 2, 7], [0, 0, 0], [1, 6, 0]], dtype=torch.int32)
    keys = [torch.randn(count, KV_HEADS, SIZE) for count in rows]
    values = [torch.randn(count, KV_HEADS, SIZE) for count in rows]
    for sequence, count in enumerate(rows):
        places = torch.arange(count)
        write_rows(keys[sequence], values[sequence], cache, table[sequence, places // PAGE].long() * PAGE + places % PAGE)
    cache = cache.nan_to_num(0.0) if name == "triton" else cache  # whose kernels multiply what they mask by zero
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    lengths = StepLengths(
        query_start_loc=starts,
        seq_lens=torch.tensor([20, 21, 22], dtype=torch.int32),
        num_seqs=3,
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=22,
    )
    metadata = CrossAttention(max_rows=12).metadata(lengths, (table,), backend)
    rows_T = torch.tensor([count for count, length in zip(rows, query_lens, strict=True) for _ in range(length)] + [0] * num_padding)
    before = cache.clone()
    with running({CROSS_CACHES: metadata}):
        out_THE = cross_attention(q_THE, cache, rows_T.int(), SIZE**-0.5)
    assert torch.equal(before.nan_to_num(), cache.nan_to_num())
    for sequence, count in enumerate(rows):
        begin, end = int(starts[sequence]), int(starts[sequence + 1])
        if count == 0:
            assert not out_THE[begin:end].any()
            continue
        q, k, v = (one.transpose(0, 1)[None] for one in (q_THE[begin:end], keys[sequence], values[sequence]))
        wanted = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(out_THE[begin:end], wanted, atol=2e-5, rtol=1e-4)
    assert not out_THE[sum(query_lens) :].any()


@pytest.mark.parametrize("name", ["torch", "cpu", "triton"])
def test_tokens_of_a_request_may_read_different_rows(name: str) -> None:
    """Those behind other pages of the request, and none."""
    backend = _backend(name)
    cache = torch.randn(8, 2, KV_HEADS, PAGE, SIZE)
    table = torch.tensor([[5, 2, 7, 3], [1, 6, 4, 0]], dtype=torch.int32)
    spans = [(0, 0), (0, 6), (2, 3), (2, 7), (1, 5)]  # first page and rows of each token; the last one is the second request's
    q_THE = torch.randn(len(spans), HEADS, SIZE)
    lengths = StepLengths(
        query_start_loc=torch.tensor([0, 4, 5], dtype=torch.int32),
        seq_lens=torch.tensor([20, 21], dtype=torch.int32),
        num_seqs=2,
        num_tokens=5,
        max_query_len=4,
        max_seq_len=21,
    )
    metadata = CrossAttention(max_rows=16).metadata(lengths, (table,), backend)
    first_T, rows_T = torch.tensor(spans, dtype=torch.int32).unbind(1)
    with running({CROSS_CACHES: metadata}):
        out_THE = cross_attention(q_THE, cache, rows_T, SIZE**-0.5, first_pages_T=first_T)
    assert not out_THE[0].any()
    for token, (first, rows) in list(enumerate(spans))[1:]:
        pages = table[token // 4, first:].long()
        k, v = cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :rows]
        wanted = functional.scaled_dot_product_attention(q_THE[token][None, :, None], k[None], v[None], enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(out_THE[token], wanted, atol=2e-5, rtol=1e-4)
