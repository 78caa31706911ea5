"""The C interface of csrc/cpu, called with raw pointers and without torch's dispatcher."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import (
    cpu_kernel_library,
    cpu_kernels_status,
    quantized_cpu_kernel_library,
    quantized_cpu_kernels_status,
)
from compile_and_serve.custom_ops.jit.sources import CSRC
from compile_and_serve.custom_ops.linear.fused_linear import pack_linear_weight
from compile_and_serve.custom_ops.quantized.cpu_layout import pack_weight_cpu
from tests.support.cpp import library_for
from tests.support.numbers import relative_error


class CasLinear(ctypes.Structure):
    """The struct of the same name in csrc/cpu/kernels.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("silu_mul", ctypes.c_int32),
        ("num_tokens", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
        ("lora", ctypes.c_void_p),
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("code, dtype", [(0, torch.float32), (1, torch.bfloat16)])
def test_linear_through_pointers(compiler: str, code: int, dtype: torch.dtype, num_threads: int) -> None:
    library = cpu_kernel_library()
    assert library is not None, cpu_kernels_status()
    x, weight = torch.randn(5, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
    packed = pack_linear_weight(weight)
    wide = torch.full((5, 100), 7.0, dtype=dtype)  # row stride 100: columns from 80 on must not change
    arguments = CasLinear(
        dtype=code,
        num_tokens=5,
        in_features=48,
        out_features=80,
        x=x.data_ptr(),
        x_stride=48,
        packed=packed.data_ptr(),
        out=wide.data_ptr(),
        out_stride=100,
        num_threads=num_threads,
    )
    library.cas_linear(ctypes.byref(arguments))
    expected = x.double() @ weight.double().T
    error = relative_error(wide[:, :80], expected)
    assert error < (2e-6 if dtype == torch.float32 else 4e-3)
    assert (wide[:, 80:] == 7).all()


class CasQuantizedLinear(ctypes.Structure):
    """The struct of the same name in csrc/cpu/kernels.h."""

    _fields_ = (("linear", CasLinear), ("weight_scale", ctypes.c_void_p), ("input_scale", ctypes.c_void_p), ("activations", ctypes.c_int32))


def check_quantized_linear(library: ctypes.CDLL, weight_dtype: torch.dtype, dtype: torch.dtype, num_threads: int) -> None:
    """Compare five strided rows with weight-only quantization to float64."""
    x, scale = torch.randn(5, 50, dtype=dtype), torch.rand(80)
    bytes_OI = torch.randint(-128, 127, (80, 50), dtype=torch.int8)  # 127 and -1 are NaN in float8
    weight = bytes_OI.masked_fill(bytes_OI == -1, 0).view(weight_dtype)
    packed = pack_weight_cpu(weight)
    wide = torch.full((5, 100), 7.0, dtype=dtype)
    linear = CasLinear(
        dtype=int(dtype == torch.bfloat16),
        num_tokens=5,
        in_features=50,
        out_features=80,
        x=x.data_ptr(),
        x_stride=50,
        packed=packed.data_ptr(),
        out=wide.data_ptr(),
        out_stride=100,
        num_threads=num_threads,
    )
    arguments = CasQuantizedLinear(linear=linear, weight_scale=scale.data_ptr(), activations=0)
    entry = library.cas_int8_linear if weight_dtype == torch.int8 else library.cas_float8_linear
    entry(ctypes.byref(arguments))
    expected = x.double() @ (weight.double() * scale[:, None]).T
    error = relative_error(wide[:, :80], expected)
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)
    assert (wide[:, 80:] == 7).all()


@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_linear_through_pointers(compiler: str, dtype: torch.dtype, num_threads: int, weight_dtype: torch.dtype) -> None:
    library = quantized_cpu_kernel_library()
    assert library is not None, quantized_cpu_kernels_status()
    check_quantized_linear(library, weight_dtype, dtype, num_threads)


@pytest.mark.slow_cases
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instruction sets are those of x86-64")
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3"])
def test_quantized_linear_on_older_cpus(compiler: str, architecture: str, weight_dtype: torch.dtype, tmp_path: Path) -> None:
    """Code for CPUs without AVX2 and for CPUs with AVX2 but not AVX-512, which this machine may not use otherwise."""
    name = "int8_linear.cpp" if weight_dtype == torch.int8 else "float8_linear.cpp"
    library = library_for(architecture, compiler, CSRC / "cpu" / "quantized" / name, tmp_path, "-O0")
    for dtype in (torch.float32, torch.bfloat16):
        check_quantized_linear(library, weight_dtype, dtype, num_threads=2)


def included(path: Path) -> set[str]:
    """The names of the headers of ours that a source file includes, directly or not."""
    names = set(re.findall(r'#include "([^"]+)"', path.read_text()))
    paths = [path.parent / name if (path.parent / name).exists() else CSRC / "cpu" / name for name in names]
    return {one.name for one in paths}.union(*map(included, paths))


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["sapphirerapids"])
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instruction sets are those of x86-64")
@pytest.mark.parametrize("architecture", ["x86-64-v3", "x86-64-v4", "sapphirerapids"])
def test_every_kernel_compiles_for_other_cpus(compiler: str, architecture: str) -> None:
    """Kernels without the matrix unit have no code of their own for Sapphire Rapids."""
    sources = [path for path in (CSRC / "cpu").rglob("*.cpp") if path.name != "torch_ops.cpp"]
    if architecture == "sapphirerapids":
        sources = [path for path in sources if "matrix_unit.h" in included(path)]
        assert len(sources) >= 3
    flags = ["-std=c++20", "-O1", f"-march={architecture}", "-fopenmp", "-fsyntax-only", "-w"]
    for source in sources:
        subprocess.run([compiler, *flags, str(source)], check=True)


