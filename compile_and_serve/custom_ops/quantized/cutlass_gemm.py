"""CUTLASS' float8 matrix products (csrc/cuda/scaled_gemm.cu).

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.
"""

from __future__ import annotations

import ctypes

import torch

from compile_and_serve.custom_ops.jit.cuda import NvccLibrary, cutlass_library, load_or_build
from compile_and_serve.custom_ops.platform import platform_of

# Configurations for scales per row and per block, in the order of CAS_CONFIG in csrc/cuda/scaled_gemm.cu.
ROWS = ("rows_64x64", "rows_64x128", "rows_128x128", "rows_128x256", "rows_128x64_split")
BLOCKS = ("blocks_64x128", "blocks_128x128")


class GemmArguments(ctypes.Structure):
    """`CasScaledGemm` of csrc/cuda/scaled_gemm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "a", "b", "a_scale", "b_scale", "residual")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "out_stride", "a_stride", "b_stride", "residual_stride")),
        *((name, ctypes.c_int32) for name in ("a_per_row", "b_per_row")),
        *((name, ctypes.c_void_p) for name in ("workspace", "stream")),
    )


def gemm_library() -> NvccLibrary:
    """The library of csrc/cuda/scaled_gemm.cu, one object per configuration. Raises `BuildError` without nvcc or CUTLASS' headers."""
    return cutlass_library("scaled_gemm", len(ROWS + BLOCKS))


def load_gemms(device: torch.device) -> ctypes.CDLL | None:
    """The library, or None while it is not in use (see `load_or_build`)."""
    return load_or_build(device, "CUTLASS' float8 products", gemm_library)


def unsupported_reason(a_TI: torch.Tensor, b_OI: torch.Tensor) -> str | None:
    """None when `run_gemm` takes these operands, else the reason in one sentence."""
    if a_TI.dtype != torch.float8_e4m3fn or b_OI.dtype != torch.float8_e4m3fn:
        return f"both operands must be float8_e4m3fn, not {a_TI.dtype} and {b_OI.dtype}"
    if a_TI.stride(1) != 1 or b_OI.stride(1) != 1:
        return "rows must be contiguous"
    rows_aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in (a_TI, b_OI))
    if not rows_aligned or a_TI.shape[1] % 16 or b_OI.shape[0] % 8:
        return "inputs must be a multiple of 16, outputs of 8, and rows must begin at multiples of 16 bytes"
    return None


def takes_residual(residual_TO: torch.Tensor) -> bool:
    """Whether `run_gemm` can add this residual."""
    rows_aligned = residual_TO.data_ptr() % 16 == 0 and residual_TO.stride(0) % 8 == 0
    return residual_TO.dtype == torch.bfloat16 and residual_TO.stride(1) == 1 and rows_aligned


def run_gemm(
    library: ctypes.CDLL,
    config: str,
    a_TI: torch.Tensor,
    b_OI: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    residual_TO: torch.Tensor | None = None,
) -> torch.Tensor:
    """bf16(a_scale · b_scale · a bᵀ + residual) by one configuration. → [T, O]

    The operands have to satisfy `unsupported_reason`, and the residual `takes_residual`.
    a_scale: float32, one value, [T] or [T, 1], or (BLOCKS) [T, G]; b_scale: float32, one value, [O], or (BLOCKS) [ceil(O / 128), G].
    """
    out_TO = torch.empty(a_TI.shape[0], b_OI.shape[0], dtype=torch.bfloat16, device=a_TI.device)
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    args = gemm_arguments(out_TO, a_TI, b_OI, a_scale, b_scale, residual_TO)
    workspace_bytes = getattr(library, f"cas_scaled_gemm_workspace_{config}")
    workspace_bytes.restype = ctypes.c_int64
    workspace = torch.empty(workspace_bytes(ctypes.byref(args)), dtype=torch.uint8, device=a_TI.device)
    args.workspace = workspace.data_ptr() if workspace.numel() else None
    launch_gemm(library, config, args)
    return out_TO


def gemm_arguments(
    out_TO: torch.Tensor,
    a_TI: torch.Tensor,
    b_OI: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    residual_TO: torch.Tensor | None = None,
) -> GemmArguments:
    """Arguments of `launch_gemm` without a workspace. The tensors have to live until then. out_TO: contiguous."""
    return GemmArguments(
        out=out_TO.data_ptr(),
        a=a_TI.data_ptr(),
        b=b_OI.data_ptr(),
        a_scale=a_scale.data_ptr(),
        b_scale=b_scale.data_ptr(),
        m=a_TI.shape[0],
        n=b_OI.shape[0],
        k=a_TI.shape[1],
        out_stride=out_TO.shape[1],
        a_stride=a_TI.stride(0),
        b_stride=b_OI.stride(0),
        residual=None if residual_TO is None else residual_TO.data_ptr(),
        residual_stride=0 if residual_TO is None else residual_TO.stride(0),
        a_per_row=a_scale.numel() > 1,
        b_per_row=b_scale.numel() > 1,
        stream=platform_of(a_TI.device).current_stream(),
    )


def launch_gemm(library: ctypes.CDLL, config: str, args: GemmArguments) -> None:
    """Run one configuration of a library with the interface of csrc/cuda/scaled_gemm.h."""
    launch = getattr(library, f"cas_scaled_gemm_{config}")
    launch.restype = ctypes.c_char_p
    error = launch(ctypes.byref(args))
    if error is not None:
        raise RuntimeError(f"{config} could not multiply {[args.m, args.k]} by {[args.n, args.k]}: {error.decode()}")
