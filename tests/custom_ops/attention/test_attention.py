"""`cas::attention` and `cas::rope_attention` on the torch and the cpu backend against a dense float64 reference."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.attention.attention import AttentionBackend, Scores, attention
from compile_and_serve.custom_ops.attention.cpu_backend import CpuAttention
from compile_and_serve.custom_ops.attention.int8_cache import int8_parts
from compile_and_serve.custom_ops.attention.rope_attention import norm_rope_reference, rope_attention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import running
from tests.support import attention_cases as cases
from tests.support.kernels import require_cpu_kernels
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
HEADS = [(3, 3, 64), (9, 3, 64), (8, 2, 16), (8, 1, 96), (4, 4, 128), (6, 2, 48)]  # (H, K, E)


def backends() -> list[AttentionBackend]:
    return [TorchAttention(), CpuAttention()]


def require(
    backend: AttentionBackend,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None = None,
    features: frozenset[AttentionFeature] = frozenset(),
) -> None:
    if isinstance(backend, CpuAttention):
        require_cpu_kernels()
    reason = backend.unsupported_reason(
        device=CPU,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or dtype,
        head_dim=64,
        num_heads=9,
        num_kv_heads=3,
        block_size=16,
        features=features,
    )
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", cases.BATCHES)
def test_attention(case: str, heads: tuple[int, int, int], dtype: torch.dtype, backend: AttentionBackend) -> None:
    require(backend, dtype)
    batch, (H, K, E) = cases.BATCHES[case], heads
    metadata, num_blocks = cases.make_metadata(batch, backend)
    tokens = metadata.num_tokens + batch.padding
    kv_cache = torch.randn(num_blocks, 2, K, batch.block_size, E, dtype=dtype)
    kv_cache[0] = float("nan")  # no sequence's block: must never be read
    before = kv_cache.clone()
    q = torch.randn(tokens, H + 1, E, dtype=dtype)[:, :H]
    kv = torch.randn(tokens, 2, K, E, dtype=dtype)

    with running({KV_CACHES: metadata}):
        out = attention(q, kv[:, 0], kv[:, 1], kv_cache, E**-0.5)

    assert out.shape == (tokens, H, E)
    assert out.dtype == dtype
    assert out.isfinite().all()
    for t in range(metadata.num_tokens):
        block, offset = divmod(int(metadata.slot_mapping[t]), batch.block_size)
        before[block, :, :, offset] = kv[t]
    assert torch.equal(kv_cache[1:], before[1:])
    expected = cases.dense_attention(q, kv_cache, E**-0.5, metadata)
    assert relative_error(out[: metadata.num_tokens], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 48)])
def test_tokens_that_read_all_of_their_sequence(heads: tuple[int, int, int], backend: AttentionBackend) -> None:
    """First the keys and values are written alone, then all of each block is read, with others before it."""
    require(backend, torch.float32)
    batch, (H, K, E) = cases.DRAFTED_BLOCKS, heads
    metadata, num_blocks = cases.make_metadata(batch, backend)
    tokens = metadata.num_tokens + batch.padding
    kv_cache = torch.randn(num_blocks, 2, K, batch.block_size, E)
    q, old, new = torch.randn(tokens, H, E), torch.randn(tokens, 2, K, E), torch.randn(tokens, 2, K, E)
    for kv, one in ((old, cases.without_sequences(metadata)), (new, cases.not_causal(metadata))):
        with running({KV_CACHES: one}):
            out = attention(q, kv[:, 0], kv[:, 1], kv_cache, E**-0.5)
        assert out.isfinite().all()
        for t in range(metadata.num_tokens):
            block, offset = divmod(int(metadata.slot_mapping[t]), batch.block_size)
            assert torch.equal(kv_cache[block, :, :, offset], kv[t])
    expected = cases.dense_attention(q, kv_cache, E**-0.5, cases.not_causal(metadata))
    assert relative_error(out[: metadata.num_tokens], expected) < TOLERANCE[torch.float32]


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 48)])
@pytest.mark.parametrize("case", cases.BATCHES)
def test_float8_cache(case: str, heads: tuple[int, int, int], dtype: torch.dtype, backend: AttentionBackend) -> None:
    require(backend, dtype, torch.float8_e4m3fn)
    batch, (H, K, E) = cases.BATCHES[case], heads
    metadata, num_blocks = cases.make_metadata(batch, backend)
    tokens = metadata.num_tokens + batch.padding
    kv_cache = torch.randn(num_blocks, 2, K, batch.block_size, E).to(torch.float8_e4m3fn)
    kv_cache[0] = float("nan")  # no sequence's block: must never be read
    before = kv_cache.clone()
    q = torch.randn(tokens, H, E, dtype=dtype)
    kv = torch.randn(tokens, 2, K, E, dtype=dtype) * torch.rand(tokens, 2, K, E).exp2().pow(8).to(dtype)

    with running({KV_CACHES: metadata}):
        out = attention(q, kv[:, 0], kv[:, 1], kv_cache, E**-0.5)

    assert out.dtype == dtype
    assert out.isfinite().all()
    for t in range(metadata.num_tokens):
        block, offset = divmod(int(metadata.slot_mapping[t]), batch.block_size)
        before[block, :, :, offset] = kv[t].float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(kv_cache[1:].view(torch.uint8), before[1:].view(torch.uint8))
    expected = cases.dense_attention(q, kv_cache.float(), E**-0.5, metadata)
    assert relative_error(out[: metadata.num_tokens], expected) < TOLERANCE[dtype]


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 48)])
@pytest.mark.parametrize("case", cases.BATCHES)
def test_int8_cache(case: str, heads: tuple[int, int, int], dtype: torch.dtype, backend: AttentionBackend) -> None:
    require(backend, dtype, torch.int8)
    batch, (H, K, E) = cases.BATCHES[case], heads
    metadata, num_blocks = cases.make_metadata(batch, backend)
    tokens = metadata.num_tokens + batch.padding
    kv_cache = cases.random_int8_cache(num_blocks, K, batch.block_size, E)
    values, scales = int8_parts(kv_cache)
    scales[0] = float("nan")  # no sequence's block: must never be read
    before = kv_cache.clone()
    q = torch.randn(tokens, H, E, dtype=dtype)
    kv = torch.randn(tokens, 2, K, E, dtype=dtype)
    kv[:, 1] *= torch.rand(tokens, K, 1).exp2().pow(8).to(dtype)
    kv[0, 0, 0] = 0.0

    with running({KV_CACHES: metadata}):
        out = attention(q, kv[:, 0], kv[:, 1], kv_cache, E**-0.5)

    assert out.dtype == dtype
    assert out.isfinite().all()
    exact_values, exact_scales = int8_parts(before)
    for t in range(metadata.num_tokens):
        block, offset = divmod(int(metadata.slot_mapping[t]), batch.block_size)
        scale = (kv[t].float().abs().amax(-1) / 127).clamp_min(1e-12)
        exact_scales[block, :, :, offset] = scale
        exact_values[block, :, :, offset] = (kv[t].float() * scale.reciprocal()[..., None]).round().to(torch.int8)
    assert torch.equal(scales[1:], exact_scales[1:])
    assert torch.equal(values[1:], exact_values[1:])
    expected = cases.dense_attention(q, cases.dequantized(kv_cache), E**-0.5, metadata)
    # The cpu kernel rounds dequantized keys and values to bfloat16 (2^-9 of each), as the tolerance allows of a bfloat16 cache.
    assert relative_error(out[: metadata.num_tokens], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
def test_an_int8_cache_keeps_nan(backend: AttentionBackend) -> None:
    require(backend, torch.float32, torch.int8)
    metadata, num_blocks = cases.make_metadata(cases.BATCHES["one token"], backend)
    kv_cache = cases.random_int8_cache(num_blocks, 2, 16, 16)
    k, v = torch.randn(2, 1, 2, 16)
    v[0, 1, 3] = torch.nan
    with running({KV_CACHES: metadata}):
        out = attention(torch.zeros(1, 2, 16), k, v, kv_cache, 0.25)
    assert out.isnan().all(2).tolist() == [[False, True]]
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_cache_saturates_and_keeps_nan(dtype: torch.dtype, backend: AttentionBackend) -> None:
    require(backend, dtype, torch.float8_e4m3fn)
    metadata, num_blocks = cases.make_metadata(cases.BATCHES["one token"], backend)
    kv_cache = torch.zeros(num_blocks, 2, 1, 16, 16, dtype=torch.float8_e4m3fn)
    k = torch.tensor([1e6, -1e6, 449, 463, 465, 480, 448, -500, torch.inf, -torch.inf, 0, -0.0, 1e-9, 3, 4, 5], dtype=dtype)
    v = torch.where(torch.arange(16) == 7, torch.nan, k)
    with running({KV_CACHES: metadata}):
        out = attention(torch.zeros(1, 1, 16, dtype=dtype), k.view(1, 1, 16), v.view(1, 1, 16), kv_cache, 0.25)
    block, offset = divmod(int(metadata.slot_mapping[0]), 16)
    assert torch.equal(kv_cache[block, 0, 0, offset].float(), k.float().clamp(-448, 448).where(k.abs() > 1e-5, 0.0))
    assert out.isnan().nonzero()[:, 2].tolist() == [7]


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("case, heads", [("mixed", (9, 3, 64)), ("decodes", (8, 2, 48)), ("prefill", (4, 1, 128))])
def test_rope_attention(
    case: str, heads: tuple[int, int, int], normalizes: bool, dtype: torch.dtype, rope_dtype: torch.dtype, backend: AttentionBackend
) -> None:
    require(backend, dtype)
    batch, (H, K, E) = cases.BATCHES[case], heads
    metadata, num_blocks = cases.make_metadata(batch, backend)
    tokens = metadata.num_tokens + batch.padding
    kv_cache = torch.zeros(num_blocks, 2, K, batch.block_size, E, dtype=dtype)
    qkv = torch.randn(tokens, (H + 2 * K) * E + 7, dtype=dtype)[:, : (H + 2 * K) * E]
    angle = torch.rand(tokens, E // 2).repeat(1, 2) * 6
    cos, sin = angle.cos().to(rope_dtype), angle.sin().to(rope_dtype)
    q_weight, k_weight = (torch.randn(E, dtype=dtype) if normalizes else None for _ in range(2))

    with running({KV_CACHES: metadata}):
        out = rope_attention(qkv, cos, sin, kv_cache, H, K, E**-0.5, q_weight, k_weight, 1e-5)

    assert out.shape == (tokens, H * E)
    assert out.dtype == dtype
    assert out.isfinite().all()
    double = [None if w is None else w.double() for w in (q_weight, k_weight)]
    q, k, v = qkv.double().unflatten(1, (-1, E)).split((H, K, K), dim=1)
    q = norm_rope_reference(q, cos.double(), sin.double(), double[0], 1e-5)
    k = norm_rope_reference(k, cos.double(), sin.double(), double[1], 1e-5)
    for t in range(metadata.num_tokens):
        block, offset = divmod(int(metadata.slot_mapping[t]), batch.block_size)
        assert relative_error(kv_cache[block, 0, :, offset], k[t]) < TOLERANCE[dtype]
        assert torch.equal(kv_cache[block, 1, :, offset].double(), v[t])
    expected = cases.dense_attention(q, kv_cache, E**-0.5, metadata).flatten(1)
    # q and k are rounded before the product here, which the float64 q is not.
    assert relative_error(out[: metadata.num_tokens], expected) < TOLERANCE[dtype] * 2


MASKS: dict[str, tuple[int | None, bool]] = {  # (window, chunked)
    "full": (None, False),
    "window of 1": (1, False),
    "window": (37, False),
    "window of whole blocks": (64, False),
    "window longer than the sequences": (5000, False),
    "chunks": (50, True),
    "chunks of whole blocks": (64, True),
}


def some_scores(kind: str, heads: int, dtype: torch.dtype = torch.float32) -> Scores:
    return Scores(
        soft_cap=1.5 if "cap" in kind else 0.0,
        sinks_H=torch.randn(heads).to(dtype) if "sinks" in kind else None,
        alibi_slopes_H=0.5 ** (torch.arange(heads) + 1.0) if "alibi" in kind else None,
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "alibi", "cap sinks"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 16), (4, 1, 256)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("case", cases.BATCHES)
def test_windows_and_scores(
    case: str, mask: str, heads: tuple[int, int, int], kind: str, dtype: torch.dtype, backend: AttentionBackend
) -> None:
    require(backend, dtype, features=frozenset(["window"]))
    batch, (H, K, E) = cases.BATCHES[case], heads
    window, chunked = MASKS[mask]
    metadata, num_blocks = cases.make_metadata(batch, backend, window=window, chunked=chunked)
    tokens = metadata.num_tokens + batch.padding
    # A page of several layers: the cache's blocks are not next to each other.
    kv_cache = torch.randn(num_blocks, 4, K, batch.block_size, E, dtype=dtype)[:, 2:]
    kv_cache[0] = float("nan")  # freed blocks: must never be read
    q = torch.randn(tokens, H, E, dtype=dtype)
    kv = torch.randn(tokens, 2, K, E, dtype=dtype)
    scores = some_scores(kind, H, dtype)
    with running({"any": metadata}):
        out = attention(q, kv[:, 0], kv[:, 1], kv_cache, E**-0.5, "any", scores.soft_cap, scores.sinks_H, scores.alibi_slopes_H)
    assert out.isfinite().all()
    expected = cases.dense_attention(q, kv_cache, E**-0.5, metadata, scores)
    assert relative_error(out[: metadata.num_tokens], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
def test_rope_attention_takes_scores(backend: AttentionBackend) -> None:
    require(backend, torch.float32, features=frozenset(["window", "soft_cap", "sinks"]))
    H, K, E = 4, 2, 16
    metadata, num_blocks = cases.make_metadata(cases.BATCHES["mixed"], backend, window=20)
    tokens, scores = metadata.slot_mapping.numel(), some_scores("cap sinks", H)
    kv_cache = torch.randn(num_blocks, 2, K, 16, E)
    qkv, angle = torch.randn(tokens, (H + 2 * K) * E), torch.rand(tokens, E // 2).repeat(1, 2)
    with running({KV_CACHES: metadata}):
        out = rope_attention(qkv, angle.cos(), angle.sin(), kv_cache, H, K, 0.25, soft_cap=scores.soft_cap, sinks_H=scores.sinks_H)
    q = norm_rope_reference(qkv.double().unflatten(1, (-1, E))[:, :H], angle.cos(), angle.sin(), None, 0.0)
    expected = cases.dense_attention(q, kv_cache, 0.25, metadata, scores).flatten(1)
    assert relative_error(out[: metadata.num_tokens], expected) < 1e-5


@pytest.mark.parametrize("use_norm", [False, True])
def test_norm_rope_reference_is_rotate_half(use_norm: bool) -> None:
    x, weight = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    angle = torch.rand(5, 4, dtype=torch.float64).repeat(1, 2)
    y = norm_rope_reference(x, angle.cos(), angle.sin(), weight if use_norm else None, 1e-6)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight if use_norm else x
    # The pair (x[i], x[i + E/2]) as a complex number turns by the angle.
    turned = torch.complex(normed[..., :4], normed[..., 4:]) * torch.exp(1j * angle[:, None, :4])
    torch.testing.assert_close(y, torch.cat([turned.real, turned.imag], dim=-1))


def test_large_scores_do_not_overflow() -> None:
    backend = CpuAttention()
    require(backend, torch.float32)
    metadata, num_blocks = cases.make_metadata(cases.BATCHES["mixed"], backend)
    tokens = metadata.slot_mapping.numel()
    kv_cache = torch.randn(num_blocks, 2, 1, 16, 16) * 100
    q, kv = torch.randn(tokens, 2, 16) * 100, torch.randn(tokens, 2, 1, 16) * 100
    with running({KV_CACHES: metadata}):
        out = attention(q, kv[:, 0], kv[:, 1], kv_cache, 1.0)
    expected = cases.dense_attention(q, kv_cache, 1.0, metadata)
    assert relative_error(out[: metadata.num_tokens], expected) < 1e-4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"device": torch.device("cuda")}, "CPU only"),
        ({"dtype": torch.float16}, "float16"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"head_dim": 40}, "multiples of 16"),
        ({"num_heads": 7}, "multiple of 3"),
    ],
)
def test_unsupported_combinations_have_a_reason(change: dict, message: str) -> None:
    combination = {
        "device": CPU,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "head_dim": 64,
        "num_heads": 9,
        "num_kv_heads": 3,
        "block_size": 16,
    } | change
    assert message in str(CpuAttention().unsupported_reason(**combination))


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
def test_schema_and_fake(backend: AttentionBackend) -> None:
    require(backend, torch.float32)
    metadata, num_blocks = cases.make_metadata(cases.BATCHES["mixed"], backend)
    tokens = metadata.slot_mapping.numel()
    kv_cache = torch.randn(num_blocks, 2, 2, 16, 16)
    qkv, angle = torch.randn(tokens, 8 * 16), torch.rand(tokens, 16)
    with running({KV_CACHES: metadata}):
        torch.library.opcheck(
            torch.ops.cas.rope_attention.default,
            (qkv, angle.cos(), angle.sin(), kv_cache, 4, 2, 0.25, torch.randn(16), None, 1e-6),
            test_utils=("test_schema", "test_faketensor"),
        )
        q, k, v = qkv.unflatten(1, (-1, 16)).split((4, 2, 2), dim=1)
        torch.library.opcheck(torch.ops.cas.attention.default, (q, k, v, kv_cache, 0.25), test_utils=("test_schema", "test_faketensor"))
