"""The Triton attention backend in Triton's interpreter, against the torch reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter

from compile_and_serve.custom_ops.attention import triton_decode
from compile_and_serve.custom_ops.attention.attention import Scores
from compile_and_serve.custom_ops.attention.int8_cache import int8_parts
from compile_and_serve.custom_ops.attention.rope_attention import rope_attention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import running
from compile_and_serve.custom_ops.triton_common import SPLIT_COUNTERS
from tests.support import attention_cases as cases
from tests.support.numbers import relative_error

BLOCK_SIZE = 8
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def exact_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry where it rounds to float8, and reads NaN as 480: torch converts in its place."""
    convert = interpreter._convert_float

    def rounded(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if source == tl.float8e4nv and target == tl.float32:
            return torch.from_numpy(values).view(FP8).float().numpy().view(np.uint32)
        if target != tl.float8e4nv:
            return convert(values, source, target, rounding)
        assert source == tl.float32, "rounded twice"
        return torch.from_numpy(values.view(np.float32)).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def make_metadata(
    query_lens: list[int], seq_lens: list[int], padding: int = 0, window: int | None = None, chunked: bool = False
) -> tuple[AttentionMetadata, int]:
    """→ (metadata, number of blocks). No token reads block 0."""
    batch = cases.Batch(query_lens=tuple(query_lens), seq_lens=tuple(seq_lens), padding=padding, block_size=BLOCK_SIZE)
    return cases.make_metadata(batch, TritonAttention(), window=window, chunked=chunked)


def random_cache(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype == torch.int8:
        return cases.random_int8_cache(num_blocks, kv_heads, BLOCK_SIZE, head_dim)
    return torch.randn(num_blocks, 2, kv_heads, BLOCK_SIZE, head_dim).to(dtype)


BATCHES = [([1, 1, 1], [1, 17, 70]), ([5, 1, 19], [5, 20, 50]), ([20], [20]), ([1, 66, 3], [9, 70, 3])]


@pytest.mark.slow_cases
@pytest.mark.pairwise
@pytest.mark.parametrize("mask", [(None, False), (1, False), (20, False), (500, False), (24, True), (13, True)])
@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "alibi", "cap sinks"])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [*BATCHES, ([70, 1], [150, 300])])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(32, 4, 2), (24, 3, 1), (256, 2, 1)])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
def test_windows_and_scores(
    mask: tuple[int | None, bool],
    kind: str,
    query_lens: list[int],
    seq_lens: list[int],
    head_dim: int,
    heads: int,
    kv_heads: int,
    cache_dtype: torch.dtype,
) -> None:
    torch.manual_seed(len(kind) + len(seq_lens))
    total = sum(query_lens)
    metadata, num_blocks = make_metadata(query_lens, seq_lens, 0, *mask)
    cache = random_cache(num_blocks, kv_heads, head_dim, cache_dtype)
    (int8_parts(cache)[1] if cache_dtype == torch.int8 else cache)[0] = float("nan")  # freed blocks: must never be read
    q, kv = torch.randn(total, heads, head_dim), torch.randn(total, 2, kv_heads, head_dim)
    scores = Scores(
        soft_cap=1.5 if "cap" in kind else 0.0,
        sinks_H=torch.randn(heads).bfloat16() if "sinks" in kind else None,
        alibi_slopes_H=0.5 ** (torch.arange(heads) + 1.0) if "alibi" in kind else None,
    )
    scale = head_dim**-0.5
    expected = TorchAttention().forward(q, kv[:, 0], kv[:, 1], cache.clone(), scale, metadata, scores)
    out = TritonAttention().forward(q, kv[:, 0], kv[:, 1], cache, scale, metadata, scores)
    assert out.isfinite().all()
    assert torch.allclose(out, expected, atol=3e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_tokens_that_read_later_ones(window: int | None) -> None:
    """Runs of tokens that attend to the whole run: in the middle, at the end of a chunk, and all of one; not those of other sequences."""
    query_lens, seq_lens, head_dim = [1, 80, 30], [9, 95, 30], 32
    metadata, num_blocks = make_metadata(query_lens, seq_lens, 0, window)
    ahead_T = torch.zeros(sum(query_lens), dtype=torch.int32)
    for begin, end in ((6, 27), (60, 81), (81, 111)):
        ahead_T[begin:end] = torch.arange(end - begin - 1, -1, -1)
    cache = random_cache(num_blocks, 2, head_dim)
    q, kv = torch.randn(len(ahead_T), 4, head_dim), torch.randn(len(ahead_T), 2, 2, head_dim)
    scores, scale = Scores(ahead_T=ahead_T), head_dim**-0.5
    reference = cache.clone()
    by_torch = TorchAttention().forward(q, kv[:, 0], kv[:, 1], reference, scale, metadata, scores)
    expected = cases.dense_attention(q, reference, scale, metadata, scores)
    assert relative_error(by_torch, expected) < 1e-5
    out = TritonAttention().forward(q, kv[:, 0], kv[:, 1], cache, scale, metadata, scores)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.slow_cases
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8, torch.int8])
def test_tokens_that_read_all_of_their_sequence(cache_dtype: torch.dtype) -> None:
    """Also steps without sequences, which write alone."""
    batch, (H, K, E) = cases.DRAFTED_BLOCKS, (4, 2, 32)
    given, num_blocks = cases.make_metadata(batch, TritonAttention())
    tokens = given.num_tokens + batch.padding
    cos, sin = (torch.randn(tokens, E // 2).repeat(1, 2) for _ in range(2))
    if cache_dtype == torch.int8:
        kv_cache = cases.random_int8_cache(num_blocks, K, batch.block_size, E)
    else:
        kv_cache = torch.randn(num_blocks, 2, K, batch.block_size, E).to(cache_dtype)
    for metadata in (cases.without_sequences(given), cases.not_causal(given)):
        qkv = torch.randn(tokens, (H + 2 * K) * E)
        outs, caches = [], []
        for backend in (TritonAttention(), TorchAttention()):
            metadata.backend = backend
            caches.append(kv_cache.clone())
            with running({KV_CACHES: metadata}):
                outs.append(rope_attention(qkv, cos, sin, caches[-1], H, K, E**-0.5))
        torch.testing.assert_close(*outs, atol=3e-5, rtol=1e-4)
        found, expected = (cases.dequantized(one) if cache_dtype == torch.int8 else one.float() for one in caches)
        assert not torch.equal(expected, cases.dequantized(kv_cache) if cache_dtype == torch.int8 else kv_cache.float())
        assert relative_error(found, expected) < 1e-3
        kv_cache = caches[1]


@pytest.mark.slow_cases
@pytest.mark.pairwise
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads", "has_norm"), [(32, 4, 2, True), (24, 6, 2, False), (16, 3, 1, True)])
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8, torch.int8])
def test_rope_attention(
    head_dim: int, heads: int, kv_heads: int, has_norm: bool, query_lens: list[int], seq_lens: list[int], cache_dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim + len(seq_lens))
    total, padding = sum(query_lens), 2
    metadata, num_blocks = make_metadata(query_lens, seq_lens, padding)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(total + padding, width + 4)[:, :width]
    cos, sin = (torch.randn(total + padding, head_dim // 2).repeat(1, 2) for _ in range(2))
    norms = [torch.randn(head_dim), torch.randn(head_dim)] if has_norm else [None, None]
    cache = random_cache(num_blocks, kv_heads, head_dim, cache_dtype)
    results = {}
    for backend in (TritonAttention(), TorchAttention()):
        metadata.backend = backend
        if metadata.max_query_len == 1:  # a padded step of decodes has whole padding sequences
            continue_with = _padded_decodes(metadata, padding)
        else:
            continue_with = metadata
        own_cache = cache.clone()
        with running({KV_CACHES: continue_with}):
            out = rope_attention(qkv, cos, sin, own_cache, heads, kv_heads, head_dim**-0.5, *norms)
        results[backend.name] = (out[:total], own_cache, out)
    caches = [results[name][1] for name in ("triton", "torch")]
    caches = [cases.dequantized(one) if cache_dtype == torch.int8 else one.float() for one in caches]
    if cache_dtype == torch.int8:
        # A value that is nearly halfway may become the neighbour: one in a thousand at most, by a scale.
        moved = (caches[0] - caches[1]).abs() > 1e-5
        assert moved.float().mean() < 1e-3
        largest = caches[1].abs().amax(-1, keepdim=True)
        assert ((caches[0] - caches[1]).abs() <= largest / 127 + 1e-5).all()
        assert torch.allclose(results["triton"][0], results["torch"][0], atol=2e-5 if not moved.any() else 2e-2, rtol=1e-4)
    elif cache_dtype == FP8:
        # Rotated keys differ in float32's last bits, and one in a thousand or so then rounds to the neighbour.
        moved = caches[0] != caches[1]
        assert moved.float().mean() < 1e-3
        assert torch.allclose(caches[0], caches[1], atol=2.0**-9, rtol=0.125)
        assert torch.allclose(results["triton"][0], results["torch"][0], atol=2e-5 if not moved.any() else 2e-2, rtol=1e-4)
    else:
        assert torch.allclose(caches[0], caches[1], atol=1e-5)
        assert torch.allclose(results["triton"][0], results["torch"][0], atol=2e-5, rtol=1e-4)
    assert results["triton"][2].isfinite().all()


def _padded_decodes(metadata: AttentionMetadata, padding: int) -> AttentionMetadata:
    rows = metadata.num_seqs + padding
    return replace(
        metadata,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.cat([metadata.seq_lens, torch.zeros(padding, dtype=torch.int32)]),
        block_table=torch.cat([metadata.block_table, metadata.block_table[:1].expand(padding, -1)]),
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
def test_int8_values_in_float16(query_lens: list[int], seq_lens: list[int]) -> None:
    """Products of float16's smallest scales and small probabilities: values of about 1e-3."""
    metadata, num_blocks = make_metadata(query_lens, seq_lens)
    total = sum(query_lens)
    q, k, v = (torch.randn(total, heads, 32).half() for heads in (4, 2, 2))
    cache = random_cache(num_blocks, 2, 32, torch.int8)
    int8_parts(cache)[1][:, 1] *= 1e-3
    outs = [
        backend.forward(q, k, v * 1e-3, cache.clone(), 32**-0.5, metadata).double() for backend in (TritonAttention(), TorchAttention())
    ]
    # Queries, probabilities and the result are rounded to float16 (2^-11); below 2^-14 by 2^-25.
    assert relative_error(outs[0], outs[1]) < 1e-3


@pytest.mark.slow_cases
@pytest.mark.parametrize("cache_dtype", [FP8, torch.int8])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(32, 4, 2), (24, 3, 1), (64, 4, 4)])
def test_bfloat16_decodes_over_8_bit_caches(cache_dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    """Of one tile and of several; heads that fill their block and that don't. Products are float16's there."""
    metadata, num_blocks = make_metadata([1, 1, 1], [1, 70, 300])
    q, k, v = (torch.randn(3, n, head_dim).bfloat16() for n in (heads, kv_heads, kv_heads))
    cache = random_cache(num_blocks, kv_heads, head_dim, cache_dtype)
    outs = [backend.forward(q, k, v, cache.clone(), head_dim**-0.5, metadata).double() for backend in (TritonAttention(), TorchAttention())]
    assert relative_error(outs[0], outs[1]) < 2**-7  # a unit of bfloat16 from each of the two


@pytest.mark.slow_cases
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8])
@pytest.mark.parametrize(("query_lens", "seq_lens"), BATCHES)
def test_plain_attention(query_lens: list[int], seq_lens: list[int], cache_dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    metadata, num_blocks = make_metadata(query_lens, seq_lens)
    total = sum(query_lens)
    q, k, v = torch.randn(total, 4, 20), torch.randn(total, 2, 20), torch.randn(total, 2, 20)
    k[0, 0, :4], v[-1, 1, :2] = torch.tensor([1e-3, 2.0**-9, 448.0, -460.0]), torch.tensor([1e4, -torch.inf])
    if cache_dtype != FP8:
        k, v = k.clamp(-448, 448), v.clamp(-448, 448)
    cache = random_cache(num_blocks, 2, 20, cache_dtype)
    outs, caches = [], []
    for backend in (TritonAttention(), TorchAttention()):
        caches.append(cache.clone())
        outs.append(backend.forward(q, k, v, caches[-1], 0.2, metadata))
    assert outs[0].isfinite().all()
    assert torch.allclose(outs[0], outs[1], atol=2e-4, rtol=1e-4)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


def test_nan_stays_nan_in_float8() -> None:
    metadata, num_blocks = make_metadata([1, 3], [9, 3])
    q, k, v = torch.randn(4, 4, 20), torch.randn(4, 2, 20), torch.randn(4, 2, 20)
    v[0, 0, 5] = k[2, 1, 3] = torch.nan
    cache = torch.zeros(num_blocks, 2, 2, BLOCK_SIZE, 20, dtype=FP8)
    out = TritonAttention().forward(q, k, v, cache, 0.2, metadata)
    assert cache.float().isnan().sum() == 2
    assert out[0, :2, 5].isnan().all()


@pytest.mark.slow_cases
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (16, False), (33, False), (40, True)])
@pytest.mark.parametrize("config", [(16, 4, 1, 4, 16), (16, 1, 2, 1, 16), (32, 8, 1, 2, 32)])
def test_splits_agree(config: tuple[int, int, int, int, int], window: int | None, chunked: bool) -> None:
    """Every way of splitting gives the same attention, also where sequences fill a different number of splits."""
    torch.manual_seed(5)
    metadata, num_blocks = make_metadata([1, 1, 1], [70, 3, 33], window=window, chunked=chunked)
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    cache = random_cache(num_blocks, 2, 16)
    expected = TorchAttention().forward(q, k, v, cache.clone(), 0.25, metadata)
    for _ in range(2):  # twice: arrivals are counted from zero again
        out = torch.full_like(q, float("nan"))
        triton_decode.decode_attention(
            q, k, v, None, None, cache, 0.25, metadata.query_start_loc, metadata.seq_lens, metadata.block_table,
            metadata.slot_mapping, out, 3, window=window, chunked=chunked, config=config,
        )  # fmt: skip
        assert torch.allclose(out, expected, atol=2e-5, rtol=1e-4)


