"""The CPU kernels of csrc/cpu: built at first use, loaded into the dispatcher, and the reason when they are not there.

Two libraries: what every model runs, and csrc/cpu/quantized for weights of 8 bits, which the others need not wait for.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path

from compile_and_serve.custom_ops.build.cpp import BuildError, build_library
from compile_and_serve.custom_ops.build.sources import CSRC

log = logging.getLogger(__name__)

_FOLDER = CSRC / "cpu"


class _Library:
    """Built (once a machine) and loaded at the first call of `get`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: ctypes.CDLL | None = None
        self._tried = False
        self.reason: str | None = f"the {name} kernels have not been asked for yet"

    def get(self) -> ctypes.CDLL | None:
        with self._lock:
            if not self._tried:
                self._loaded, self.reason = self._load()
                if self.reason is not None:
                    log.warning(
                        "the %s kernels are not in use, the slower torch reference runs instead: %s",
                        self._name, self.reason,
                    )  # fmt: skip
                self._tried = True
        return self._loaded

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
    """Build (once a machine) and load the C++ kernels. → whether they are in use; `cpu_kernels_status` says why not.

    Call it before the ops run: loading replaces the torch reference of `cas` ops on CPU tensors by the kernels.
    """
    return _cpu.get() is not None


def cpu_kernels_status() -> str | None:
    """None when the C++ kernels are in use, else one sentence why the torch reference runs instead."""
    return _cpu.reason


def cpu_kernel_library() -> ctypes.CDLL | None:
    """The loaded library, for its C entries (csrc/cpu/kernels.h); None when the kernels are not in use."""
    return _cpu.get()


@cache
def quantized_cpu_kernel_library() -> ctypes.CDLL | None:
    """Likewise the library of quantized linears, which `cas::quantized_linear` runs from then on."""
    cpu = _cpu.get()
    quantized = _quantized.get() if cpu is not None else None
    if cpu is None or quantized is None:
        return None
    addresses = (
        ctypes.cast(entry, ctypes.c_void_p) for entry in (quantized.cas_int8_linear, quantized.cas_float8_linear)
    )
    cpu.cas_use_quantized_linears(*addresses)
    return quantized


def quantized_cpu_kernels_status() -> str | None:
    """None when the kernels of quantized linears are in use, else one sentence why the torch reference runs instead."""
    return _cpu.reason or _quantized.reason