FLOAT8 = """
#include "float8.h"
extern "C" void to_float8(const float* from, unsigned char* to, long count) {
    for (long i = 0; i < count; i += 16) store16(reinterpret_cast<cas::float8*>(to + i), cas::load16(from + i));
}
extern "C" void widen_float(const void* from, float* to, long count) {
    cas::widen(static_cast<const cas::float8*>(from), count, to);
}
extern "C" void widen_bf16(const void* from, cas::bf16* to, long count) {
    cas::widen(static_cast<const cas::float8*>(from), count, to);
}
"""


@pytest.mark.slow_cases
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instruction sets are those of x86-64")
@pytest.mark.parametrize("architecture", ["native", "x86-64", "x86-64-v3"])
def test_float8_conversions_equal_torch(compiler: str, architecture: str, tmp_path: Path) -> None:
    source = tmp_path / "float8.cpp"
    source.write_text(FLOAT8)
    library = library_for(architecture, compiler, source, tmp_path, "-O2")

    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for entry, dtype in ((library.widen_float, torch.float32), (library.widen_bf16, torch.bfloat16)):
        for count in (256, 240):  # 240 is not a multiple of the 64-element vectors
            wide = torch.zeros(256, dtype=dtype)
            entry(ctypes.c_void_p(every.data_ptr()), ctypes.c_void_p(wide.data_ptr()), ctypes.c_long(count))
            assert torch.equal(wide[:count].nan_to_num(7e3), every[:count].to(dtype).nan_to_num(7e3))
            assert not wide[count:].any()

    values = every.float()[every.float().isfinite()].sort().values
    random = torch.randn(2000) * torch.randn(2000).mul(4).exp()
    edges = torch.tensor([449, 463.9, 464, 465, 1e9, -1e9, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-30])
    x = torch.cat([values, (values[1:] + values[:-1]) / 2, random, edges])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16))
    rounded = torch.zeros(len(x), dtype=torch.float8_e4m3fn)
    library.to_float8(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(rounded.data_ptr()), ctypes.c_long(len(x)))
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(rounded.float().nan_to_num(7e3), expected.float().nan_to_num(7e3))
    assert torch.equal(rounded.float().signbit()[~x.isnan()], expected.float().signbit()[~x.isnan()])


PRODUCTS = """
#include "quantized/products.h"
using namespace cas;
template <class P>
static void multiply(const unsigned char* codes, const int* x, int* totals) {
    typename P::X integers;
    for (int h = 0; h < 2; ++h) P::write(integers, h, load_raw<i32x16>(x + h * kLanes));
    typename P::Sums sums;
    for (int quad = 0; quad < kBlockInputs / 4; ++quad) sums.add(P::factors(load_raw<u32x16>(codes + quad * 64)), integers, quad);
    store_raw(totals, sums.total());
}
extern "C" void digits(const unsigned char* codes, const int* x, int* totals) { multiply<DigitProducts>(codes, x, totals); }
extern "C" void four_bits(const unsigned char* codes, const int* x, int* totals) { multiply<Products<4, Integers>>(codes, x, totals); }
extern "C" void eight_bits(const unsigned char* codes, const int* x, int* totals) { multiply<Products<8, Integers>>(codes, x, totals); }
"""


@pytest.mark.slow_cases
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instruction sets are those of x86-64")
@pytest.mark.parametrize("architecture", ["x86-64-v3", "x86-64", "native"])
def test_products_of_codes_are_exact(compiler: str, architecture: str, tmp_path: Path) -> None:
    """Of codes [8 quads, 16 outputs, 4 inputs] and 32 integers, also where every sum is as large as it can be."""
    source = tmp_path / "products.cpp"
    source.write_text(PRODUCTS)
    library = library_for(architecture, compiler, source, tmp_path, "-O1")
    largest = 127 << 8
    rows = [torch.full((32,), value, dtype=torch.int32) for value in (largest, -largest, largest - 128, 127 - largest)]
    rows += [torch.randint(-largest, largest + 1, (32,), dtype=torch.int32) for _ in range(4)]
    for name, top in (("digits", 255), ("four_bits", 15), ("eight_bits", 255)):
        for codes in (torch.full((8, 16, 4), top, dtype=torch.uint8), torch.randint(0, top + 1, (8, 16, 4), dtype=torch.uint8)):
            for x in rows:
                totals = torch.zeros(16, dtype=torch.int32)
                getattr(library, name)(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, x, totals)))
                assert torch.equal(totals.long(), torch.einsum("qoi,qi->o", codes.long(), x.long().view(8, 4))), name