def test_configurations_are_powers_of_two() -> None:
    for num_seqs, itemsize in itertools.product((1, 2, 3, 8, 16, 17, 100, 256), (1, 2, 4)):
        block_c, splits, _, _, min_split = triton_decode.decode_config(num_seqs, 8, 132, itemsize)
        assert splits & (splits - 1) == 0
        assert block_c & (block_c - 1) == 0
        assert min_split >= block_c
        assert splits == 1 or num_seqs * 8 <= SPLIT_COUNTERS
    assert triton_decode.decode_config(64, 8, 132) == (64, 4, 2, 4, 2048)
    assert triton_decode.decode_config(98, 8, 132) == (64, 4, 2, 4, 2048)
    assert triton_decode.decode_config(99, 8, 132) == (32, 4, 2, 1, 2048)
    assert triton_decode.decode_config(131, 8, 132, itemsize=1) == (64, 16, 2, 2, 2048)
    assert triton_decode.decode_config(132, 8, 132, itemsize=1) == (64, 4, 2, 1, 4096)
    assert triton_decode.decode_config(132, 8, 132, head_dim=256) == (32, 4, 2, 2, 2048)
    assert triton_decode.decode_config(2048, 32, 132)[1] > 1
    assert triton_decode.decode_config(2049, 32, 132)[1] == 1  # a counter for each would be too many


