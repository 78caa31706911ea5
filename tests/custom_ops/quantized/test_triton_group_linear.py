"""The Triton kernels of group-quantized linears, in Triton's interpreter, against torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import compile_and_serve.custom_ops.quantized.group_linear  # noqa: F401 (defines the op)

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it", allow_module_level=True)

from compile_and_serve.custom_ops.quantized.cuda_group_linear import EXPANDED, TILE, GroupLinear, group_linear
from compile_and_serve.custom_ops.quantized.group_layout import (
    dequantize_groups,
    pack_codes_triton,
    pack_scales_triton,
    unpack_codes,
    unpack_scales,
)
from compile_and_serve.custom_ops.quantized.triton_group_matmul import dequantize, group_matmul
from tests.support.numbers import relative_error

LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3}  # the interpreter does not multiply bfloat16
OFFSETS = ("none", "zeros", "minima")


def weight(out: int, inner: int, bits: int, group_size: int, offset: str) -> tuple[torch.Tensor, ...]:
    """(codes, scales, offsets or None) at random."""
    groups = -(-inner // group_size)
    codes = torch.randint(0, 1 << bits, (out, inner), dtype=torch.uint8)
    scale = (torch.rand(out, groups) * 0.02 + 0.001).half()
    if offset == "none":
        return codes, scale, None
    if offset == "zeros":
        return codes, scale, torch.randint(0, 1 << bits, (out, groups), dtype=torch.uint8)
    return codes, scale, (-torch.rand(out, groups) * 0.2).half()


def call(
    num_tokens: int,
    out: int,
    inner: int,
    *,
    bits: int = 4,
    group_size: int = 128,
    offset: str = "zeros",
    silu_mul: bool = False,
    extras: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of the op over the Triton layout, and the expected result in float64."""
    codes, scale, offsets = weight(out, inner, bits, group_size, offset)
    rows = out // 2 if silu_mul else out
    arguments = {
        "x_TI": torch.randn(num_tokens, inner + 8).to(dtype)[:, :inner],
        "packed": pack_codes_triton(codes, bits),
        "scale": pack_scales_triton(scale),
        "offset": None if offsets is None else pack_scales_triton(offsets),
        "out_features": out,
        "bits": bits,
        "group_size": group_size,
        "bias_O": torch.randn(out).to(dtype) if extras else None,
        "silu_mul": silu_mul,
        "residual_TO": torch.randn(num_tokens, rows + 4).to(dtype)[:, :rows] if extras else None,
    }
    plain = dequantize_groups(codes, scale, offsets, bits, group_size, torch.float64)
    bias, residual = arguments["bias_O"], arguments["residual_TO"]
    y = F.linear(arguments["x_TI"].double(), plain, None if bias is None else bias.double())
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return arguments, y if residual is None else y + residual.double()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "inner"), [(64, 128), (100, 200), (130, 576)])
def test_layouts_give_back_the_codes(bits: int, out: int, inner: int) -> None:
    codes, scale, _ = weight(out, inner, bits, 32, "none")
    packed = pack_codes_triton(codes, bits)
    assert packed.dtype == torch.int16
    assert torch.equal(unpack_codes(packed, bits, out, inner), codes)
    assert torch.equal(unpack_scales(pack_scales_triton(scale), out), scale)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_tiles(bits: int, offset: str, dtype: torch.dtype) -> None:
    arguments, expected = call(3, 100, 320, bits=bits, offset=offset, dtype=dtype, extras=True)
    assert relative_error(group_linear(**arguments), expected) < LIMITS[dtype]


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 640])
@pytest.mark.parametrize("bits", [4, 8])
def test_group_sizes(bits: int, group_size: int) -> None:
    arguments, expected = call(2, 64, 600, bits=bits, group_size=group_size)
    assert relative_error(group_linear(**arguments), expected) < LIMITS[torch.float32]


