"""Builds C++ sources into a shared library at first use and keeps it in the user's cache folder.

The file name contains a hash of everything that the result depends on, so a stale library is never loaded and several versions can
coexist. A file lock lets concurrent processes share one build. This file imports no torch at its top, for processes that prepare media.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from compile_and_serve.custom_ops.jit.checked_library import is_intact, publish

log = logging.getLogger(__name__)

_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-w")


class BuildError(RuntimeError):
    """There is no library; the message is the reason in one sentence."""


def cache_folder() -> Path:
    """Where built libraries are kept: $XDG_CACHE_HOME/compile-and-serve/csrc, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "compile-and-serve" / "csrc"


def find_compiler() -> str:
    """Path of $CXX, g++ or clang++. Raises BuildError where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("no C++ compiler was found: install g++ (or set CXX to one)")


def cpu_identity() -> str:
    """The CPU's model and features, which `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model\t", "model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _torch_flags() -> list[str]:
    import torch

    folder = _torch_folder()
    return [
        f"-I{folder / 'include'}",
        f"-I{folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]


def _link_flags() -> list[str]:
    # Two OpenMP runtimes in a process would have two pools of threads. Linking torch's own by its path makes the loader reuse it.
    folder = _torch_folder()
    lib = folder / "lib"
    bundled = sorted(lib.glob("libgomp*.so*")) or sorted(lib.glob("libiomp5*.so*")) or sorted(lib.glob("libomp*.so*"))
    bundled = bundled or sorted((folder.parent / "torch.libs").glob("libgomp*.so*"))
    return [f"-L{lib}", "-ltorch_cpu", "-lc10", *([str(bundled[0])] if bundled else ["-fopenmp"])]


def _torch_version() -> str:
    import torch

    return torch.__version__


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).resolve().parent


def run_all(processes: Sequence[tuple[str, list[str]]], at_once: int | None = None) -> None:
    """Run commands in parallel, at most `at_once` (None: all). They end with this process (`end_builds`).

    Raises BuildError with the first error line of the first command that fails.
    """
    waiting, running = list(reversed(processes)), deque[tuple[str, subprocess.Popen[str]]]()
    failed: str | None = None
    while waiting or running:
        while waiting and len(running) < (at_once or len(processes)):
            what, command = waiting.pop()
            running.append((what, _started(command)))
        what, process = running.popleft()
        errors = process.communicate()[1]
        _running.discard(process)
        if process.returncode and failed is None:
            lines = errors.splitlines()
            first = next((line for line in lines if "error:" in line), lines[-1] if lines else "no message")
            failed = f"the compiler failed on {what}: {first.strip()}"
            waiting.clear()
    if failed is not None:
        raise BuildError(failed)


# Of the process: they end with it, whichever engine started them.
_running: set[subprocess.Popen[str]] = set()
_starting = threading.RLock()
_ended = False  # no command starts after `end_builds`


def _started(command: list[str]) -> subprocess.Popen[str]:
    with _starting:
        if _ended:
            raise BuildError("the process is ending")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        _running.add(process)
    return process


@atexit.register
def end_builds() -> None:
    """End the running compilers and the programs that they started. A process that ends by `os._exit` calls this first."""
    global _ended
    with _starting:
        _ended = True
    for process in list(_running):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)


def build_library(name: str, sources: Sequence[Path], headers: Sequence[Path] = (), *, uses_torch: bool = True) -> Path:
    """Compile `sources` into a shared library, unless it is in the cache.

    headers: files that the sources include, for the hash. uses_torch: whether they include torch's headers. → path of the library.
    Raises BuildError if there is no compiler, the compiler fails, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    flags, links, made_for = [*_FLAGS], list[str](), list[str]()
    if uses_torch:
        flags, links, made_for = [*flags, *_torch_flags()], _link_flags(), [_torch_version(), str(_torch_folder())]
    digest = hashlib.sha256()
    for part in (version, cpu_identity(), repr(_FLAGS), *made_for):
        digest.update(part.encode() + b"\0")
    for path in (*sources, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = cache_folder()
    library = folder / f"{name}-{digest.hexdigest()[:16]}.so"

    def make(scratch: Path, built: Path) -> None:
        objects = [scratch / f"{source.stem}.o" for source in sources]
        run_all(
            [
                (source.name, [compiler, *flags, "-c", str(source), "-o", str(target)])
                for source, target in zip(sources, objects, strict=True)
            ]
        )
        run_all([(name, [compiler, "-shared", *map(str, objects), "-o", str(built), *links])])

    return build_once(name, library, "less than a minute", make)


def build_once(name: str, library: Path, duration: str, make: Callable[[Path, Path], None]) -> Path:
    """Build a library unless an intact one exists. One of several processes builds it; the others wait.

    make: called with a scratch folder and the path of the result. Raises what `make` raises, or BuildError if the folder cannot be written.
    """
    folder = library.parent
    try:
        if is_intact(library):
            return library
        folder.mkdir(parents=True, exist_ok=True)
        lock = library.with_suffix(".lock").open("w")
    except OSError as error:
        raise BuildError(f"the cache folder {folder} cannot be written: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_intact(library):
            return library
        if library.exists():
            log.warning("The library %s does not match its checksum. It is rebuilt.", library)
        unfinished = f".{library.stem}-build-"
        for abandoned in folder.glob(f"{unfinished}*"):  # of a process that was killed: this one holds the lock
            shutil.rmtree(abandoned, ignore_errors=True)
        log.info("building the %s kernels (once on this machine, %s)", name, duration)
        start = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=unfinished) as scratch:
                built = Path(scratch) / library.name
                make(Path(scratch), built)
                publish(built, library)
        except OSError as error:
            raise BuildError(f"the {name} kernels could not be built in {folder}: {error}") from error
        log.info("built the %s kernels in %.1f s", name, time.monotonic() - start)
    return library
