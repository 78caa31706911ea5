"""CUDA starts while torch is imported: each takes a part of a second or more, and neither needs the other. Imports no torch."""

from __future__ import annotations

import ctypes
import sys
import threading
from importlib.util import find_spec
from pathlib import Path


def start_cuda(device: str, index: int | None) -> threading.Thread | None:
    """Make a GPU's primary context in a thread, for torch to find. → the thread; None if there is nothing to make or torch is imported.

    device: as `resolve_device` takes it. index: of the GPU; None is the first. What fails here fails again in torch, which says why.
    """
    if "torch" in sys.modules or device not in ("auto", "cuda") or not _torch_has_cuda():
        return None
    thread = threading.Thread(target=_make_context, args=(index or 0,), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _torch_has_cuda() -> bool:
    found = find_spec("torch")
    return found is not None and found.origin is not None and (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _make_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    number, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(number), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)  # for as long as this process lives
