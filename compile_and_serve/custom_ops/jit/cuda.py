"""Builds a CUDA C++ source into a shared library with nvcc, as `custom_ops/jit/cpp.py` does for the CPU. Needs no GPU.

Building CUTLASS' kernels takes minutes. A missing library of them is built in the background. It comes into use when `use_built_libraries`
is called, at a moment at which the kernels of a running process may change, or at the next start.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from compile_and_serve.custom_ops.jit.background_thread import run_in_background
from compile_and_serve.custom_ops.jit.checked_library import is_intact
from compile_and_serve.custom_ops.jit.cpp import BuildError, build_once, cache_folder, run_all
from compile_and_serve.custom_ops.jit.sources import CSRC
from compile_and_serve.custom_ops.platform import platform_of

log = logging.getLogger(__name__)

_loaded: dict[tuple[str, torch.device], ctypes.CDLL | None] = {}  # by what it is called in the log, and device
_building: list[tuple[str, torch.device]] = []  # in the background
_built: list[tuple[str, torch.device]] = []  # of those, what is not in use yet

_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-w")


def find_nvcc() -> str:
    """Path of nvcc below $CUDA_HOME, on the PATH or below /usr/local/cuda. Raises BuildError where there is none."""
    home = os.environ.get("CUDA_HOME")
    for path in (f"{home}/bin/nvcc" if home else None, "nvcc", "/usr/local/cuda/bin/nvcc"):
        if path and (found := shutil.which(path)):
            return found
    raise BuildError("nvcc was not found: install the CUDA toolkit (or set CUDA_HOME to its folder)")


@dataclass(frozen=True, kw_only=True, slots=True)
class NvccLibrary:
    """A library of one source, which is compiled once for each of `variants`, compiler flags.

    headers: files for the hash, besides the source. include: folders of headers. architecture: for example "90a".
    duration: of a build, for the log. flags: compiler flags of all variants.
    """

    name: str
    source: Path
    headers: Sequence[Path]
    variants: Sequence[str]
    include: Sequence[Path]
    architecture: str
    duration: str = "some minutes"
    flags: Sequence[str] = ()

    def path(self) -> Path:
        """Path of the library, built or not. Raises BuildError without nvcc."""
        digest = hashlib.sha256()
        for part in (_nvcc_version(find_nvcc()), repr(_FLAGS), self.architecture, repr(tuple(self.variants)), *self.flags):
            digest.update(part.encode() + b"\0")
        for file in (self.source, *self.headers):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return cache_folder() / f"{self.name}-sm{self.architecture}-{digest.hexdigest()[:16]}.so"

    def build(self) -> Path:
        """Build the library unless it exists. Raises BuildError."""
        return build_once(self.name, self.path(), self.duration, self._make)

    def _make(self, scratch: Path, built: Path) -> None:
        nvcc = find_nvcc()
        code = f"arch=compute_{self.architecture},code=sm_{self.architecture}"
        flags = [*_FLAGS, *self.flags, "-gencode", code, *(f"-I{folder}" for folder in self.include)]
        objects = [scratch / f"{i}.o" for i in range(len(self.variants))]

        commands = [
            (f"{self.source.name} {variant}", [nvcc, *flags, variant, "-c", str(self.source), "-o", str(target)])
            for variant, target in zip(self.variants, objects, strict=True)
        ]
        run_all(commands, at_once=max(1, (os.cpu_count() or 1) - 1))  # each nvcc takes a core and one or two GiB
        run_all([(self.name, [nvcc, "-shared", *map(str, objects), "-o", str(built)])])


@functools.cache
def _nvcc_version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout


def cutlass_library(name: str, num_configs: int, headers: Sequence[str] = ()) -> NvccLibrary:
    """The library of csrc/cuda/NAME.cu for Hopper, compiled with each CAS_CONFIG. Raises `BuildError` without CUTLASS' headers.

    headers: of csrc/cuda that it includes, besides NAME.h.
    """
    spec = find_spec("cutlass_library")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    root = Path(folders[0]) / "source" if folders else None
    if root is None or not (root / "include" / "cutlass").is_dir():
        raise BuildError("CUTLASS' headers were not found: install nvidia-cutlass (extra [cuda])")
    folder = CSRC / "cuda"
    return NvccLibrary(
        name=name,
        source=folder / f"{name}.cu",
        headers=(*(folder / header for header in (f"{name}.h", *headers)), root / "include" / "cutlass" / "version.h"),
        variants=tuple(f"-DCAS_CONFIG={i}" for i in range(num_configs)),
        include=(root / "include", root / "tools" / "util" / "include"),
        architecture="90a",
    )


def load_or_build(
    device: torch.device, what: str, make_library: Callable[[], NvccLibrary], *, is_quick: bool = False
) -> ctypes.CDLL | None:
    """The built library. None with the reason in the log; it is then built in the background if possible, and None is returned until
    `use_built_libraries`.

    is_quick: it is built at once instead.
    """
    key = what, device
    if key not in _loaded:
        _loaded[key] = _load_or_build(device, what, make_library, is_quick=is_quick)
    return _loaded[key]


def num_building() -> int:
    """Libraries that are being built in the background."""
    return len(_building)


def num_built_libraries() -> int:
    """Libraries that were built in the background and are not in use yet."""
    return len(_built)


def use_built_libraries() -> list[str]:
    """Let the next calls of `load_or_build` return the libraries that were built in the background meanwhile. → what they are called"""
    keys = [_built.pop() for _ in range(len(_built))]
    for key in keys:
        _loaded.pop(key, None)
    return sorted({what for what, _ in keys})


def _load_or_build(device: torch.device, what: str, make_library: Callable[[], NvccLibrary], *, is_quick: bool) -> ctypes.CDLL | None:
    if platform_of(device).compute_capability != (9, 0):
        log.info("%s need compute capability 9.0; other kernels are used.", what)
        return None
    try:
        library = make_library()
        path = library.build() if is_quick else library.path()
        if is_intact(path):
            return ctypes.CDLL(str(path))
    except (BuildError, OSError) as error:
        log.warning("%s are not in use, others are: %s", what, error)
        return None
    text = "%s are being built in the background (once, %s). They come into use when they are built and there are no requests."
    log.info(text, what, library.duration)
    _building.append((what, device))
    run_in_background(f"build-{library.name}", functools.partial(_build, library, what, device))
    return None


def _build(library: NvccLibrary, what: str, device: torch.device) -> None:
    try:
        library.build()
        _built.append((what, device))
    except BuildError as error:
        log.warning("%s could not be built: %s", what, error)
    finally:
        _building.remove((what, device))
