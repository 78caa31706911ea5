"""DeepGEMM's float8 products with scales per block (csrc/cuda/block_gemm.cu), from the headers of the package `sgl-deep-gemm`.

The package compiles a kernel within the first call that needs it, and the number of tokens decides which kernel that is. A step would
wait for the compiler. So its Python module is not imported. Our library has a few of its kernels and is built in the background, as
CUTLASS' products are. The tuner chooses.

Shape legend: T tokens, I input features, O output features, G = ceil(I / 128) groups of inputs.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.jit.cuda import NvccLibrary, load_or_build
from compile_and_serve.custom_ops.jit.sources import CSRC
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import group_major_scales
from compile_and_serve.custom_ops.quantized.cutlass_gemm import gemm_arguments, launch_gemm

VERSION = "0.2.5"  # the arguments of the kernel's template change from one version to the next
DEEP = ("deep_128x128", "deep_128x192")  # configurations, in the order of CAS_CONFIG in csrc/cuda/block_gemm.cu


def deep_gemm_library(num_multiprocessors: int) -> NvccLibrary:
    """The library of csrc/cuda/block_gemm.cu, one object per configuration. Raises `BuildError` without DeepGEMM's headers."""
    try:
        package = distribution("sgl-deep-gemm")
    except PackageNotFoundError as error:
        raise BuildError(f"DeepGEMM's headers were not found: install sgl-deep-gemm=={VERSION} (extra [cuda])") from error
    if package.version != VERSION:
        raise BuildError(f"how the kernels of sgl-deep-gemm {package.version} are called is not known: install sgl-deep-gemm=={VERSION}")
    root, folder = Path(str(package.locate_file("deep_gemm"))), CSRC / "cuda"
    return NvccLibrary(
        name="block_gemm",
        source=folder / "block_gemm.cu",
        headers=(folder / "scaled_gemm.h", root / "VERSION"),
        variants=tuple(f"-DCAS_CONFIG={i}" for i in range(len(DEEP))),
        include=(root / "include",),
        architecture="90a",
        duration="10 to 20 seconds",
        flags=(f"-DCAS_SMS={num_multiprocessors}", "-Xptxas=--register-usage-level=10"),  # the latter as DeepGEMM compiles it
    )


def load_deep_gemms(device: torch.device) -> ctypes.CDLL | None:
    """The library, or None while it is not in use (see `load_or_build`)."""
    return load_or_build(device, "DeepGEMM's float8 products", lambda: deep_gemm_library(platform_of(device).num_multiprocessors))


def run_deep_gemm(
    library: ctypes.CDLL, config: str, a_TI: torch.Tensor, b_OI: torch.Tensor, a_scale_TG: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """bf16(a_scale · b_scale · a bᵀ) by one of DEEP. → [T, O]

    The operands have to satisfy `cutlass_gemm.unsupported_reason`. a_scale_TG: float32; it is copied first unless it
    is laid out as by `group_major_scales`. b_scale: float32 [ceil(O / 128), G].
    """
    out_TO = torch.empty(a_TI.shape[0], b_OI.shape[0], dtype=torch.bfloat16, device=a_TI.device)
    a_scale_TG, b_scale = _group_major(a_scale_TG), b_scale.contiguous()
    launch_gemm(library, config, gemm_arguments(out_TO, a_TI, b_OI, a_scale_TG, b_scale))
    return out_TO


def _group_major(scale_TG: torch.Tensor) -> torch.Tensor:
    num_tokens, num_groups = scale_TG.shape
    if scale_TG.stride() == (1, -(-num_tokens // 4) * 4) and scale_TG.data_ptr() % 16 == 0:
        return scale_TG
    return group_major_scales(num_tokens, num_groups, scale_TG.device).copy_(scale_TG)
