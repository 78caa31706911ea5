"""The CPU kernels of csrc/cpu: built at first use, loaded into the dispatcher, and the reason when they are not there."""

from __future__ import annotations

import ctypes
import logging
import threading

from custom_ops.build import CSRC, BuildError, build_library

log = logging.getLogger(__name__)

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_reason: str | None = "the CPU kernels have not been asked for yet"
_tried = False


def load_cpu_kernels() -> bool:
    """Build (once a machine) and load the C++ kernels. → whether they are in use; `cpu_kernels_status` says why not.

    Call it before the ops run: loading replaces the torch reference of `cas` ops on CPU tensors by the kernels.
    """
    global _library, _reason, _tried
    with _lock:
        if not _tried:
            folder = CSRC / "cpu"
            try:
                path = build_library("cpu", sorted(folder.glob("*.cpp")), sorted(folder.glob("*.h")))
                _library = ctypes.CDLL(str(path))
                _reason = None
            except BuildError as error:
                _reason = str(error)
            except OSError as error:
                _reason = f"the built CPU kernels cannot be loaded: {error}"
            if _reason is not None:
                log.warning("the CPU kernels are not in use, the slower torch reference runs instead: %s", _reason)
            _tried = True
    return _library is not None


def cpu_kernels_status() -> str | None:
    """None when the C++ kernels are in use, else one sentence why the torch reference runs instead."""
    return _reason


def cpu_kernel_library() -> ctypes.CDLL | None:
    """The loaded library, for its C entries (csrc/cpu/kernels.h); None when the kernels are not in use."""
    return _library if load_cpu_kernels() else None