@pytest.mark.parametrize("num_tokens", [1, 17, 80])
@pytest.mark.parametrize("extras", [False, True])
def test_silu_mul(num_tokens: int, extras: bool) -> None:
    for out in (256, 200):  # the halves are whole tiles, or not
        arguments, expected = call(num_tokens, out, 256, silu_mul=True, extras=extras)
        assert relative_error(GroupLinear(**arguments).run(TILE), expected) < 5e-6


@pytest.mark.parametrize("config", [(64, 1, 3, 4), (64, 4, 3, 4), (128, 2, 3, 8)])
def test_configurations(config: tuple[int, int, int, int]) -> None:
    arguments, expected = call(5, 300, 1024, extras=True)
    out = group_matmul(
        arguments["x_TI"], arguments["packed"], arguments["scale"], arguments["offset"], 300, 4, 128, arguments["bias_O"],
        False, arguments["residual_TO"], config,
    )  # fmt: skip
    assert relative_error(out, expected) < LIMITS[torch.float32]


@pytest.mark.slow_cases
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (4, 256), (8, 32), (8, 128)])
def test_dequantization_is_exact(bits: int, group_size: int, offset: str) -> None:
    codes, scale, offsets = weight(100, 320, bits, group_size, offset)
    packed_offset = None if offsets is None else pack_scales_triton(offsets)
    packed = pack_codes_triton(codes, bits)
    for dtype in (torch.float32, torch.float16):
        out = dequantize(packed, pack_scales_triton(scale), packed_offset, 100, 320, bits, group_size, dtype)
        expected = dequantize_groups(codes, scale, offsets, bits, group_size, dtype)
        # code · scale + minimum may be one fused operation
        assert torch.allclose(out.float(), expected.float(), atol=1e-6, rtol=2e-3 if dtype == torch.float16 else 1e-6)
        if offset != "minima":
            assert torch.equal(out, expected)


def test_expanded_weights_and_a_norm() -> None:
    arguments, _ = call(70, 128, 256)
    norm = torch.randn(256)
    linear = GroupLinear(**arguments, norm_weight_I=norm, eps=1e-5)
    assert linear.kernels() == (EXPANDED, TILE)
    reference = torch.ops.cas.group_linear_reference(
        *(arguments[name] for name in ("x_TI", "packed", "scale", "offset", "out_features", "bits", "group_size")), norm, 1e-5
    )
    for kernel in linear.kernels():
        assert relative_error(linear.run(kernel), reference.double()) < 1e-5


@pytest.mark.slow_cases
@pytest.mark.parametrize(("table", "group_size"), [("e2m1", 16), ("e2m1", 32), ("nf4", 64), ("fp4", 128)])
def test_tables(table: str, group_size: int) -> None:
    """Codes that are indices of a table, with groups of half a part of a block, too."""
    for num_tokens, out, silu_mul, dtype in ((3, 100, False, torch.float32), (2, 256, True, torch.float16)):
        inner = 208
        codes, scale, _ = weight(out, inner, 4, group_size, "none")
        packed = (pack_codes_triton(codes, 4), pack_scales_triton(scale), None, out)
        x, residual = torch.randn(num_tokens, inner).to(dtype), torch.randn(num_tokens, 100).to(dtype)
        plain = dequantize_groups(codes, scale, None, 4, group_size, torch.float64, table=table)
        expected = F.linear(x.double(), plain)
        if silu_mul:
            expected = F.silu(expected[:, : out // 2]) * expected[:, out // 2 :]
        else:
            expected += residual.double()
        y = group_linear(x, *packed, 4, group_size, silu_mul=silu_mul, residual_TO=None if silu_mul else residual, table=table)
        assert relative_error(y, expected) < LIMITS[dtype]
        for stored in LIMITS:
            rounded = dequantize(*packed[:3], out, inner, 4, group_size, stored, table)
            reference = dequantize_groups(codes, scale, None, 4, group_size, stored, table=table)
            assert torch.allclose(rounded.float(), reference.float(), rtol=1e-6 if stored == torch.float32 else 1e-3)
            if table == "e2m1":
                assert torch.equal(rounded, reference)
