"""csrc/cuda/group_linear.cu on a GPU, against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.quantized.group_layout import dequantize_groups, pack_codes_triton, pack_scales_triton

pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from compile_and_serve.custom_ops.quantized.cuda_group_linear import CUDA, GroupLinear
from tests.support.numbers import relative_error

pytestmark = pytest.mark.gpu
LIMITS = {torch.float16: 1e-3, torch.bfloat16: 5e-3}


def error_of(
    num_tokens: int,
    out: int,
    inner: int,
    dtype: torch.dtype,
    *,
    group_size: int = 128,
    zeros: bool = True,
    silu_mul: bool = False,
    extras: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> float:
    """Relative error of the kernel's result."""
    torch.manual_seed(0)
    groups = -(-inner // group_size)
    with torch.device("cuda"):
        codes = torch.randint(0, 16, (out, inner), dtype=torch.uint8)
        scale = (torch.rand(out, groups) * 0.02 + 0.001).to(scale_dtype)
        offset = torch.randint(0, 16, (out, groups), dtype=torch.uint8) if zeros else None
        rows = out // 2 if silu_mul else out
        x = torch.randn(num_tokens, inner + 8).to(dtype)[:, :inner]
        bias = torch.randn(out).to(dtype) if extras else None
        residual = torch.randn(num_tokens, rows + 4).to(dtype)[:, :rows] if extras else None
    linear = GroupLinear(
        x_TI=x,
        packed=pack_codes_triton(codes, 4),
        scale=pack_scales_triton(scale),
        offset=None if offset is None else pack_scales_triton(offset),
        out_features=out,
        bits=4,
        group_size=group_size,
        bias_O=bias,
        silu_mul=silu_mul,
        residual_TO=residual,
    )
    assert CUDA in linear.kernels()
    weight = dequantize_groups(codes, scale, offset, 4, group_size, torch.float64)
    y = F.linear(x.double(), weight, None if bias is None else bias.double())
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    expected = y if residual is None else y + residual.double()
    outs = [linear.run(CUDA) for _ in range(3)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    return relative_error(outs[0], expected)


@pytest.mark.parametrize("num_tokens", [1, 5, 8, 9, 16, 17, 32, 33, 48, 49, 64, 65, 128, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_number_of_tokens(num_tokens: int, dtype: torch.dtype) -> None:
    assert error_of(num_tokens, 512, 1024, dtype, extras=True) < LIMITS[dtype]
    assert error_of(num_tokens, 512, 1024, dtype, silu_mul=True, extras=True) < LIMITS[dtype]


@pytest.mark.parametrize("num_tokens", [24, 48, 64, 100, 256])
def test_many_stages(num_tokens: int) -> None:
    """Blocks whose stages are used often, side by side on a multiprocessor."""
    assert error_of(num_tokens, 28672, 4096, torch.bfloat16, silu_mul=True) < 5e-3
    assert error_of(num_tokens + 36, 4096, 2048, torch.bfloat16, group_size=64, extras=True) < 5e-3


@pytest.mark.parametrize(("out", "inner"), [(64, 128), (70, 136), (100, 200), (192, 576), (320, 3584), (6144, 4096), (4096, 14336)])
def test_any_shape(out: int, inner: int) -> None:
    for num_tokens in (1, 20, 64):
        assert error_of(num_tokens, out, inner, torch.float16) < 1e-3
        assert error_of(num_tokens, out, inner, torch.bfloat16, zeros=False, extras=True) < 5e-3


@pytest.mark.parametrize("group_size", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize("zeros", [False, True])
def test_any_group_size(group_size: int, zeros: bool) -> None:
    for scale_dtype in (torch.float16, torch.bfloat16):
        for num_tokens in (1, 40):
            error = error_of(num_tokens, 256, 1984, torch.float16, group_size=group_size, zeros=zeros, scale_dtype=scale_dtype)
            assert error < 1e-3


def test_a_graph_replays_it() -> None:
    assert error_of(4, 256, 512, torch.float16) < 1e-3  # builds the library
    linear = GroupLinear(
        x_TI=torch.randn(4, 512, device="cuda").half(),
        packed=torch.randint(-(2**15), 2**15, (4, 4, 64, 32), device="cuda").short(),
        scale=torch.rand(4, 4, 64, device="cuda").half(),
        offset=None,
        out_features=256,
        bits=4,
        group_size=128,
    )
    expected, graph = linear.run(CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear.run(CUDA)
        out = linear.run(CUDA)
    graph.replay()
    assert torch.equal(out, expected)
