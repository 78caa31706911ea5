"""`cas::rope_attention_quantize`: what it rounds is what rounding its output afterwards gives; Triton's kernel in the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata, attention_metadata
from compile_and_serve.custom_ops.attention.flashinfer_backend import FlashInferAttention
from compile_and_serve.custom_ops.attention.rope_attention import rope_attention
from compile_and_serve.custom_ops.attention.rope_attention_quantize import rope_attention_quantize
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.quantized.quantization import RoundTo, quantize_activations
from compile_and_serve.custom_ops.quantized.quantized_linear import reads_rounded

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

from compile_and_serve.custom_ops.attention import triton_decode
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.attention.triton_decode_quantize import can_round, rounds_heads
from compile_and_serve.custom_ops.quantized.triton_quantize import quantize_rows
from compile_and_serve.custom_ops.triton_common import SPLIT_COUNTERS, split_counters
from tests.custom_ops.attention.test_triton_backend import BLOCK_SIZE, exact_float8, make_metadata, random_cache

__all__ = ["exact_float8"]  # a fixture, used by all tests here
FP8, INT8 = torch.float8_e4m3fn, torch.int8
KINDS = {
    "token": {},
    "group": {"per_group": True},
    "static": {"input_scale": torch.tensor([0.01])},
}
SEQ_LENS = [40, 3, 0, 17, 0]  # of which two are padding
HEADS = [(4, 2, 64), (6, 2, 80), (6, 3, 128), (3, 1, 24), (2, 2, 256)]


def decodes(seq_lens: list[int]) -> AttentionMetadata:
    """A step of one token a sequence, of which some are padding of length 0."""
    table = make_metadata([1] * len(seq_lens), [max(length, 1) for length in seq_lens], 80)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return replace(table, seq_lens=lengths, slot_mapping=table.slot_mapping.masked_fill(lengths == 0, -1))


def inputs(
    num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments of the op; one sequence's values are a thousand times smaller than the others'."""
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + 4).to(dtype)[:, :width]
    qkv[-1] *= 1e-3
    cos, sin = (torch.randn(num_tokens, head_dim // 2).repeat(1, 2) for _ in range(2))
    cache = random_cache(80, 2, kv_heads, BLOCK_SIZE, head_dim, dtype=cache_dtype)
    return qkv, cos, sin, cache, heads, kv_heads, head_dim**-0.5


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether they are equal to the bit."""
    as_bytes = [x.contiguous().view(torch.uint8) for x in (ours, theirs)]
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(*as_bytes)


@pytest.mark.parametrize("config", [(16, 4, 1, 4, 16), (16, 1, 2, 1, 16)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("shape", HEADS)
def test_the_decode_kernel_rounds_what_it_stores(shape, dtype, kind, config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one program or several, combined of splits or not; narrower than what is read back at once, or wider."""
    torch.manual_seed(sum(shape))
    monkeypatch.setattr(triton_decode, "decode_config", lambda *_: config)
    cache_dtype = FP8 if shape[2] == 128 else torch.float16
    metadata, args = decodes(SEQ_LENS), inputs(len(SEQ_LENS), *shape, torch.float16, cache_dtype)
    plain_args = (*args[:3], args[3].clone(), *args[4:])
    round_to = RoundTo(dtype=dtype, **KINDS[kind])
    for _ in range(2):  # twice: arrivals are counted from zero again
        with attention_metadata(metadata):
            out, values, scale = rope_attention_quantize(*args, dtype=dtype, **KINDS[kind])
            expected = rope_attention(*plain_args)
        assert same(out, expected)
        assert same(args[3], plain_args[3])
        theirs, their_scale = quantize_rows(out, dtype, per_group=round_to.per_group, input_scale=round_to.input_scale)
        assert same(values, theirs)
        assert same(scale, their_scale)
        reference, reference_scale = quantize_activations(out, dtype, **KINDS[kind])
        assert same(values, reference)
        torch.testing.assert_close(scale, reference_scale, rtol=1e-6, atol=0)
        assert not split_counters(torch.device("cpu")).any()
    assert out[[2, 4]].count_nonzero() == 0
    assert out[[0, 1, 3]].float().abs().sum(1).all()


def test_wide_rows_are_read_back_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one warp 1024 features at once, of 1280; in float32."""
    monkeypatch.setattr(triton_decode, "decode_config", lambda *_: (16, 2, 1, 1, 16))
    for dtype in (FP8, INT8):
        for options in KINDS.values():
            metadata, args = decodes([40, 5]), inputs(2, 20, 2, 64, torch.float32, torch.float32)
            with attention_metadata(metadata):
                out, *ours = rope_attention_quantize(*args, dtype=dtype, **options)
            theirs = quantize_rows(out, dtype, **options)
            assert all(same(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 2, 128)])
def test_a_row_that_is_not_a_number_stays_so(heads, dtype, kind) -> None:
    args = inputs(3, *heads, torch.float16, torch.float16)
    args[0][1, -5] = torch.nan  # in the last head's value
    with attention_metadata(decodes([9, 9, 9])):
        out, values, scale = rope_attention_quantize(*args, dtype=dtype, **KINDS[kind])
    assert out[1].isnan().any()
    wide = scale.repeat_interleave(128 if kind == "group" else values.shape[1], 1)[:, : values.shape[1]]
    product = values.float() * wide
    assert product[1].isnan().any()
    assert product[[0, 2]].isfinite().all()


def test_which_steps_have_a_fused_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes that fill the step; any other is attention and then rounding."""
    calls = []
    real = triton_decode.decode_attention
    monkeypatch.setattr(
        triton_decode,
        "decode_attention",
        lambda *args, **more: calls.append(more.get("round_to")) or real(*args, **more),
    )
    steps = {
        "decodes": (decodes([5, 9, 0]), 3, True),
        "decodes and padding tokens": (make_metadata([1, 1], [5, 9], 80, padding=1), 3, False),
        "prompts": (make_metadata([4, 3], [4, 20], 80), 7, False),
        "mixed": (make_metadata([1, 5], [9, 20], 80), 6, False),
    }
    for backend in (TritonAttention(), FlashInferAttention(build=False)):
        monkeypatch.setattr(FlashInferAttention, "_planned_wrapper", lambda *_: None)
        for name, (metadata, num_tokens, is_fused) in steps.items():
            metadata.backend = backend
            args = inputs(num_tokens, 4, 2, 16, torch.float16, torch.float16)
            calls.clear()
            with attention_metadata(metadata):
                out, values, scale = rope_attention_quantize(*args, dtype=FP8)
            assert any(calls) == is_fused, (backend.name, name)
            expected, expected_scale = quantize_activations(out, FP8)
            assert same(values, expected), (backend.name, name)
            torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)


def test_counters_suffice() -> None:
    assert can_round(SPLIT_COUNTERS // 9, 8)
    assert not can_round(SPLIT_COUNTERS // 9 + 1, 8)


def test_where_heads_are_rounded_by_themselves() -> None:
    static = torch.ones(1)
    assert rounds_heads(RoundTo(dtype=FP8, input_scale=static), 80)
    assert not rounds_heads(RoundTo(dtype=INT8, input_scale=static), 80)
    assert rounds_heads(RoundTo(dtype=INT8, per_group=True), 256)
    assert not rounds_heads(RoundTo(dtype=FP8, per_group=True), 64)
    assert not rounds_heads(RoundTo(dtype=FP8), 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_elsewhere_it_is_attention_and_then_rounding(dtype, kind) -> None:
    metadata = make_metadata([1, 5, 1], [9, 20, 1], 80)
    metadata.backend = TorchAttention()
    args = inputs(7, 4, 2, 40, torch.float32, torch.float32)
    with attention_metadata(metadata):
        out, values, scale = rope_attention_quantize(*args, dtype=dtype, round_one_token=False, **KINDS[kind])
        expected = rope_attention(*args)
    assert same(out, expected)
    theirs = quantize_activations(out, dtype, **KINDS[kind])
    assert same(values, theirs[0])
    assert same(scale, theirs[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_fake_has_the_shapes(kind: str) -> None:
    metadata = make_metadata([1, 5], [9, 20], 80)
    metadata.backend = TorchAttention()
    args = inputs(6, 4, 2, 40, torch.float32, torch.float32)
    with attention_metadata(metadata):
        real = rope_attention_quantize(*args, dtype=INT8, **KINDS[kind])
    meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    options = {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in KINDS[kind].items()
    }
    for ours, theirs in zip(rope_attention_quantize(*meta, dtype=INT8, **options), real, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)


def test_who_reads_what_comes_rounded() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert reads_rounded(1, cpu, per_block=False)
    assert not reads_rounded(1, cuda, per_block=False)
    assert reads_rounded(1, cuda, per_block=True)
    assert reads_rounded(2, cuda, per_block=False)
