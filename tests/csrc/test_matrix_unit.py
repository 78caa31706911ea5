"""The kernels for Intel's matrix unit, with its instructions emulated."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import (
    cpu_kernel_library,
    cpu_kernels_status,
    quantized_cpu_kernel_library,
    quantized_cpu_kernels_status,
)
from compile_and_serve.custom_ops.quantized.group_layout import pack_codes_cpu, pack_scales_cpu
from compile_and_serve.custom_ops.quantized.group_linear import group_linear
from tests.support.cpp import library_for

EMULATION = Path(__file__).parent / "matrix_unit_emulation.h"


@pytest.fixture(scope="module")
def unit(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Group linears as they are compiled for CPUs with the unit, but for its instructions."""
    folder = tmp_path_factory.mktemp("unit")
    source = folder / "unit.cpp"
    source.write_text(f'#include "{EMULATION}"\n#include "quantized/group_linear.cpp"\n')
    return library_for("native", compiler, source, folder, "-O3")


@pytest.mark.exhaustive
@pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AVX-512")
@pytest.mark.parametrize(
    ("bits", "group_size", "offset", "table"),
    [
        (4, 128, "zeros", ""),
        (4, 32, "minima", ""),
        (5, 32, "minima", ""),
        (6, 16, "none", ""),
        (8, 16, "none", ""),
        (4, 16, "none", "e2m1"),
        (4, 64, "none", "nf4"),
    ],
)
def test_codes_are_multiplied_with_the_same_bits(unit: ctypes.CDLL, bits: int, group_size: int, offset: str, table: str) -> None:
    """Results are those of the kernel without it: also of a tile of one row, and of rows in several chunks."""
    main, quantized = cpu_kernel_library(), quantized_cpu_kernel_library()
    assert main is not None, cpu_kernels_status()
    assert quantized is not None, quantized_cpu_kernels_status()

    def use(library: ctypes.CDLL) -> None:
        kernels = (quantized.cas_int8_linear, quantized.cas_float8_linear, library.cas_group_linear)
        main.cas_use_quantized_linears(*(ctypes.cast(kernel, ctypes.c_void_p) for kernel in kernels))

    for num_tokens, out, inner, silu_mul in ((8, 48, 256, False), (17, 104, 600, True), (300, 33, 2048, False)):
        groups = -(-inner // group_size)
        scale = torch.rand(out, groups).half() * 0.02
        offsets = {"zeros": torch.randint(0, 1 << bits, (out, groups), dtype=torch.uint8), "minima": -8 * scale, "none": None}[offset]
        packed = pack_codes_cpu(torch.randint(0, 1 << bits, (out, inner), dtype=torch.uint8), bits)
        scales = [None if one is None else pack_scales_cpu(one, inner, group_size) for one in (scale, offsets)]
        x = torch.randn(num_tokens, inner).bfloat16()

        def run() -> torch.Tensor:
            return group_linear(x, packed, *scales, out, bits, group_size, silu_mul=silu_mul, table=table)  # noqa: B023

        expected = run()
        use(unit)
        try:
            found = run()
        finally:
            use(quantized)
        assert torch.equal(found, expected)
        assert expected.abs().sum() > 0
