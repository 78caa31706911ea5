"""Products with SiLU-mul without a GPU: the reference, what is taken, where the kernel's elements lie, and that it builds."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.jit.cuda import find_nvcc
from compile_and_serve.custom_ops.jit.sources import CSRC
from compile_and_serve.custom_ops.linear.silu_mul_gemm import KERNELS, SCALED, silu_mul_library, unsupported_reason

BF16 = torch.bfloat16


def unbuildable() -> str:
    try:
        find_nvcc()
        silu_mul_library()
    except BuildError as error:
        return str(error)
    return ""


def test_operands_that_no_kernel_takes() -> None:
    x, weight = torch.zeros(4, 64, dtype=BF16), torch.zeros(32, 64, dtype=BF16)
    assert unsupported_reason(x, weight) is None
    assert unsupported_reason(torch.zeros(4, 72, dtype=BF16)[:, :64], weight) is None
    assert "bfloat16, not torch.float32" in str(unsupported_reason(x.float(), weight))
    assert "there must be a token" in str(unsupported_reason(x[:0], weight))
    assert "contiguous" in str(unsupported_reason(x, torch.zeros(64, 32, dtype=BF16).t()))
    assert "a multiple of 8 and input features of 8, not 15 and 64" in str(unsupported_reason(x, weight[:30]))
    assert "a multiple of 8 and input features of 8, not 16 and 60" in str(unsupported_reason(x[:, :60], torch.zeros(32, 60, dtype=BF16)))
    assert "16 bytes" in str(unsupported_reason(torch.zeros(4, 65, dtype=BF16)[:, :64], weight))
    assert "16 bytes" in str(unsupported_reason(torch.zeros(4, 72, dtype=BF16)[:, 1:65], weight))
    assert "float8_e4m3fn, not torch.bfloat16" in str(unsupported_reason(x, weight, torch.float8_e4m3fn))
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    assert unsupported_reason(x, weight, torch.float8_e4m3fn) is None
    assert "input features of 16, not 16 and 56" in str(unsupported_reason(x[:, :56], weight[:, :56].contiguous(), torch.float8_e4m3fn))


@pytest.mark.skipif(bool(unbuildable()), reason=unbuildable())
def test_where_the_elements_lie(tmp_path: Path) -> None:
    """The epilogue's arithmetic against CuTe's layouts, on the host."""
    library, program = silu_mul_library(), tmp_path / "layout"
    source = Path(__file__).parents[2] / "csrc" / "silu_mul_layout.cpp"
    include = [f"-I{folder}" for folder in (CSRC / "cuda", *library.include)]
    subprocess.run([find_nvcc(), "-std=c++17", "-w", *include, str(source), "-o", str(program)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout == "16384 16384 8192 outputs, 0 wrong\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(unbuildable()), reason=unbuildable())
def test_it_builds_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = ctypes.CDLL(str(silu_mul_library().build()))
    for kernel in (*KERNELS, SCALED):
        assert hasattr(loaded, f"cas_silu_mul_gemm_{kernel}")
