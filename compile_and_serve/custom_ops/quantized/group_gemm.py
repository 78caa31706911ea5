"""A linear over 4-bit codes for up to some hundred tokens in CUDA C++ (csrc/cuda/group_linear.cu).

Shape legend: T tokens, I input features, O output features (R: stored outputs, O or O / 2 with silu_mul).

It reads the Triton layout. Unlike Triton's kernel it keeps x of up to 128 tokens in shared memory for 128 outputs, and several stages of
codes on their way.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch

from compile_and_serve.custom_ops.jit.cuda import NvccLibrary, load_or_build
from compile_and_serve.custom_ops.jit.sources import CSRC
from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantized.group_layout import TILE_OUTPUTS, TILE_WORDS, tile_columns

log = logging.getLogger(__name__)

_ENTRIES = {torch.float16: "cas_group_linear_float16", torch.bfloat16: "cas_group_linear_bfloat16"}  # as CAS_CONFIG


class _Arguments(ctypes.Structure):
    """`CasGroupLinear` of csrc/cuda/group_linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "weight", "scale", "zeros", "bias", "residual")),
        *((name, ctypes.c_int64) for name in ("x_stride", "residual_stride")),
        *(
            (name, ctypes.c_int32)
            for name in ("tokens", "rows", "inputs", "num_blocks", "num_groups", "group_size", "has_half_scales", "silu_mul")
        ),
        ("stream", ctypes.c_void_p),
    )


def group_linear_library() -> NvccLibrary:
    """The library of csrc/cuda/group_linear.cu, one object for each dtype of x. Raises `BuildError` without nvcc."""
    folder = CSRC / "cuda"
    return NvccLibrary(
        name="group_linear",
        source=folder / "group_linear.cu",
        headers=(folder / "group_linear.h", folder / "group_linear_wide.h"),
        variants=tuple(f"-DCAS_CONFIG={i}" for i in range(len(_ENTRIES))),
        include=(),
        architecture="90a",
        duration="some seconds",
    )


@functools.cache
def load_group_linear(device: torch.device) -> ctypes.CDLL | None:
    """The library, which is built first if necessary; None with the reason in the log if it cannot be, or does not run here."""
    library = load_or_build(device, "CUDA kernels of 4-bit linears", group_linear_library, is_quick=True)
    if library is None:
        return None
    for entry in _ENTRIES.values():
        getattr(library, entry).restype = ctypes.c_char_p
    x_TI = torch.zeros(1, 128, dtype=torch.float16, device=device)
    packed = torch.zeros(1, 1, TILE_OUTPUTS, TILE_WORDS, dtype=torch.int16, device=device)
    scale = torch.zeros(1, 1, TILE_OUTPUTS, dtype=torch.float16, device=device)
    try:  # nvcc may be newer than the driver
        _launch(library, x_TI.new_empty(1, TILE_OUTPUTS), x_TI, packed, scale, None, 128, None, False, None)
    except RuntimeError as error:
        log.warning("Triton's kernels of 4-bit linears are in use: %s", error)
        return None
    return library


def unsupported_reason(
    x_TI: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    silu_mul: bool,
    table: str,
) -> str | None:
    """None when `run_group_linear` takes these operands, else the reason in one sentence."""
    if bits != 4 or table:
        return "codes must be integers of 4 bits"
    if x_TI.dtype not in _ENTRIES or scale.dtype not in _ENTRIES:
        return f"x and scales must be float16 or bfloat16, not {x_TI.dtype} and {scale.dtype}"
    if offset is not None and offset.dtype != torch.uint8:
        return f"offsets must be zero points, not {offset.dtype}"
    columns = tile_columns(bits)
    if group_size % TILE_WORDS or (columns % group_size and group_size % columns):
        return f"groups must have {TILE_WORDS}, {columns // 2} or a multiple of {columns} inputs, not {group_size}"
    if silu_mul and out_features // 2 % TILE_OUTPUTS:
        return f"with SiLU-mul, outputs must be a multiple of {TILE_OUTPUTS}, not {out_features // 2}"
    if x_TI.shape[1] % 8 or x_TI.stride(0) % 8 or x_TI.data_ptr() % 16:
        return "rows must begin at multiples of 16 bytes and have a multiple of 8 inputs"
    return None


def run_group_linear(
    library: ctypes.CDLL,
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    group_size: int,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
) -> torch.Tensor:
    """y = f(x Wᵀ + bias) + residual, where f is SiLU-mul with silu_mul, in float32 with one rounding. → x's dtype [T, R]

    The operands have to satisfy `unsupported_reason`. packed, scale, offset: in the Triton layout. bias_O, residual_TO: of x's dtype.
    """
    out_TR = x_TI.new_empty(x_TI.shape[0], out_features // 2 if silu_mul else out_features)
    if not is_compiling_ahead():
        _launch(library, out_TR, x_TI, packed, scale, offset, group_size, bias_O, silu_mul, residual_TO)
    return out_TR


def _launch(
    library: ctypes.CDLL,
    out_TR: torch.Tensor,
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group_size: int,
    bias_O: torch.Tensor | None,
    silu_mul: bool,
    residual_TO: torch.Tensor | None,
) -> None:
    (num_tokens, inputs), rows = x_TI.shape, out_TR.shape[1]
    args = _Arguments(
        out=out_TR.data_ptr(),
        x=x_TI.data_ptr(),
        weight=packed.data_ptr(),
        scale=scale.data_ptr(),
        zeros=_pointer(offset),
        bias=_pointer(bias_O),
        residual=_pointer(residual_TO),
        x_stride=x_TI.stride(0),
        residual_stride=0 if residual_TO is None else residual_TO.stride(0),
        tokens=num_tokens,
        rows=rows,
        inputs=inputs,
        num_blocks=packed.shape[1],
        num_groups=scale.shape[1],
        group_size=group_size,
        has_half_scales=scale.dtype == torch.float16,
        silu_mul=silu_mul,
        stream=platform_of(x_TI.device).current_stream(),
    )
    error = getattr(library, _ENTRIES[x_TI.dtype])(ctypes.byref(args))
    if error is not None:
        shape = f"{rows} {'pairs of rows' if silu_mul else 'rows'} of {inputs} inputs"
        raise RuntimeError(f"CUDA kernels of 4-bit linears: {list(x_TI.shape)} by {shape}: {error.decode()}")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
