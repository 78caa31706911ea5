"""CUTLASS' products with SiLU-mul (csrc/cuda/silu_mul_gemm.cu): silu(x Wgᵀ) · (x Wuᵀ) in one kernel.

Shape legend: T tokens, I input features, H hidden features, O = 2 H output features of the weight [Wg; Wu].

For many tokens, the product is limited by arithmetic and a SiLU-mul after it by memory: it reads [T, O] and writes [T, H]. This kernel
only writes [T, H]. x and the weight are bfloat16, or float8 with scales.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cuda import NvccLibrary, cutlass_library, load_or_build
from compile_and_serve.custom_ops.linear.token_chunks import bfloat16_chunk_tokens, token_chunks
from compile_and_serve.custom_ops.linear.triton_elementwise import silu_mul_rows
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel
from compile_and_serve.custom_ops.tuning.tuner import Problem

# In the order of CAS_CONFIG in csrc/cuda/silu_mul_gemm.cu.
KERNELS = ("128x256", "128x128_pingpong")
SCALED = "scaled"  # of float8 operands
SEPARATE = "separate"  # cuBLAS' product, then an elementwise kernel
_ALIGNMENT = 16  # bytes


class _Arguments(ctypes.Structure):
    """`CasSiluMulGemm` of csrc/cuda/silu_mul_gemm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "weight", "x_scale", "weight_scale")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "inputs", "out_stride", "x_stride")),
        *((name, ctypes.c_int32) for name in ("x_per_row", "weight_per_row")),
        ("stream", ctypes.c_void_p),
    )


def silu_mul_library() -> NvccLibrary:
    """The library of csrc/cuda/silu_mul_gemm.cu. Raises `BuildError` without nvcc or CUTLASS' headers."""
    return cutlass_library("silu_mul_gemm", len((*KERNELS, SCALED)), headers=("silu_mul_epilogue.h", "silu_mul_layout.h"))


def load_silu_mul_gemms(device: torch.device) -> ctypes.CDLL | None:
    """The library, or None while it is not in use (see `load_or_build`)."""
    return load_or_build(device, "CUTLASS' products with SiLU-mul", silu_mul_library)


def unsupported_reason(x_TI: torch.Tensor, weight_OI: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """None when `run_silu_mul_gemm` takes these operands, else the reason in one sentence.

    dtype: bfloat16, or float8_e4m3fn with scales.
    """
    if x_TI.dtype != dtype or weight_OI.dtype != dtype:
        return f"both operands must be {str(dtype).removeprefix('torch.')}, not {x_TI.dtype} and {weight_OI.dtype}"
    if x_TI.numel() == 0 or weight_OI.numel() == 0:
        return "there must be a token, an input and an output"
    if not weight_OI.is_contiguous() or x_TI.stride(1) != 1:
        return "the weight and each row of x must be contiguous"
    hidden, inputs, aligned = weight_OI.shape[0] // 2, weight_OI.shape[1], _ALIGNMENT // dtype.itemsize
    if weight_OI.shape[0] % 16 or inputs % aligned:
        return f"hidden features must be a multiple of 8 and input features of {aligned}, not {hidden} and {inputs}"
    if x_TI.stride(0) % aligned or any(t.data_ptr() % _ALIGNMENT for t in (x_TI, weight_OI)):
        return f"rows must begin at multiples of {_ALIGNMENT} bytes"
    return None


def run_silu_mul_gemm(
    library: ctypes.CDLL,
    kernel: str,
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_TH: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """silu(x Wgᵀ) · (x Wuᵀ) by one of `KERNELS` or, with scales, by `SCALED`, in float32 with one rounding. → bfloat16 [T, H]

    The operands have to satisfy `unsupported_reason`. out_TH: contiguous, receives the result. scales: of x, one value or [T] or [T, 1],
    and of the weight, one value or [O]; float32.
    """
    num_tokens, inputs = x_TI.shape
    hidden = weight_OI.shape[0] // 2
    if out_TH is None:
        out_TH = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=x_TI.device)
    x_scale, weight_scale = (None, None) if scales is None else (scale.contiguous() for scale in scales)
    args = _Arguments(
        out=out_TH.data_ptr(),
        x=x_TI.data_ptr(),
        weight=weight_OI.data_ptr(),
        x_scale=None if x_scale is None else x_scale.data_ptr(),
        weight_scale=None if weight_scale is None else weight_scale.data_ptr(),
        tokens=num_tokens,
        hidden=hidden,
        inputs=inputs,
        out_stride=hidden,
        x_stride=x_TI.stride(0),
        x_per_row=x_scale is not None and x_scale.numel() > 1,
        weight_per_row=weight_scale is not None and weight_scale.numel() > 1,
        stream=platform_of(x_TI.device).current_stream(),
    )
    launch = getattr(library, f"cas_silu_mul_gemm_{kernel}")
    launch.restype = ctypes.c_char_p
    error = launch(ctypes.byref(args))
    if error is not None:
        raise RuntimeError(f"CUTLASS' {kernel} could not multiply {list(x_TI.shape)} by {list(weight_OI.shape)}: {error.decode()}")
    return out_TH


def silu_mul_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, min_tokens: int = 1) -> torch.Tensor:
    """silu(x Wgᵀ) · (x Wuᵀ) in `token_chunks`, by the fastest of `KERNELS` and `SEPARATE`. → [T, H]

    x_TI: rows may be strided. weight_OI: [Wg; Wu]. min_tokens: the fewest tokens of any call. The fastest is measured once for each shape
    and range of T. Where `KERNELS` are not built or do not take the operands, it is `SEPARATE`.
    """
    out_TH = x_TI.new_empty(x_TI.shape[0], weight_OI.shape[0] // 2)
    num_tokens, chunk_tokens = x_TI.shape[0], bfloat16_chunk_tokens(weight_OI.numel())
    max_tokens = min(num_tokens, chunk_tokens)  # of a chunk, of a prompt up to this length
    for at in token_chunks(num_tokens, chunk_tokens):
        _silu_mul_chunk(x_TI[at], weight_OI, out_TH[at], min_tokens, max_tokens)
    return out_TH


def _silu_mul_chunk(x_TI: torch.Tensor, weight_OI: torch.Tensor, out_TH: torch.Tensor, min_tokens: int, max_tokens: int) -> None:
    def separate(weight_OI: torch.Tensor) -> torch.Tensor:
        return silu_mul_rows(F.linear(x_TI, weight_OI), out_TH)

    is_taken = platform_of(x_TI.device).runs_cuda_kernels and unsupported_reason(x_TI, weight_OI) is None
    library = load_silu_mul_gemms(x_TI.device) if is_taken else None
    if library is None:
        separate(weight_OI)
        return
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {SEPARATE: separate}
    runs |= {kernel: functools.partial(run_silu_mul_gemm, library, kernel, x_TI, out_TH=out_TH) for kernel in KERNELS}
    name = f"O={weight_OI.shape[0]} I={x_TI.shape[1]}"
    problem = Problem(kind="silu_mul_linear", name=name, num_tokens=x_TI.shape[0])
    runs[fastest_kernel(problem, runs, weight_OI, min_tokens=min_tokens, max_tokens=max_tokens)](weight_OI)
