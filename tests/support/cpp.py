"""C++ kernels as libraries of their own."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from compile_and_serve.custom_ops.jit.sources import CSRC


def library_for(architecture: str, compiler: str, source: Path, folder: Path, optimization: str) -> ctypes.CDLL:
    """A source file, compiled for an architecture. A test of x86-64-v3 is skipped on a CPU without AVX2."""
    if architecture == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    path = folder / "kernels.so"
    flags = ["-std=c++20", optimization, f"-march={architecture}", "-fopenmp", "-fPIC", "-shared", "-w", f"-I{CSRC / 'cpu'}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))
