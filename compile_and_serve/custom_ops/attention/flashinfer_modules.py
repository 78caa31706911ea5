"""FlashInfer's compiled modules: finding them, building them in the background, and copying them to other machines.

FlashInfer compiles a kernel module at its first use, which takes half a minute or more. Here no step waits for that. A module is used
once it is in `module_dir`, whose name has FlashInfer's version and the device's architecture; a background thread builds missing ones.
Modules copied from an artifact load without a compiler. Only a build imports FlashInfer, which takes a second of Python.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import threading
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from compile_and_serve.custom_ops.jit.background_thread import run_in_background
from compile_and_serve.custom_ops.platform import platform_of

logger = logging.getLogger(__name__)

Variant = Literal["fa2", "fa3"]

_LONGEST_CAUSE = 300  # characters
# `flashinfer_prefill` calls the modules of these versions. Their arguments have changed from one patch version to the next.
FIRST_VERSION, FIRST_UNKNOWN_VERSION = (0, 6, 11), (0, 7, 5)


def flashinfer_version() -> tuple[int, ...]:
    """Three numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", version("flashinfer-python"))[:3])


def flashinfer_unavailable_reason(device: torch.device) -> str | None:
    """None when FlashInfer runs on the device, else the reason in one sentence. Does not import it."""
    platform = platform_of(device)
    if not platform.runs_cuda_kernels:
        return f"FlashInfer runs on CUDA devices only, not on {device.type}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed (package flashinfer-python, extra [cuda])"
    if platform.compute_capability < (8, 0):
        return f"FlashInfer needs compute capability 8.0 or newer, {platform.name} is older"
    if not FIRST_VERSION <= flashinfer_version() < FIRST_UNKNOWN_VERSION:
        known = f">={'.'.join(map(str, FIRST_VERSION))},<{'.'.join(map(str, FIRST_UNKNOWN_VERSION))}"
        return f"how the kernels of FlashInfer {version('flashinfer-python')} are called is not known (install {known})"
    return None