def test_what_it_does_not_run_is_said() -> None:
    backend = TritonAttention()
    fine = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "head_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "block_size": 16,
    }
    assert backend.unsupported_reason(**fine) is None  # type: ignore[arg-type]
    for change, word in (
        ({"head_dim": 63}, "even"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"dtype": torch.float64}, "float64"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"kv_cache_dtype": torch.int8, "head_dim": 62}, "multiple of 4, not 62"),
        ({"kv_cache_dtype": torch.int8, "features": frozenset({"latent"})}, "latent cache"),
    ):
        reason = backend.unsupported_reason(**fine | change)  # type: ignore[arg-type]
        assert reason is not None
        assert word in reason


@pytest.mark.parametrize(("window", "chunked"), [(None, False), (5, False), (8, True)], ids=["full", "window", "chunks"])
def test_each_draft_token_as_a_decode_of_its_own(window: int | None, chunked: bool) -> None:
    """Steps of equal query lengths, one sequence of padding: the same as the torch reference, and the same cache."""
    query_len, seq_lens = 3, [3, 21, 0, 9]
    metadata, num_blocks = make_metadata([query_len] * 4, seq_lens, window=window, chunked=chunked)
    metadata.slot_mapping[2 * query_len : 3 * query_len] = -1
    num_heads, num_kv_heads, head_dim, num_tokens = 4, 2, 16, 4 * query_len
    q, k, v = (torch.randn(num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads))
    cache = random_cache(num_blocks, num_kv_heads, head_dim)
    other = cache.clone()
    metadata.add_rows(query_len)
    metadata.fill_rows(query_len)
    got = TritonAttention().forward(q, k, v, cache, 0.25, metadata)
    real = [token for token in range(num_tokens) if token // query_len != 2]
    starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    kept = torch.tensor([0, 1, 3])
    reference = replace(
        metadata,
        query_start_loc=starts,
        seq_lens=metadata.seq_lens[kept],
        block_table=metadata.block_table[kept],
        slot_mapping=metadata.slot_mapping[real],
        num_seqs=3,
        num_tokens=9,
    )
    expected = TorchAttention().forward(q[real], k[real], v[real], other, 0.25, reference)
    torch.testing.assert_close(got[real], expected, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(got).all()
    assert torch.equal(cache, other)
