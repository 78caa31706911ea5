"""The C interface of csrc/cpu: called with raw pointers, without the dispatcher."""

from __future__ import annotations

import ctypes

import pytest
import torch

from custom_ops.cpu_kernels import cpu_kernel_library, cpu_kernels_status
from custom_ops.linear import pack_linear_weight


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
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("code, dtype", [(0, torch.float32), (1, torch.bfloat16)])
def test_linear_through_pointers(code: int, dtype: torch.dtype, num_threads: int) -> None:
    library = cpu_kernel_library()
    if library is None:
        pytest.skip(str(cpu_kernels_status()))
    x, weight = torch.randn(5, 48, dtype=dtype), torch.randn(80, 48, dtype=dtype)
    packed = pack_linear_weight(weight)
    wide = torch.full((5, 100), 7.0, dtype=dtype)  # rows 100 apart: what lies past column 80 stays
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
    error = (wide[:, :80].double() - expected).norm() / expected.norm()
    assert error < (2e-6 if dtype == torch.float32 else 4e-3)
    assert (wide[:, 80:] == 7).all()