class FlashInferModules:
    """The prefill modules of one dtype and head size, with or without a window and a soft cap."""

    def __init__(
        self,
        dtype: torch.dtype,
        head_dim: int,
        device: torch.device,
        module_dir: Path | None = None,
        *,
        has_window: bool = False,
        has_cap: bool = False,
        missing: str | None = None,
    ) -> None:
        """missing: why FlashInfer does not run here; then there is no module."""
        major, minor = platform_of(device).compute_capability
        self.key = f"flashinfer-{'none' if missing else version('flashinfer-python')}-sm{major}{minor}"
        default_dir = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "compile-and-serve" / "flashinfer"
        self.module_dir = (module_dir or default_dir) / self.key
        self.dtype, self.head_dim, self.device = dtype, head_dim, device
        self.has_window, self.has_cap = has_window, has_cap
        self.variants: tuple[Variant, ...] = ("fa3",) if (major, minor) == (9, 0) else ("fa2",)  # that the backend uses
        self._state: dict[Variant, str] = dict.fromkeys(self.variants, missing) if missing else {}
        self._missing = missing
        self._loaded: dict[Variant, Any] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def _spec(self, variant: Variant) -> Any:
        """FlashInfer's build specification of the module."""
        from flashinfer.jit.attention import gen_batch_prefill_module

        return gen_batch_prefill_module(variant, *self._arguments())

    def _arguments(self) -> tuple[Any, ...]:
        """FlashInfer's: dtypes of q, keys and values, output and indices; head sizes; no encoding; window; cap; no fp16 sums."""
        dtypes = (self.dtype, self.dtype, self.dtype, torch.int32)
        return (*dtypes, self.head_dim, self.head_dim, 0, self.has_window, self.has_cap, False)

    def path(self, variant: Variant) -> Path:
        """Where the built module is, or will be."""
        name = f"{variant}-{str(self.dtype).removeprefix('torch.')}-{self.head_dim}"
        name += "-window" * self.has_window + "-soft-cap" * self.has_cap
        return self.module_dir / f"{name}.so"

    def load(self, variant: Variant) -> Any | None:
        """The functions `plan`, `ragged_run` and `paged_run` of the built module (a tvm_ffi.Module); None where it cannot be loaded.

        A file that cannot be loaded is deleted, so that the next start builds the module again.
        """
        with self._lock:
            if variant not in self._loaded and self.is_built(variant):
                try:
                    import tvm_ffi  # FlashInfer needs it; its import takes a tenth of FlashInfer's

                    self._loaded[variant] = tvm_ffi.load_module(str(self.path(variant)))
                except ImportError as error:
                    self._set_failed(variant, "could not be loaded", error)
                except Exception as error:
                    self.path(variant).unlink(missing_ok=True)
                    self._set_failed(variant, "could not be loaded and was deleted", error)
            return self._loaded.get(variant)

    def load_in_background(self) -> None:
        """Load the built modules in a thread, in about 0.15 s. A call of `load` meanwhile waits for it."""

        def load_all() -> None:
            for variant in self.variants:
                self.load(variant)

        threading.Thread(target=load_all, name="flashinfer-load", daemon=True).start()

    def is_built(self, variant: Variant) -> bool:
        """Whether the module is there, and has not failed."""
        if self._state.get(variant) == "built":
            return True
        if variant not in self.variants or self._state.get(variant) is not None:
            return False
        if not self.path(variant).exists():
            return False
        self._state[variant] = "built"
        return True

    def status(self) -> dict[str, str]:
        """Variant → "built", "building", "not built", or the failure."""
        return {variant: "built" if self.is_built(variant) else self._state.get(variant, "not built") for variant in self.variants}

    def build(self, variant: Variant) -> None:
        """Build the module (half a minute or more) and put it into `module_dir`, unless it is there, or FlashInfer is missing."""
        if self.is_built(variant) or self._missing:
            return
        started = time.perf_counter()
        self._state[variant] = "building"
        try:
            spec = self._spec(variant)
            spec.build(verbose=False)
            _store(spec.jit_library_path, self.path(variant))
        except Exception as error:
            self._set_failed(variant, "could not be built", error)
            return
        self._state[variant] = "built"
        logger.info("FlashInfer's %s prefill module was built in %.0f s and is used from now on", variant, time.perf_counter() - started)

    def _set_failed(self, variant: Variant, what: str, error: Exception) -> None:
        self._state[variant] = f"failed: {_cause(error)}"
        logger.warning("FlashInfer's %s prefill module %s; Triton's kernels stay in use: %s", variant, what, _cause(error))
        logger.debug("the whole error", exc_info=error)

    def build_in_background(self) -> None:
        """Build the missing modules one after another in a background thread; returns at once."""
        with self._lock:
            missing = [variant for variant in self.variants if not self.is_built(variant) and variant not in self._state]
            if self._thread is not None or not missing:
                return
            logger.info("building FlashInfer's prefill modules in the background: %s", ", ".join(missing))
            self._thread = run_in_background("flashinfer-build", functools.partial(self._build_all, missing))

    def _build_all(self, variants: list[Variant]) -> None:
        for variant in variants:
            self.build(variant)

    def export_to(self, folder: Path) -> list[Path]:
        """Copy the built modules into folder/<key>. → the files written"""
        built = [self.path(variant) for variant in self.variants if self.is_built(variant)]
        for source in built:
            _store(source, folder / self.key / source.name)
        return [folder / self.key / source.name for source in built]

    def import_from(self, folder: Path) -> list[Path]:
        """Copy missing modules that `export_to` wrote for this FlashInfer version and architecture. → the files written"""
        sources = sorted((folder / self.key).glob("*.so"))
        missing = [source for source in sources if not (self.module_dir / source.name).exists()]
        for source in missing:
            _store(source, self.module_dir / source.name)
        return [self.module_dir / source.name for source in missing]


def _store(source: Path, target: Path) -> None:
    """Copy a file so that no other process sees a part of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def _cause(error: Exception) -> str:
    """One line. Of a build's output the one with the error; the commands around it are long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    signs = ("cannot find", "error:", "fatal", "error")  # "collect2: error:" comes after the line with the missing name
    wanted = (line for sign in signs for line in lines if sign in line.lower())
    return next(wanted, lines[0])[:_LONGEST_CAUSE]
