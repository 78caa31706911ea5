"""`cas::group_linear` and `cas::group_embedding` on the CPU: the C++ kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.quantized.group_layout import dequantize_groups, pack_codes_cpu, pack_scales_cpu, unpack_codes
from compile_and_serve.custom_ops.quantized.group_linear import group_linear, layout_unsupported_reason
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
# Activations have 16 bits in groups of 32, relative to the group's largest; bfloat16 rounds the normalized x and the result.
# float32: the CPU's kernel rounds activations to 16 bits by blocks of 32, whose largest value is about 2.5 sigma. The error's sigma is
# 2.5 / 32767 / sqrt(12) = 2.2e-5 of the activations', up to twice that in a product of two linears; 4 sigma are allowed.
LIMITS = {torch.bfloat16: 8e-3, torch.float32: 2e-4}
OFFSETS = ("none", "zeros", "minima")


@pytest.fixture(autouse=True)
def _kernels() -> None:
    reason = layout_unsupported_reason(CPU, 32)
    if reason is not None:
        pytest.skip(reason)


def weight(out: int, inner: int, bits: int, group_size: int, offset: str, scale_dtype: torch.dtype):
    groups = -(-inner // group_size)
    codes = torch.randint(0, 1 << bits, (out, inner), dtype=torch.uint8)
    scale = (torch.rand(out, groups) * 0.02 + 0.001).to(scale_dtype)
    if offset == "none":
        return codes, scale, None
    if offset == "zeros":
        # Near the middle: else all outputs would be about one multiple of Σ x, whose relative error is large where it is small.
        return codes, scale, torch.randint((1 << bits - 1) - 2, (1 << bits - 1) + 3, (out, groups), dtype=torch.uint8)
    return codes, scale, (-scale.float() * (1 << bits - 1) + torch.randn(out, groups) * 0.002).to(scale_dtype)


def packed_of(parts, bits: int, group_size: int):
    codes, scale, offset = parts
    inner = codes.shape[1]
    return (
        pack_codes_cpu(codes, bits),
        pack_scales_cpu(scale, inner, group_size),
        None if offset is None else pack_scales_cpu(offset, inner, group_size),
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "inner"), [(16, 32), (100, 200), (33, 576)])
def test_packing_gives_back_the_codes(bits: int, out: int, inner: int) -> None:
    codes = torch.randint(0, 1 << bits, (out, inner), dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes_cpu(codes, bits), bits, out, inner), codes)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 7, 40])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 16), (8, 32), (8, 640)])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_against_float64(dtype, num_tokens, offset, bits, group_size, scale_dtype, silu_mul, extras) -> None:
    for out, inner in ((64, 128), (104, 600)):
        parts = weight(out, inner, bits, group_size, offset, scale_dtype)
        rows = out // 2 if silu_mul else out
        x = torch.randn(num_tokens, inner + 8).to(dtype)[:, :inner]
        norm = torch.rand(inner).to(dtype) + 0.5 if extras else None
        bias = torch.randn(out).to(dtype) if extras else None
        residual = torch.randn(num_tokens, rows + 4).to(dtype)[:, :rows] if extras else None
        y = group_linear(x, *packed_of(parts, bits, group_size), out, bits, group_size, norm, 1e-5, bias, silu_mul, residual)
        wide = F.rms_norm(x, (inner,), norm, 1e-5).double() if extras else x.double()
        expected = F.linear(wide, dequantize_groups(*parts, bits, group_size, torch.float64), bias.double() if extras else None)
        if silu_mul:
            gate, up = expected.chunk(2, dim=-1)
            expected = F.silu(gate) * up
        if extras:
            expected = expected + residual.double()
        assert relative_error(y, expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("table", "group_size"), [("e2m1", 16), ("e2m1", 32), ("e2m1", 128), ("nf4", 64), ("fp4", 64)])
def test_tables_against_float64(dtype, table, group_size) -> None:
    for num_tokens, out, inner, silu_mul in ((1, 64, 128, False), (7, 104, 608, False), (5, 104, 192, True)):
        codes, scale, _ = weight(out, inner, 4, group_size, "none", torch.float32)
        x, norm = torch.randn(num_tokens, inner).to(dtype), torch.rand(inner).to(dtype) + 0.5
        packed = packed_of((codes, scale, None), 4, group_size)
        y = group_linear(x, *packed, out, 4, group_size, norm, 1e-5, silu_mul=silu_mul, table=table)
        plain = dequantize_groups(codes, scale, None, 4, group_size, torch.float64, table=table)
        expected = F.linear(F.rms_norm(x, (inner,), norm, 1e-5).double(), plain)
        if silu_mul:
            gate, up = expected.chunk(2, dim=-1)
            expected = F.silu(gate) * up
        assert relative_error(y, expected) < LIMITS[dtype]
        reference = torch.ops.cas.group_linear_reference(x, *packed, out, 4, group_size, norm, 1e-5, None, silu_mul, None, table)
        assert relative_error(reference, expected) < LIMITS[dtype]


def test_a_table_has_no_offsets_and_a_known_name() -> None:
    packed = packed_of(weight(16, 32, 4, 32, "zeros", torch.float16), 4, 32)
    for table, offset in (("e2m1", packed[2]), ("e3m0", None)):
        with pytest.raises(ValueError, match=f"no kernel has the table '{table}'"):
            group_linear(torch.randn(1, 32), packed[0], packed[1], offset, 16, 4, 32, table=table)


def test_a_row_does_not_depend_on_its_batch() -> None:
    parts = packed_of(weight(80, 192, 4, 32, "minima", torch.float16), 4, 32)
    x = torch.randn(13, 192).bfloat16()
    together = group_linear(x, *parts, 80, 4, 32)
    for row in range(13):
        assert torch.equal(group_linear(x[row : row + 1], *parts, 80, 4, 32)[0], together[row])


def test_values_that_are_not_finite_reach_the_result() -> None:
    parts = packed_of(weight(32, 64, 4, 32, "none", torch.float16), 4, 32)
    for value in (float("nan"), float("inf")):
        x = torch.randn(2, 64)
        x[1, 40] = value
        y = group_linear(x, *parts, 32, 4, 32)
        assert y[0].isfinite().all()
        assert y[1].isnan().all()


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16), (8, 64)])
def test_embedding(bits: int, group_size: int, offset: str) -> None:
    parts = weight(100, 96, bits, group_size, offset, torch.float16)
    ids = torch.tensor([0, 99, 17, 17, 64])
    expected = dequantize_groups(*parts, bits, group_size, torch.float32)[ids]
    layouts = [packed_of(parts, bits, group_size), parts]
    for layout in layouts:
        arguments = (ids, *layout, 100, 96, bits, group_size)
        for op in (torch.ops.cas.group_embedding, torch.ops.cas.group_embedding_reference):
            assert torch.allclose(op(*arguments, torch.float32), expected, atol=1e-6)
            assert torch.allclose(op(*arguments, torch.bfloat16).float(), expected, atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="outside of a vocabulary"):
        torch.ops.cas.group_embedding(torch.tensor([100]), *layouts[0], 100, 96, bits, group_size, torch.float32)
