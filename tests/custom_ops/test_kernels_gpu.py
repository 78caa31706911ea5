# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""The CUDA kernels on a GPU, in bfloat16 and at odd sizes, against torch in float32."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.attention import flashinfer_backend as attention_flashinfer
from compile_and_serve.custom_ops.attention.attention import AttentionBackend, attention, attention_metadata
from compile_and_serve.custom_ops.attention.flashinfer_backend import FlashInferAttention
from compile_and_serve.custom_ops.attention.rope_attention import rope_attention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm, rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.linear.triton_linear import fused_linear
from compile_and_serve.custom_ops.quantized.cutlass_gemm import (
    BLOCKS,
    ROWS,
    gemm_library,
    run_gemm,
    scaled_gemm_reference,
)
from compile_and_serve.custom_ops.quantized.quantization import (
    block_scales,
    quantize_activations,
    quantize_weight,
    row_scales,
)
from compile_and_serve.custom_ops.sampling.triton_sampling import greedy_tokens, sample_tokens
from tests.support import attention_cases as cases

CUDA = torch.device("cuda")
LIMIT = 1e-2


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device=CUDA).to(dtype)


def to_cuda(metadata: object) -> None:
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        setattr(metadata, name, getattr(metadata, name).to(CUDA))


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 33, 64, 100])
@pytest.mark.parametrize(
    ("out", "inner", "silu_mul"),
    [(576, 576, False), (3072, 576, True), (130, 1536, False), (4096, 4096, False), (37, 72, False)],
)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fused_linear(out: int, inner: int, silu_mul: bool, num_tokens: int, extras: bool, dtype: torch.dtype) -> None:
    rows = out // 2 if silu_mul else out
    x, weight = random(num_tokens, inner + 8, dtype=dtype)[:, :inner], random(out, inner, dtype=dtype) * inner**-0.5
    norm, bias, residual = (
        (random(inner, dtype=dtype), random(out, dtype=dtype), random(num_tokens, rows, dtype=dtype))
        if extras
        else (None,) * 3
    )
    y = F.rms_norm(x.double(), (inner,), norm.double(), 1e-5) if norm is not None else x.double()
    y = F.linear(y, weight.double(), bias.double() if bias is not None else None)
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    y = y + residual.double() if residual is not None else y
    result = fused_linear(x, weight, out, norm, 1e-5, bias, silu_mul, residual)
    assert result.dtype == dtype
    assert cases.relative_error(result, y) < (2e-3 if dtype == torch.float32 else LIMIT)


def test_elementwise() -> None:
    x, residual, weight = random(33, 1000)[:, :960], random(33, 960), random(960)
    assert cases.relative_error(rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (960,), weight.float(), 1e-6)) < LIMIT
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert cases.relative_error(normed, F.rms_norm(total.float(), (960,), weight.float(), 1e-6)) < LIMIT
    gate, up = x.float().chunk(2, dim=-1)
    assert cases.relative_error(silu_mul_rows(x), F.silu(gate) * up) < LIMIT


