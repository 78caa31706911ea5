"""The CPU kernels of csrc/cpu: builds them at first use, loads them into the dispatcher, and keeps the reason if that fails.

There are two libraries, so that models without 8-bit weights do not wait for the kernels of csrc/cpu/quantized.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path

from compile_and_serve.custom_ops.jit.cpp import BuildError, build_library
from compile_and_serve.custom_ops.jit.sources import CSRC

log = logging.getLogger(__name__)

_FOLDER = CSRC / "cpu"


class _Library:
    """A library that is built (once per machine) and loaded at the first call of `get`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._lock = threading.Lock()
        self.loaded: ctypes.CDLL | None = None
        self._tried = False
        self.reason: str | None = f"the {name} kernels have not been loaded yet"

    def get(self) -> ctypes.CDLL | None:
        with self._lock:
            if not self._tried:
                self.loaded, self.reason = self._load()
                if self.reason is not None:
                    log.warning("the %s kernels are not in use, the slower torch reference runs instead: %s", self._name, self.reason)
                self._tried = True
        return self.loaded

    def _load(self) -> tuple[ctypes.CDLL | None, str | None]:
        headers = {*_FOLDER.glob("*.h"), *self._folder.glob("*.h")}
        try:
            path = build_library(self._name, sorted(self._folder.glob("*.cpp")), sorted(headers))
            return ctypes.CDLL(str(path)), None
        except BuildError as error:
            return None, str(error)
        except OSError as error:
            return None, f"the built {self._name} kernels cannot be loaded: {error}"


_cpu = _Library("cpu", _FOLDER)
_quantized = _Library("cpu_quantized", _FOLDER / "quantized")


def load_cpu_kernels() -> bool:
    """Build (once per machine) and load the C++ kernels. → whether they are in use; otherwise `cpu_kernels_status` has the reason

    From then on, `cas` ops on CPU tensors run the kernels instead of the torch reference.
    """
    return _cpu.get() is not None


def build_cpu_kernels(*, quantized: bool) -> None:
    """`load_cpu_kernels`, or `quantized_cpu_kernel_library`, in a thread: a bare machine's compilers run while we import and read."""
    load = quantized_cpu_kernel_library if quantized else load_cpu_kernels
    threading.Thread(target=load, name="cpu-kernels", daemon=True).start()


def cpu_kernels_status() -> str | None:
    """None when the C++ kernels are in use, else the reason in one sentence."""
    return _cpu.reason


def cpu_kernel_library() -> ctypes.CDLL | None:
    """The loaded library, for its C entries (csrc/cpu/kernels.h); None when the kernels are not in use."""
    return _cpu.get()


def loaded_cpu_kernel_library() -> ctypes.CDLL | None:
    """The library if it is in use; None also before it is loaded."""
    return _cpu.loaded


@cache
def quantized_cpu_kernel_library() -> ctypes.CDLL | None:
    """As `cpu_kernel_library`, for quantized linears; `cas::quantized_linear` and `cas::group_linear` run it from then on."""
    cpu = _cpu.get()
    quantized = _quantized.get() if cpu is not None else None
    if cpu is None or quantized is None:
        return None
    addresses = (
        ctypes.cast(entry, ctypes.c_void_p)
        for entry in (quantized.cas_int8_linear, quantized.cas_float8_linear, quantized.cas_group_linear)
    )
    cpu.cas_use_quantized_linears(*addresses)
    return quantized


def quantized_cpu_kernels_status() -> str | None:
    """None when the kernels of quantized linears are in use, else the reason in one sentence."""
    return _cpu.reason or _quantized.reason
