"""What the engine asks of the machine: which device, how many threads, which dtype it computes in, how much memory is
free.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from compile_and_serve.runtime.config import KVCacheDtype

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last on Windows' Linux
_CPU_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86, x86, arm


def resolve_device(name: Literal["auto", "cpu", "cuda"], index: int | None = None) -> torch.device:
    """The torch device; "auto" is CUDA where there is one. index: of the CUDA device, which becomes the current one.

    Raises `ValueError` when CUDA is asked for and not there, or has no such device.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", str(index))
    is_hidden = visible.strip() in ("", "-1")  # on purpose
    if name != "cpu" and index is not None and not is_hidden and not torch.cuda.is_available() and _has_cuda():
        raise ValueError(
            f"CUDA device {visible} is wanted, but torch finds no such device here: ranks and replicas have a device each; lower "
            "--tensor-parallel-size or --data-parallel-size, check the driver, or use --device cpu."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch finds no CUDA device here: use --device cpu, or check the driver."
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if index is not None:
        if index >= torch.cuda.device_count():
            raise ValueError(
                f"CUDA device {index} is wanted, but this machine has {torch.cuda.device_count()}: ranks and replicas have a "
                "device each; lower --tensor-parallel-size or --data-parallel-size."
            )
        torch.cuda.set_device(index)
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: Literal["auto", "bfloat16", "float32"], device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; "auto" is bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_bf16 = bool(_CPU_BF16_FLAGS & _cpu_flags())
    return torch.bfloat16 if has_bf16 else torch.float32


def resolve_kv_cache_dtype(name: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache of a model in `dtype`: "auto" is the same, "fp8" float8_e4m3fn."""
    return torch.float8_e4m3fn if name == "fp8" else dtype


def use_threads(num_threads: int | None, num_processes: int = 1) -> int:
    """Let CPU kernels use `num_threads` threads; the number.

    None: OMP_NUM_THREADS, or else this process's part of the cores that it may run on, when `num_processes` share them.
    """
    if num_threads is None:
        variable = os.environ.get("OMP_NUM_THREADS", "")
        num_threads = int(variable) if variable.isdigit() else num_cores() // num_processes
        num_threads = max(1, num_threads)
    torch.set_num_threads(num_threads)
    return num_threads


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def describe_device(device: torch.device) -> str:
    """For messages and reports: "cpu", or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _has_cuda() -> bool:
    """Whether torch and this machine are made for CUDA, whatever devices a process sees."""
    return torch.version.cuda is not None and any(Path(file).exists() for file in _DRIVER_FILES)


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()