def backends() -> list[AttentionBackend]:
    return [TritonAttention(), FlashInferAttention(build=False)]


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (8, 1, 96), (4, 4, 256), (6, 2, 80), (16, 8, 128)])
@pytest.mark.parametrize("case", cases.BATCHES)
@pytest.mark.parametrize("with_rope", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
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
        device=CUDA,
        dtype=torch.bfloat16,
        kv_cache_dtype=cache_dtype,
        head_dim=E,
        num_heads=H,
        num_kv_heads=K,
        block_size=batch.block_size,
    )
    if reason is not None:
        pytest.skip(reason)
    metadata, num_blocks = cases.make_metadata(batch, backend)
    to_cuda(metadata)
    tokens = metadata.num_tokens + batch.padding
    cache = random(num_blocks, 2, K, batch.block_size, E).to(cache_dtype)
    qkv = random(tokens, (H + 2 * K) * E)
    cos, sin = (torch.rand(tokens, E // 2, device=CUDA).repeat(1, 2) for _ in range(2))
    norms = (random(E), random(E)) if H == 16 else (None, None)
    outs, caches = [], []
    for one in (backend, TorchAttention()):
        metadata.backend = one
        one.plan(metadata)
        caches.append(cache.clone())
        with attention_metadata(metadata):
            if with_rope:
                outs.append(rope_attention(qkv, cos, sin, caches[-1], H, K, E**-0.5, *norms))
            else:
                q, k, v = qkv.unflatten(1, (H + 2 * K, E)).split((H, K, K), dim=1)
                outs.append(attention(q, k, v, caches[-1], E**-0.5))
    count = metadata.num_tokens
    # FlashInfer attends a fresh prompt with the keys and values of the step, which no float8 has rounded yet.
    unrounded = cache_dtype == torch.float8_e4m3fn and backend.name == "flashinfer" and "prefill" in case
    assert cases.relative_error(outs[0][:count], outs[1][:count].double()) < (8e-2 if unrounded else LIMIT)
    # A key whose last bit of bfloat16 differs may be rounded to the next float8, an eighth away.
    assert cases.relative_error(caches[0].float(), caches[1].double()) < (
        1e-3 if cache_dtype == torch.bfloat16 else 5e-3
    )
    assert outs[0].isfinite().all()


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


@pytest.mark.parametrize("vocab", [50, 8192, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    logits = random(9, vocab, dtype=dtype)
    tokens, best = greedy_tokens(logits)
    first = (logits == logits.max(1, keepdim=True).values).int().argmax(1)
    assert torch.equal(tokens, first)
    assert torch.equal(best, logits.max(1).values.float())


def test_sampling_follows_the_distribution() -> None:
    vocab, draws = 1000, 20000
    logits = random(1, vocab, dtype=torch.float32) * 2

    def full(value: float) -> torch.Tensor:
        return torch.full((draws,), value, device=CUDA)

    tokens, _ = sample_tokens(
        logits.expand(draws, vocab), full(0.7), torch.full((draws,), 40, device=CUDA, dtype=torch.int32), full(0.9), full(0.0),
        torch.full((draws,), 3, device=CUDA), torch.arange(draws, device=CUDA),
    )  # fmt: skip
    scaled = logits[0] / 0.7
    kept = torch.where(scaled >= scaled.topk(40).values[-1], scaled, -torch.inf).softmax(0)
    ordered, order = kept.sort(descending=True)
    kept[order[ordered.cumsum(0) - ordered >= 0.9]] = 0
    kept /= kept.sum()
    seen = torch.bincount(tokens, minlength=vocab) / draws
    assert seen[kept == 0].sum() == 0
    assert 0.5 * (seen - kept).abs().sum() < 0.03


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
        with attention_metadata(metadata):
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


@pytest.mark.parametrize("config", [*ROWS, *BLOCKS])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1024, 512), (77, 4096, 1088), (300, 2048, 4096)])
def test_cutlass_scaled_gemm(config: str, tokens: int, inputs: int, outputs: int) -> None:
    """Builds the library at its first use here, which takes minutes."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability 9.0")
    library = ctypes.CDLL(str(gemm_library().build()))
    per_block = config in BLOCKS
    x, weight = torch.randn(tokens, inputs, device="cuda"), torch.randn(outputs, inputs, device="cuda")
    scale = (block_scales if per_block else row_scales)(weight, torch.float8_e4m3fn)
    quantized = quantize_weight(weight, scale, torch.float8_e4m3fn)
    a, a_scale = quantize_activations(x, torch.float8_e4m3fn, per_group=per_block)
    expected = scaled_gemm_reference(a, quantized, a_scale, scale).float()
    y = run_gemm(library, config, a, quantized, a_scale, scale).float()
    assert (y - expected).norm() / expected.norm() < 4e-3
    residual = (random(tokens, outputs + 8) * float(expected.std()))[:, :outputs]
    expected = scaled_gemm_reference(a, quantized, a_scale, scale, residual).float()
    y = run_gemm(library, config, a, quantized, a_scale, scale, residual).float()
    assert (y - expected).norm() / expected.norm() < 4e-3
    if not per_block:
        one = torch.tensor([0.25], device="cuda")
        for scales in ((one, scale), (a_scale, one), (one, one)):
            expected = scaled_gemm_reference(a, quantized, *scales).float()
            y = run_gemm(library, config, a, quantized, *scales).float()
            assert (y - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("num_tokens", [1, 3, 65])
@pytest.mark.parametrize("num_features", [48, 576, 4097])
def test_row_wise_ops(num_tokens: int, num_features: int) -> None:
    from compile_and_serve.custom_ops.linear import elementwise

    x, residual = random(num_tokens, num_features + 8)[:, :num_features], random(num_tokens, num_features)
    weight, halves = random(num_features), random(num_tokens, 2 * num_features)
    total, normed = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    exact = F.rms_norm(total.double(), (num_features,), weight.double(), 1e-5)
    assert ((normed.double() - exact).norm() / exact.norm()).item() < LIMIT
    gate, up = halves.double().chunk(2, dim=-1)
    exact = F.silu(gate) * up
    out = elementwise.silu_mul(halves)
    assert out.shape == exact.shape
    assert ((out.double() - exact).norm() / exact.norm()).item() < LIMIT


def test_a_choice_is_measured_by_graph_replay() -> None:
    from compile_and_serve.compiler.artifacts.autotune import TOKENS, Autotuner
    from compile_and_serve.compiler.compat import fake_mode_with_symbols
    from compile_and_serve.compiler.passes.fuse_silu_mul import _ours, _plain

    mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
    with mode:
        x = torch.empty(symbols["tokens"], 2 * 4096, dtype=torch.bfloat16, device="meta")
    choice = Autotuner(CUDA, []).choose("fuse_silu_mul", _ours, _plain, [x])
    assert len(choice.ours) == len(choice.inductor) == len(TOKENS)
    assert all(1e-7 < seconds < 1e-2 for seconds in (*choice.ours, *choice.inductor))
