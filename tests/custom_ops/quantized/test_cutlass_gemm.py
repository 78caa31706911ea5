"""csrc/cuda's float8 products: they build without a GPU, and the reference is right."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.jit import cuda as build_cuda
from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.jit.cuda import NvccLibrary, find_nvcc
from compile_and_serve.custom_ops.quantized import cutlass_gemm
from compile_and_serve.custom_ops.quantized.cutlass_gemm import BLOCKS, ROWS, gemm_library

FP8 = torch.float8_e4m3fn


def unbuildable() -> str:
    try:
        find_nvcc()
        gemm_library()
    except BuildError as error:
        return str(error)
    return ""


def test_operands_that_no_kernel_takes() -> None:
    a, b = torch.zeros(4, 64).to(FP8), torch.zeros(32, 64).to(FP8)
    assert cutlass_gemm.unsupported_reason(a, b) is None
    assert "float8_e4m3fn" in str(cutlass_gemm.unsupported_reason(a.float(), b))
    assert "multiple of 16" in str(cutlass_gemm.unsupported_reason(a[:, :40], b[:, :40]))
    assert "contiguous" in str(cutlass_gemm.unsupported_reason(torch.zeros(64, 4).to(FP8).t(), b))


def test_residuals_that_it_takes() -> None:
    residual = torch.zeros(4, 72, dtype=torch.bfloat16)
    assert cutlass_gemm.takes_residual(residual)
    assert cutlass_gemm.takes_residual(residual[:, 8:40])
    assert not cutlass_gemm.takes_residual(residual[:, 1:33])  # rows begin between multiples of 16 bytes
    assert not cutlass_gemm.takes_residual(residual[:, :36].contiguous())
    assert not cutlass_gemm.takes_residual(residual.t())
    assert not cutlass_gemm.takes_residual(residual.float())


def test_without_nvcc_it_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build_cuda.shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="nvcc was not found: install the CUDA toolkit"):
        find_nvcc()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(unbuildable()), reason=unbuildable())
def test_it_builds_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One configuration per kind of scales; the others differ only in tile shapes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = gemm_library()
    library = replace(whole, variants=(whole.variants[1], whole.variants[len(ROWS)]))
    built = library.build()
    assert built == library.path() != whole.path()
    loaded = ctypes.CDLL(str(built))
    for config in (ROWS[1], BLOCKS[0]):
        assert hasattr(loaded, f"cas_scaled_gemm_{config}")
        assert hasattr(loaded, f"cas_scaled_gemm_workspace_{config}")


@pytest.mark.skipif(bool(unbuildable()), reason=unbuildable())
def test_variants_of_one_source_are_one_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "answer.cu"
    source.write_text(
        "#define NAME_(n) answer_##n\n#define NAME(n) NAME_(n)\nstatic __global__ void kernel() {}\n"
        'extern "C" int NAME(N)() { return 40 + N; }\n'
    )
    library = NvccLibrary(name="answer", source=source, headers=(), variants=("-DN=1", "-DN=2"), include=(), architecture="90a")
    loaded = ctypes.CDLL(str(library.build()))
    assert (loaded.answer_1(), loaded.answer_2()) == (41, 42)
    built_at = library.path().stat().st_mtime_ns
    assert library.build().stat().st_mtime_ns == built_at
    assert replace(library, variants=("-DN=1",)).path() != library.path()


@pytest.mark.skipif(bool(unbuildable()), reason=unbuildable())
def test_a_source_that_does_not_compile_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void f() { nothing; }\n")
    library = NvccLibrary(name="wrong", source=source, headers=(), variants=("-DX=1",), include=(), architecture="90a")
    with pytest.raises(BuildError, match=r"failed on wrong\.cu -DX=1: .*nothing"):
        library.build()
    assert not library.path().exists()
