"""Launching our Triton kernels, and compiling all that some work launches before the first of them runs.

A kernel is compiled when it is first launched, in half a second to a second: Triton's passes, ptxas, and a C compiler for what launches
it. Most of that is outside of Python's lock, so that kernels which are known to come compile in threads beside each other.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compile_and_serve.custom_ops.build.sources import digest, kernel_digest, source_digest

if TYPE_CHECKING:  # which may be missing where there is no GPU
    import triton

log = logging.getLogger(__name__)

_is_ahead = False
_launched: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}  # compiled kernels, each with its constants


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; inside `compile_ahead`, the kernel is compiled and not run.

    args: the kernel's first parameters, a tensor, then tensors, numbers or None. options: the others, which are constants of the kernel
    (they are kept, and no tensors), and Triton's own options. A kernel compiled for the like already is launched without Triton's search
    for it, which takes the host longer than all else here.
    """
    if _is_ahead:
        kernel.warmup(*args, grid=grid, **options)
        return
    key = (kernel, args[0].device, *map(_kind, args), *options, *options.values())
    found = _launched.get(key)
    if found is None:
        constants = tuple(options.get(name, default) for name, default in _constants(kernel, len(args)))
        compiled = kernel[grid](*args, **options)
        if compiled is not None:  # Triton's interpreter compiles nothing
            _launched[key] = getattr(compiled, "result", lambda: compiled)(), constants
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


@functools.cache
def _constants(kernel: triton.JITFunction, begin: int) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of a kernel's parameters from `begin` on, all of them constants."""
    parameters = list(inspect.signature(kernel.fn).parameters.values())[begin:]
    for parameter in parameters:
        assert "constexpr" in str(parameter.annotation), (
            f"{kernel} takes {parameter.name}, no constant, by position only"
        )
    return tuple((parameter.name, parameter.default) for parameter in parameters)


def _kind(value: Any) -> Any:
    """Arguments of one kind make Triton compile a kernel once: it looks at types, alignments to 16 bytes, and integers that are 1 or
    multiples of 16.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return value == 1 or (value % 16 == 0, max(value, ~value).bit_length() // 32)
    return type(value)


def is_compiling_ahead() -> bool:
    """Whether kernels are compiled and not run, so that what they were to write is whatever lay there."""
    return _is_ahead


def compile_ahead(
    work: Callable[[], object],
    device: torch.device,
    threads: int,
    known_as: str | None = None,
    sources: Path | None = None,
) -> int:
    """Do `work`, compiling what it launches in threads instead of running it; → how many were handed to the threads.

    device: a CUDA device. Whatever else work does is done: it may compute with what kernels leave unwritten, and must not use it as an
    index; no other thread may launch meanwhile. A kernel that cannot be compiled says so when it is launched.
    known_as: decides, with the Python files of folder `sources`, which kernels work launches. Where the same was done before, nothing is,
    as long as Triton's cache is still there: what lies in it is loaded as it is launched.
    """
    global _is_ahead
    import triton

    start = time.perf_counter()
    done = None if known_as is None else _marker(known_as, device, sources)
    if done is not None and done.exists():
        return 0
    with _Compilers(threads, device) as compilers:
        with triton.AsyncCompileMode(compilers, ignore_errors=True):
            _is_ahead = True
            try:
                work()
            finally:
                _is_ahead = False
        count = compilers.count
    log.info("%d Triton kernels were compiled, or found in its cache, in %.1f s.", count, time.perf_counter() - start)
    if done is not None:
        with suppress(OSError):  # done again at the next start
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()
    return count


def _marker(known_as: str, device: torch.device, sources: Path | None) -> Path:
    """Of what was compiled into Triton's cache, under our kernels as they are now; it lies there, to be gone with them."""
    import triton

    caller = "" if sources is None else source_digest(sources)
    name = digest(known_as, torch.cuda.get_device_name(device), triton.__version__, kernel_digest(), caller)
    return Path(triton.knobs.cache.dir) / f"compiled-ahead-{name}"


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and load them onto a device."""

    def __init__(self, threads: int, device: torch.device) -> None:
        super().__init__(threads, thread_name_prefix="compile", initializer=torch.cuda.set_device, initargs=(device,))
        self.count = 0

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        self.count += 1

        def work() -> Any:
            kernel = compile_kernel()
            kernel.run  # noqa: B018  (builds what launches the kernel, and loads it)
            return kernel

        return super().submit(work)
