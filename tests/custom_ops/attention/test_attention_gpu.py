# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""The attention backends on a GPU, in bfloat16 and at odd sizes, against the reference backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.attention import flashinfer_backend as attention_flashinfer
from compile_and_serve.custom_ops.attention.attention import AttentionBackend, Scores, attention
from compile_and_serve.custom_ops.attention.flash_attention3 import FlashAttention3Prompts, flash_attention3_unavailable_reason
from compile_and_serve.custom_ops.attention.flashinfer_backend import FA3_MIN_QUERY_LEN, FlashInferAttention
from compile_and_serve.custom_ops.attention.flashinfer_modules import flashinfer_unavailable_reason
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.rope_attention import rope_attention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, SCALE_BYTES
from compile_and_serve.custom_ops.step import running
from tests.support import attention_cases as cases
from tests.support.cuda import CUDA, LIMIT, random
from tests.support.numbers import relative_error


def to_cuda(metadata: object) -> None:
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(metadata, name, getattr(metadata, name).to(CUDA))


def random_cache(num_blocks: int, parts: int, K: int, P: int, E: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages [N, parts, K, P, E] of normal values; in int8 with their scales."""
    if dtype != torch.int8:
        return random(num_blocks, parts, K, P, E).to(dtype)
    cache = torch.zeros(num_blocks, parts, K, P, E + SCALE_BYTES, dtype=dtype, device=CUDA)
    cases.fill_int8_cache(cache)
    return cache


def backends() -> list[AttentionBackend]:
    return [TritonAttention(), FlashInferAttention(build=False)]


@pytest.fixture(scope="module", params=[("fa2", False), ("fa3", False), ("fa3", True)], ids=str)
def built(request: pytest.FixtureRequest) -> tuple[FlashInferAttention, int | None, float]:
    """A backend that runs prompts in this variant, with its window and soft cap; FA2 runs on Hopper too."""
    if reason := flashinfer_unavailable_reason(CUDA):
        pytest.skip(reason)
    variant, has_window_and_cap = request.param
    backend = FlashInferAttention(build=False)
    features: list[AttentionFeature] = ["window", "soft_cap"] if has_window_and_cap else []
    modules = backend.modules(torch.bfloat16, 128, CUDA, frozenset(features))
    if variant not in ("fa2", *modules.variants):
        pytest.skip("FA3 is for Hopper")
    modules.variants = (variant,)
    modules.build(variant)
    assert modules.status() == {variant: "built"}
    return backend, *((37, 1.5) if has_window_and_cap else (None, 0.0))


def prompts_as_the_reference(
    backend: FlashInferAttention, batch: cases.Batch, heads: tuple[int, int, int], window: int | None = None, soft_cap: float = 0.0
) -> object:
    """Run a step of prompts, and check what it gives. → what took its prompts"""
    H, K, E = heads
    metadata, num_blocks = cases.make_metadata(batch, backend, window=window)
    to_cuda(metadata)
    q, k, v = random(metadata.num_tokens, (H + 2 * K) * E).unflatten(1, (H + 2 * K, E)).split((H, K, K), dim=1)
    cache = random_cache(num_blocks, 2, K, batch.block_size, E, torch.bfloat16)
    outs = []
    for one in (backend, TorchAttention()):
        metadata.backend = one
        one.plan(metadata)
        outs.append(one.forward(q, k, v, cache.clone(), E**-0.5, metadata, Scores(soft_cap=soft_cap)))
    assert backend.planned_step is not None
    [prefill] = backend.planned_step.prefills.values()
    assert relative_error(outs[0], outs[1].double()) < LIMIT
    return prefill


@pytest.mark.slow  # may have to build the modules
@pytest.mark.parametrize("case", [case for case, batch in cases.BATCHES.items() if max(batch.query_lens) > 1])
def test_prompts_run_in_flashinfer(
    case: str, built: tuple[FlashInferAttention, int | None, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_flashinfer, "FA3_MIN_QUERY_LEN", 2)
    monkeypatch.setattr(attention_flashinfer, "flash_attention3_runs", lambda *_: False)
    backend, window, soft_cap = built
    assert prompts_as_the_reference(backend, cases.BATCHES[case], (32, 8, 128), window, soft_cap) is not None


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (8, 1, 96), (4, 4, 256), (6, 2, 80), (16, 8, 128)])
@pytest.mark.parametrize("case", cases.BATCHES)
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_attention(
    case: str,
    heads: tuple[int, int, int],
    with_rope: bool,
    cache_dtype: torch.dtype,
    backend: AttentionBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_flashinfer, "FA3_MIN_QUERY_LEN", 2)  # or these prompts would be left to Triton
    batch, (H, K, E) = cases.BATCHES[case], heads
    reason = backend.unsupported_reason(
        device=CUDA, dtype=torch.bfloat16, kv_cache_dtype=cache_dtype, head_dim=E, num_heads=H, num_kv_heads=K, block_size=batch.block_size
    )
    if reason is not None:
        pytest.skip(reason)
    metadata, num_blocks = cases.make_metadata(batch, backend)
    to_cuda(metadata)
    tokens = metadata.num_tokens + batch.padding
    cache = random_cache(num_blocks, 2, K, batch.block_size, E, cache_dtype)
    qkv = random(tokens, (H + 2 * K) * E)
    cos, sin = (torch.rand(tokens, E // 2, device=CUDA).repeat(1, 2) for _ in range(2))
    norms = (random(E), random(E)) if H == 16 else (None, None)
    outs, caches = [], []
    for one in (backend, TorchAttention()):
        metadata.backend = one
        one.plan(metadata)
        caches.append(cache.clone())
        with running({KV_CACHES: metadata}):
            if with_rope:
                outs.append(rope_attention(qkv, cos, sin, caches[-1], H, K, E**-0.5, *norms))
            else:
                q, k, v = qkv.unflatten(1, (H + 2 * K, E)).split((H, K, K), dim=1)
                outs.append(attention(q, k, v, caches[-1], E**-0.5))
    count = metadata.num_tokens
    # FlashInfer attends a fresh prompt with the keys and values of the step, which are not quantized yet.
    unrounded = cache_dtype != torch.bfloat16 and backend.name == "flashinfer" and "prefill" in case
    assert relative_error(outs[0][:count], outs[1][:count].double()) < (8e-2 if unrounded else LIMIT)
    # A key whose last bit of bfloat16 differs may be rounded to the next float8, an eighth away, or to the next int8.
    found, expected = (cases.dequantized(one) if cache_dtype == torch.int8 else one.double() for one in caches)
    assert relative_error(found, expected) < (1e-3 if cache_dtype == torch.bfloat16 else 5e-3)
    assert outs[0].isfinite().all()


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_tokens_that_read_all_of_their_sequence(cache_dtype: torch.dtype, backend: AttentionBackend) -> None:
    """Also steps without sequences, which write alone."""
    batch, (H, K, E) = cases.DRAFTED_BLOCKS, (32, 8, 128)
    given, num_blocks = cases.make_metadata(batch, backend)
    tokens = given.num_tokens + batch.padding
    cos, sin = (torch.rand(tokens, E // 2, device=CUDA).repeat(1, 2) for _ in range(2))
    cache = random_cache(num_blocks, 2, K, batch.block_size, E, cache_dtype)
    for metadata in (cases.without_sequences(given), cases.not_causal(given)):
        to_cuda(metadata)
        qkv = random(tokens, (H + 2 * K) * E)
        outs, caches = [], []
        for one in (backend, TorchAttention()):
            metadata.backend = one
            one.plan(metadata)
            caches.append(cache.clone())
            with running({KV_CACHES: metadata}):
                outs.append(rope_attention(qkv, cos, sin, caches[-1], H, K, E**-0.5))
        count = metadata.num_seqs
        assert count == 0 or relative_error(outs[0][:count], outs[1][:count].double()) < LIMIT
        assert outs[0].isfinite().all()
        found, expected = (cases.dequantized(one) if cache_dtype == torch.int8 else one.double() for one in caches)
        assert relative_error(found, expected) < (1e-3 if cache_dtype == torch.bfloat16 else 5e-3)
        cache = caches[1]


MASKS = {"full": (None, False), "window": (37, False), "wide": (5000, False), "chunks": (50, True)}


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 4, 256), (64, 8, 64), (8, 1, 96)])
@pytest.mark.parametrize("case", cases.BATCHES)
@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "alibi"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_windows_and_scores(
    case: str,
    heads: tuple[int, int, int],
    kind: str,
    mask: str,
    cache_dtype: torch.dtype,
    backend: AttentionBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_flashinfer, "FA3_MIN_QUERY_LEN", 2)
    batch, (H, K, E) = cases.BATCHES[case], heads
    window, chunked = MASKS[mask]
    features = {"cap": {"soft_cap"}, "sinks": {"sinks"}, "alibi": {"alibi"}}.get(kind, set())
    features |= set() if window is None else {"chunks" if chunked else "window"}
    reason = backend.unsupported_reason(
        device=CUDA,
        dtype=torch.bfloat16,
        kv_cache_dtype=cache_dtype,
        head_dim=E,
        num_heads=H,
        num_kv_heads=K,
        block_size=batch.block_size,
        features=frozenset(features),  # type: ignore[arg-type]
    )
    if reason is not None:
        pytest.skip(reason)
    metadata, num_blocks = cases.make_metadata(batch, backend, window=window, chunked=chunked)
    to_cuda(metadata)
    tokens = metadata.num_tokens + batch.padding
    # A page of several layers: the cache's blocks are not next to each other.
    cache = random_cache(num_blocks, 4, K, batch.block_size, E, cache_dtype)
    q, k, v = random(tokens, (H + 2 * K) * E).unflatten(1, (H + 2 * K, E)).split((H, K, K), dim=1)
    scores = Scores(
        soft_cap=1.5 if kind == "cap" else 0.0,
        sinks_H=random(H) if kind == "sinks" else None,
        alibi_slopes_H=0.5 ** (torch.arange(H, device=CUDA) % 8 + 1.0) if kind == "alibi" else None,
    )
    outs = []
    for one in (backend, TorchAttention()):
        metadata.backend = one
        one.plan(metadata)
        outs.append(one.forward(q, k, v, cache.clone()[:, 2:], E**-0.5, metadata, scores))
    unrounded = cache_dtype != torch.bfloat16 and backend.name == "flashinfer" and "prefill" in case
    count = metadata.num_tokens
    assert outs[0].isfinite().all()
    assert relative_error(outs[0][:count], outs[1][:count].double()) < (8e-2 if unrounded else LIMIT)


@pytest.mark.parametrize("case", ["one token", "decodes", "mixed", "odd block size", "chunk after a cached prefix"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_latent_attention(case: str, interleaved: bool, cache_dtype: torch.dtype) -> None:
    latent_attention_as_the_reference(TritonAttention(), cases.BATCHES[case], interleaved, cache_dtype)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("cached", [0, 300, 5000])
def test_latent_prompts_run_in_flash_attention3(cached: int, cache_dtype: torch.dtype) -> None:
    """Behind a decode and a few tokens: prompts with and without a cached prefix."""
    if reason := flash_attention3_unavailable_reason(CUDA):
        pytest.skip(reason)
    lengths, backend = (FA3_MIN_QUERY_LEN + 100, 40, 700), TritonAttention()
    contexts = (cached + lengths[0], lengths[1], cached + lengths[2])
    batch = cases.Batch(query_lens=(1, 5, *lengths), seq_lens=(70, 90, *contexts), padding=3)
    latent_attention_as_the_reference(backend, batch, True, cache_dtype)
    assert backend.prompt_steps == {"fa3-fwd": 1}


def latent_attention_as_the_reference(backend: TritonAttention, batch: cases.Batch, interleaved: bool, cache_dtype: torch.dtype) -> None:
    """DeepSeek-V2-Lite's heads, against the reference in float32."""
    heads, nope, rope, values, latent = 16, 128, 64, 128, 512
    metadata, num_blocks = cases.make_metadata(batch, backend)
    to_cuda(metadata)
    tokens, scale = metadata.num_tokens + batch.padding, (nope + rope) ** -0.5
    merged = random(tokens, heads * (nope + rope) + latent + rope)
    angles = torch.rand(tokens, rope // 2, device=CUDA).repeat(1, 2) * 6
    q_THE, kv_a_TE = (merged[:, : heads * (nope + rope)].view(tokens, heads, nope + rope), merged[:, heads * (nope + rope) :])
    others = [random(latent), angles.cos().bfloat16(), angles.sin().bfloat16()]
    kv_b = random(heads * (nope + values), latent) * latent**-0.5
    cache = random(num_blocks, batch.block_size, latent + rope).to(cache_dtype)
    args = [q_THE, kv_a_TE, *others, kv_b]
    rest = scale, 1e-6, interleaved
    expected = TorchAttention().mla_forward(LatentOperands(*(one.float() for one in args), cache.clone(), *rest), metadata)
    out = backend.mla_forward(LatentOperands(*args, cache, *rest), metadata)
    # The reference rounds the step's own entries to float8 from float32, not from bfloat16.
    limit = 2e-2 if cache_dtype == torch.bfloat16 else 5e-2
    assert relative_error(out[: metadata.num_tokens], expected[: metadata.num_tokens].double()) < limit
    assert not out[metadata.num_tokens :].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float8_cache_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Every float8 value and every middle between two, beyond the largest, and NaN; by the decode and by the prompt kernel."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].sort().values
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([465.0, -1e6, torch.inf, torch.nan])])
    values = F.pad(values, (0, 512 - len(values))).to(CUDA)
    for lengths in ((1, 1), (2,)):
        batch = cases.Batch(query_lens=lengths, seq_lens=lengths)
        metadata, num_blocks = cases.make_metadata(batch, TritonAttention())
        to_cuda(metadata)
        cache = torch.zeros(num_blocks, 2, 4, 16, 64, device=CUDA).to(torch.float8_e4m3fn)
        k, v = (half.view(2, 4, 64).to(dtype) for half in (values, values.flip(0)))
        TritonAttention().forward(torch.zeros(2, 8, 64, device=CUDA, dtype=dtype), k, v, cache, 0.125, metadata)
        for t, slot in enumerate(metadata.slot_mapping.tolist()):
            for part, x in enumerate((values, values.flip(0))):
                expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float().view(2, 4, 64)[t]
                kept = cache[slot // 16, part, :, slot % 16].float()
                assert torch.equal(kept.nan_to_num(1000.0), expected.nan_to_num(1000.0))


def decode_steps(use_graph: bool) -> list[torch.Tensor]:
    """Nine steps of attention and advance, plain or replayed; what they leave behind."""
    torch.manual_seed(0)
    metadata, _ = cases.make_metadata(cases.Batch(query_lens=(1, 1, 1), seq_lens=(3, 130, 31)), TritonAttention())
    to_cuda(metadata)
    metadata.block_table = torch.arange(3 * 12, device=CUDA, dtype=torch.int32).reshape(3, 12)
    positions = (metadata.seq_lens - 1).long()

    def slots() -> torch.Tensor:
        blocks = metadata.block_table.long().gather(1, (positions // 16)[:, None])[:, 0]
        return blocks * 16 + positions % 16

    metadata.slot_mapping = slots()
    cache = random(36, 2, 2, 16, 64)
    qkv = random(3, 8 * 64)
    out = torch.zeros(3, 4 * 64, device=CUDA, dtype=torch.bfloat16)

    def step() -> None:
        with running({KV_CACHES: metadata}):
            q, k, v = qkv.unflatten(1, (8, 64)).split((4, 2, 2), dim=1)
            out.copy_(attention(q, k, v, cache, 0.125).flatten(1))
        positions.add_(1)  # the next step lies a token further
        metadata.seq_lens.add_(1)
        metadata.slot_mapping.copy_(slots())

    step()
    run = step
    if use_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for _ in range(8):
        run()
    torch.cuda.synchronize()
    return [out, cache, metadata.seq_lens, positions]


def test_decode_steps_replayed_from_one_graph() -> None:
    for plain, replayed in zip(decode_steps(False), decode_steps(True), strict=True):
        assert torch.equal(plain, replayed)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cached", [0, 100])
def test_prompts_run_in_flash_attention3(head_dim: int, cached: int) -> None:
    if reason := flash_attention3_unavailable_reason(CUDA):
        pytest.skip(reason)
    lengths = (FA3_MIN_QUERY_LEN, 40, 700)
    batch = cases.Batch(query_lens=lengths, seq_lens=tuple(cached + length for length in lengths))
    assert isinstance(prompts_as_the_reference(FlashInferAttention(build=False), batch, (8, 2, head_dim)), FlashAttention3Prompts)
