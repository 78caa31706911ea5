"""Skips tests of built kernels where there is no compiler. Where there is one, kernels that do not build are a failure."""

from __future__ import annotations

import pytest

from compile_and_serve.custom_ops.jit.cpp import BuildError, find_compiler
from compile_and_serve.custom_ops.jit.cpu_kernels import (
    cpu_kernels_status,
    load_cpu_kernels,
    quantized_cpu_kernel_library,
    quantized_cpu_kernels_status,
)


def require_cpu_kernels(*, quantized: bool = False) -> None:
    """Return if csrc's CPU kernels are loaded. quantized: those for quantized weights."""
    if quantized_cpu_kernel_library() is not None if quantized else load_cpu_kernels():
        return
    status = str(quantized_cpu_kernels_status() if quantized else cpu_kernels_status())
    try:
        find_compiler()
    except BuildError:
        pytest.skip(status)
    pytest.fail(status)
