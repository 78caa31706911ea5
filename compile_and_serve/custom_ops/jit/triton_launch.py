"""Launches our Triton kernels, and compiles the kernels of a piece of work in parallel before it runs.

Triton compiles a kernel at its first launch, which takes half a second to a second (Triton's passes, ptxas, and a C compiler for the
launcher). Most of that does not hold Python's lock, so several kernels can compile in threads.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compile_and_serve.custom_ops.jit.sources import digest, kernel_digest, source_digest
from compile_and_serve.custom_ops.platform import platform_of

if TYPE_CHECKING:  # Triton may be missing where there is no GPU
    import triton

log = logging.getLogger(__name__)

_RESERVED_SHARED_BYTES = 1024  # of each program, by the driver
_PREFERRED_SHARED_PERCENT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT

# Of each thread: while an engine compiles ahead, another one may serve.
_is_ahead: ContextVar[bool] = ContextVar("is_ahead", default=False)
# Compiled kernels with their constants, by all that they depend on: engines share them.
_launched: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`. Inside `compile_ahead`, the kernel is compiled and not run.

    args: the kernel's first parameters; the first is a tensor, the others are tensors, numbers or None. options: the kernel's constants,
    which are not tensors, and Triton's own options. A kernel that was compiled for such arguments is launched without Triton's search for
    it, which would take most of the host's time. A constant RESIDENT limits a kernel's shared memory: see `_limit_shared_memory`.
    """
    if _is_ahead.get():
        kernel.warmup(*args, grid=grid, **options)
        return
    key = (kernel, args[0].device, *map(_kind, args), *options, *options.values())
    found = _launched.get(key)
    if found is None:
        constants = tuple(options.get(name, default) for name, default in _constants(kernel, len(args)))
        compiled = kernel[grid](*args, **options)
        if compiled is not None:  # Triton's interpreter returns None
            compiled = getattr(compiled, "result", lambda: compiled)()
            if options.get("RESIDENT") is not None:
                _limit_shared_memory(compiled, options["RESIDENT"], args[0].device)
            _launched[key] = compiled, constants
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


def _limit_shared_memory(compiled: Any, resident: int, device: torch.device) -> None:
    """Ask for no more shared memory on a multiprocessor than `resident` programs of a compiled kernel need at once.

    What is left is its L1 cache, which keeps the loads of other kernels in flight. By default, the driver gives a kernel room for as many
    programs as could ever run. That split stays while kernels overlap, so the linears after a decode's attention had hardly any L1 cache:
    a step of Llama-3.1-8B at batch size 1 took 4.25 ms on an H200, and takes 3.81 ms with this limit.
    """
    available = platform_of(device).shared_bytes_per_multiprocessor
    if not available:  # no NVIDIA device
        return
    needed = resident * (compiled.metadata.shared + _RESERVED_SHARED_BYTES)
    percent = min(100, math.ceil(100 * needed / available))
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(compiled.function), _PREFERRED_SHARED_PERCENT, percent)
    if error:
        log.warning("%s keeps the driver's split of shared memory and L1 cache: CUDA error %d. Decode may be slower.", compiled.name, error)


@functools.cache
def _constants(kernel: triton.JITFunction, begin: int) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of a kernel's parameters from `begin` on. All of them are constants."""
    parameters = list(inspect.signature(kernel.fn).parameters.values())[begin:]
    for parameter in parameters:
        assert "constexpr" in str(parameter.annotation), f"{kernel}: {parameter.name} is not a constant and has to be passed by position"
    return tuple((parameter.name, parameter.default) for parameter in parameters)


def _kind(value: Any) -> Any:
    """Equal for arguments that Triton does not compile a kernel anew for: it looks at types, at alignment to 16 bytes, and at whether
    an integer is 1 or a multiple of 16.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1 or (value % 16 == 0, max(value, ~value).bit_length() // 32)
    return type(value)


def prepare_cache_key() -> threading.Thread:
    """Compute what the keys of Triton's cache begin with, in a thread: a hash of Triton's files, some hundred megabytes.

    Otherwise the first kernel would wait for it. Hashing does not hold Python's lock.
    """

    def work() -> None:
        from triton.runtime import cache

        cache.triton_key()  # Triton keeps it

    thread = threading.Thread(target=work, name="triton-key", daemon=True)
    thread.start()
    return thread


def is_compiling_ahead() -> bool:
    """Whether this thread's kernels are compiled and not run. Their outputs are then uninitialized."""
    return _is_ahead.get()


def compile_ahead(
    work: Callable[[], object], device: torch.device, threads: int, known_as: str | None = None, sources: Path | None = None
) -> int:
    """Run `work` with its Triton kernels compiled in threads instead of launched. → number of kernels given to the threads

    device: a CUDA device. Everything else in `work` runs. It may compute with the kernels' uninitialized outputs, but not use them as
    indices. Other threads launch their kernels as usual. A kernel that fails to compile raises at its launch, later.
    known_as: with the Python files of the folder `sources`, it determines which kernels `work` launches. If they were compiled before and
    Triton's cache still exists, nothing runs: kernels are loaded from the cache at their launch.
    """
    import triton

    if known_as is not None and was_compiled_ahead(known_as, device, sources):
        return 0
    start = time.perf_counter()
    with _Compilers(threads, device) as compilers:
        with triton.AsyncCompileMode(compilers, ignore_errors=True):
            before = _is_ahead.set(True)
            try:
                work()
            finally:
                _is_ahead.reset(before)
        count = compilers.count
    log.info("%d Triton kernels were compiled or found in Triton's cache in %.1f s.", count, time.perf_counter() - start)
    if known_as is not None:
        done = _marker(known_as, device, sources)
        with suppress(OSError):  # without the marker, the next start compiles again
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()
    return count


def was_compiled_ahead(known_as: str, device: torch.device, sources: Path | None) -> bool:
    """Whether `compile_ahead` with these arguments has nothing to do."""
    return _marker(known_as, device, sources).exists()


def _marker(known_as: str, device: torch.device, sources: Path | None) -> Path:
    """A file that says what was compiled with our kernels as they are now. It is in Triton's cache, so that both are removed together."""
    import triton

    caller = "" if sources is None else source_digest(sources)
    name = digest(known_as, platform_of(device).name, triton.__version__, kernel_digest(), caller)
    return Path(triton.knobs.cache.dir) / f"compiled-ahead-{name}"


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and load them onto a device."""

    def __init__(self, threads: int, device: torch.device) -> None:
        super().__init__(threads, thread_name_prefix="compile", initializer=platform_of(device).make_current)
        self.count = 0

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self.count += 1

        def work() -> Any:
            kernel = compile_kernel()
            kernel.run  # noqa: B018  (builds what launches the kernel, and loads it)
            return kernel

        return super().submit(work)
