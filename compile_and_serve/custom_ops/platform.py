"""The platform of a device, and the device of a name.

`platform_of(device)` answers; nothing else compares a device's type or calls `torch.cuda` (tests/custom_ops/test_platform.py). A hot path
reads an attribute once, in its constructor.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import torch

from compile_and_serve.custom_ops.device_names import BUILT_IN_DEVICES
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.platforms.cuda import CudaPlatform
from compile_and_serve.custom_ops.platforms.protocol import Platform
from compile_and_serve.plugins import load_plugins

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last on WSL

# A registry: platforms belong to devices, not to engines.
_makers: dict[str, Callable[[torch.device], Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}


@functools.cache
def platform_of(device: torch.device) -> Platform:
    """The device's platform: one instance for each device. Raises `ValueError` for a type of device that is not registered."""
    load_plugins("platforms")
    make = _makers.get(device.type)
    if make is None:
        raise ValueError(f"There is no platform for {device.type} devices: known are {', '.join(_makers)}.")
    return make(device)


def register_platform(device_type: str, make: Callable[[torch.device], Platform] | None) -> None:
    """`make` makes the platforms of this type of torch device from now on; None removes the type."""
    if make is None:
        _makers.pop(device_type, None)
    else:
        _makers[device_type] = make
    platform_of.cache_clear()


def resolve_device(name: str, index: int | None = None) -> torch.device:
    """The torch device; "auto" is CUDA if available. index: of the device, which becomes the current one.

    name: "auto", "cpu", "cuda", or the type of device of a plug-in's platform. Raises `ValueError` for another name, and if CUDA is
    wanted and not available, or has no such device.
    """
    if name not in BUILT_IN_DEVICES:
        load_plugins("platforms")  # which also make the type known to torch
        device = torch.device(name) if index is None else torch.device(name, index)
        platform_of(device).make_current()
        return device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", str(index))
    is_hidden = visible.strip() in ("", "-1")  # on purpose
    if name != "cpu" and index is not None and not is_hidden and not torch.cuda.is_available() and _has_cuda():
        raise ValueError(
            f"CUDA device {visible} is wanted, but torch finds no such device here: ranks and replicas have a device each; lower "
            "--tensor-parallel-size or --data-parallel-size, check the driver, or use --device cpu."
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no CUDA device here: use --device cpu, or check the driver.")
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


def _has_cuda() -> bool:
    """Whether torch and this machine are made for CUDA, whatever devices this process sees."""
    return torch.version.cuda is not None and any(Path(file).exists() for file in _DRIVER_FILES)
