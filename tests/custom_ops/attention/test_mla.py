"""Latent attention: the reference against plain attention over expanded heads, and the Triton kernels, in the interpreter, against it."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.attention import mla_torch
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.quantization import LARGEST
from tests.support.attention_cases import BATCHES, Batch, make_metadata
from tests.support.latent_cases import SIZES, arguments, expanded, interpreted
from tests.support.numbers import relative_error

FP8 = torch.float8_e4m3fn

CASES = {
    **{name: BATCHES[name] for name in ("one token", "decodes", "mixed", "odd block size", "chunk after a cached prefix")},
    "few tokens each": Batch(query_lens=(1, 5, 16, 2), seq_lens=(3, 70, 16, 300), padding=2),
    "prompts among decodes": Batch(query_lens=(1, 2, 40, 1, 17), seq_lens=(3, 70, 140, 300, 17)),
}


@pytest.mark.slow_cases
@pytest.mark.pairwise
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
def test_equals_expanded_attention(case: str, interleaved: bool, backend: str) -> None:
    torch.manual_seed(len(case))
    attention = _backend(backend)
    metadata, pages = make_metadata(CASES[case], attention)
    tokens = metadata.num_tokens + CASES[case].padding
    args = arguments(tokens, pages, CASES[case].block_size, **SIZES)
    before = args[-1].clone()
    out = attention.mla_forward(LatentOperands(*args, 0.2, 1e-6, interleaved), metadata)
    expected = expanded(args, 0.2, interleaved, metadata)
    assert relative_error(out[: metadata.num_tokens], expected) < 2e-6
    assert (out[metadata.num_tokens :] == 0).all()
    # nothing else of the cache is written
    changed = (before != args[-1]).any(-1).flatten().nonzero().squeeze(1)
    assert set(changed.tolist()) <= set(metadata.slot_mapping.tolist())
    _, kv_a_TE, norm_weight, cos, sin, _, cache = args
    latent = torch.nn.functional.rms_norm(kv_a_TE[:, : len(norm_weight)], norm_weight.shape, norm_weight, 1e-6)
    key = mla_torch.rotate(kv_a_TE[:, None, len(norm_weight) :], cos, sin, interleaved)[:, 0]
    written = cache.flatten(0, 1)[metadata.slot_mapping[: metadata.num_tokens]]
    assert torch.allclose(written, torch.cat((latent, key), dim=1)[: metadata.num_tokens], atol=1e-5)


def _backend(name: str) -> TorchAttention:
    if name == "torch":
        return TorchAttention()
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention

    return TritonAttention()  # type: ignore[return-value]


def test_ways_agree() -> None:
    """Absorbed and materialized attention, in tiles of queries, give the same."""
    torch.manual_seed(0)
    heads, entries = torch.randn(3, 36, 24) * 0.3, torch.randn(700, 32)
    q_nope, q_rope = torch.randn(3, 600, 16), torch.randn(3, 600, 8)
    absorbed = mla_torch._absorbed(q_nope, q_rope, [(600, entries)], heads, 0.2)
    materialized = mla_torch._materialized(q_nope, q_rope, entries, heads, 0.2)
    assert relative_error(absorbed, materialized.double()) < 1e-5


@pytest.mark.slow_cases
@interpreted
@pytest.mark.parametrize("config", [(16, 16, 1, 1, 4, 16), (16, 16, 4, 2, 4, 16), (32, 32, 16, 1, 4, 32)])
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (3, 1, 2)])
def test_splits_agree(config: tuple[int, ...], query_lens: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.attention.triton_mla_decode import absorbed_attention

    torch.manual_seed(5)
    metadata, pages = make_metadata(Batch(query_lens=query_lens, seq_lens=(170, 3, 33), block_size=8), TorchAttention())
    q_latent, q_rope = torch.randn(5, metadata.num_tokens, 40), torch.randn(metadata.num_tokens, 5, 8)
    cache = torch.randn(pages, 8, 48)
    where = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
    expected = []
    for s, seq_len in enumerate(metadata.seq_lens.tolist()):
        entries = cache[metadata.block_table[s].long()].flatten(0, 1)[:seq_len]
        rows = slice(*metadata.query_start_loc[s : s + 2].tolist())
        q = torch.cat((q_latent[:, rows], q_rope[rows].transpose(0, 1)), dim=2)
        expected.append(mla_torch._attend(q, entries, entries[:, :40], 0.25))
    for _ in range(2):  # twice: arrivals are counted from zero again
        out = torch.full_like(q_latent, float("nan"))
        absorbed_attention(q_latent, q_rope, cache, 0.25, *where, out, 0, 3, max(query_lens), config)  # type: ignore[arg-type]
        assert torch.allclose(out, torch.cat(expected, dim=1), atol=2e-5, rtol=1e-4)


@pytest.mark.slow_cases
@interpreted
@pytest.mark.parametrize("part_size", [50, 131, 1000])
def test_parts_of_keys_agree(part_size: int) -> None:
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.attention.triton_mla_prefill import materialized_attention

    torch.manual_seed(5)
    backend = TorchAttention()
    metadata, pages = make_metadata(Batch(query_lens=(40, 9, 70), seq_lens=(140, 9, 131)), backend)
    args = arguments(metadata.num_tokens, pages, 16, **SIZES)
    expected = backend.mla_forward(LatentOperands(*args, 0.2, 1e-6, True), metadata)
    q_rope = mla_torch.rotate(args[0][:, :, 16:], args[3], args[4], True)
    starts = torch.tensor([0, *metadata.seq_lens.cumsum(0).tolist()], dtype=torch.int32)
    out = torch.full_like(expected, float("nan"))
    materialized_attention(
        args[0], q_rope, args[5], args[6], 0.2, metadata.query_start_loc, metadata.seq_lens, metadata.block_table, starts, out,
        first_seq=0, num_queries=metadata.num_tokens, num_keys=280, max_seq_len=140, part_size=part_size,
    )  # fmt: skip
    assert torch.allclose(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@interpreted
def test_only_a_long_prefix_has_parts_and_their_kernel_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.attention import triton_mla_prefill

    launched: list[bool] = []
    monkeypatch.setattr(triton_mla_prefill, "PART_BYTES", 0)
    monkeypatch.setattr(
        triton_mla_prefill, "launch", lambda *_, **options: launched.append(options["HAS_PARTS"]) if "HAS_PARTS" in options else None
    )
    backend = _backend("triton")

    def parts_of(*seq_lens: int) -> list[bool]:
        metadata, pages = make_metadata(Batch(query_lens=(40, 20), seq_lens=seq_lens), backend)
        launched.clear()
        backend.mla_forward(LatentOperands(*arguments(60, pages, 16, **SIZES), 0.2), metadata)
        return launched

    assert parts_of(100, 20) == [False]
    assert parts_of(101, 20) == [True, True]
    monkeypatch.setattr(triton_mla_prefill, "is_compiling_ahead", lambda: True)
    assert parts_of(40, 20) == [True, True, False]


def test_float8_cache_saturates() -> None:
    torch.manual_seed(1)
    backend = TorchAttention()
    metadata, pages = make_metadata(BATCHES["mixed"], backend)
    args = arguments(metadata.num_tokens + 3, pages, 16, **SIZES, cache_dtype=FP8)
    args[2][3] = 1e6  # of the norm's weight
    backend.mla_forward(LatentOperands(*args, 0.01, 1e-6, True), metadata)
    assert args[-1].float().abs().max() == LARGEST[FP8]
    args[2][3] = 1.0
    out = backend.mla_forward(LatentOperands(*args, 0.2, 1e-6, True), metadata)
    assert relative_error(out[: metadata.num_tokens], expanded(args, 0.2, True, metadata)) < 1e-5


@interpreted
def test_padding_sequences_get_zeros() -> None:
    """A padded step of decodes ends with sequences of length 0."""
    backend = _backend("triton")
    metadata, pages = make_metadata(Batch(query_lens=(1, 1), seq_lens=(40, 3)), backend)
    metadata.query_start_loc = torch.arange(5, dtype=torch.int32)
    metadata.seq_lens = torch.tensor([40, 3, 0, 0], dtype=torch.int32)
    metadata.block_table = torch.cat([metadata.block_table, torch.zeros_like(metadata.block_table)])
    metadata.slot_mapping = torch.cat([metadata.slot_mapping, torch.tensor([-1, -1])])
    args = arguments(4, pages, 16, **SIZES)
    out = backend.mla_forward(LatentOperands(*args, 0.2, 1e-6, True), metadata)
    assert (out[2:] == 0).all()
    metadata.seq_lens = metadata.seq_lens[:2]
    assert relative_error(out[:2], expanded(args, 0.2, True, metadata)) < 2e-6
