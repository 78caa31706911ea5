"""Inductor: the one place that touches its private interfaces.

A piece goes in as an FX graph and comes out as Inductor's generated Python module (`source`) plus the files which that
module's kernels were built into. Both are kept; loading them again traces and lowers nothing. AOTAutograd's cache and its
run-time wrapper are left out on purpose: a piece is functional and needs no gradient, so the generated
`call(list of tensors)` is all there is to run.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import RLock, Thread, get_ident
from typing import Any

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.compat import fake_mode_with_symbols
from compile_and_serve.compiler.pieces.plan import symbolic_lengths

log = logging.getLogger(__name__)

PieceCallable = Callable[[list[Any]], Sequence[torch.Tensor]]

READY_SECONDS = 4.0  # that processes which compile kernels are waited for
MAX_TOKENS = 1 << 16  # upper bound of a symbolic length: lets generated kernels index with 32 bits

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # checked once by the caller's contract, not on every call
    "nan_asserts": False,
    "fx_graph_cache": False,  # the artifact store keeps results, under a key of its own
    "enable_auto_functionalized_v2": True,
}


class PieceCompileError(RuntimeError):
    """Inductor could not compile a piece, or made something that cannot be kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPiece:
    """run: takes the piece's inputs as a list (which it empties), gives its outputs. source: the generated module's text."""

    run: PieceCallable
    source: str


class PieceInWork:
    """A piece whose module is generated, while compilers build its kernels beside this thread."""

    def __init__(self, piece: CompiledPiece, waits: Sequence[Callable[[], None]], device: torch.device, work_dir: Path):
        self._piece, self._waits, self._device, self._work_dir = piece, waits, device, work_dir

    def result(self) -> CompiledPiece:
        """Wait for the kernels. Raises `PieceCompileError`."""
        from torch._inductor import config

        with _cache_dir(self._work_dir, self._device), config.patch(OPTIONS), _as_piece_error():
            for wait in self._waits:
                wait()
        return self._piece


def start_piece(gm: GraphModule, device: torch.device, work_dir: Path) -> PieceInWork:
    """Compile a functional piece for `device`, with its symbolic lengths anywhere in [1, MAX_TOKENS].

    gm: placeholders carry meta["example_value"]. work_dir: where Inductor leaves the files that it builds, this piece's alone.
    Raises `PieceCompileError`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    _allow_fallback_of_our_ops()
    mode, arguments = fake_arguments(gm, device)
    tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
    with (
        _cache_dir(work_dir, device), tracing, V.set_fake_mode(mode), torch.no_grad(), config.patch(OPTIONS),
        _as_piece_error(), _only_a_working_pool(), _waits_put_off() as waits,
    ):  # fmt: skip
        with mode:
            aten = make_fx(gm, decomposition_table=select_decomp_table())(*arguments)
        compiled = compile_fx_inner(aten, arguments, is_inference=True)
    if getattr(compiled, "constants", None):
        raise PieceCompileError(
            f"The piece holds constants ({', '.join(compiled.constants)}) that cannot be kept: make them buffers of the model."
        )
    piece = CompiledPiece(run=compiled.current_callable, source=compiled.source_code)
    return PieceInWork(piece, waits, device, work_dir)


def compile_piece(gm: GraphModule, device: torch.device, work_dir: Path) -> CompiledPiece:
    """`start_piece`, to the end."""
    return start_piece(gm, device, work_dir).result()


def import_inductor() -> None:
    """Import what `start_piece` will need: a second that may lie where the caller waits for something else anyway."""
    import torch._inductor.compile_fx
    import torch._inductor.decomposition
    import torch._inductor.lowering  # noqa: F401


@contextmanager
def prepared(device: torch.device, work_dir: Path) -> Iterator[Callable[[], None]]:
    """Inductor is imported, and what takes seconds in processes of their own goes on beside the block; yields a function that waits for it.

    For a CPU that is finding out which instruction set its kernels are for (work_dir: gets the test libraries; where they lie beside a
    piece's kernels, loading it builds none again). For a GPU it is starting the processes that compile kernels. They are for what is
    compiled inside the block; as long as they are not there, Inductor compiles by itself.
    """
    if device.type == "cuda":
        with _kernel_compilers() as wait:
            import_inductor()
            yield wait
        return
    import_inductor()
    if device.type != "cpu":
        yield lambda: None
        return

    def find() -> None:
        with _cache_dir(work_dir, device):
            _try_one_instruction_set()

    with ThreadPoolExecutor(1, thread_name_prefix="instruction-set") as threads:
        yield threads.submit(find).result


def load_pieces(sources: Mapping[str, str], device: torch.device, work_dir: Path) -> dict[str, CompiledPiece]:
    """Load pieces from their generated modules' text; kernels are taken from `work_dir` where they are there, else built again.

    sources: by fingerprint, as the result. device: what they were compiled for. work_dir: may have been moved or copied here.
    """
    from torch._inductor import config

    loaded = {}
    _find_kernels_here(work_dir)
    with _cache_dir(work_dir, device), config.patch({**OPTIONS, "compile_threads": 1}):
        if device.type == "cpu":
            _try_one_instruction_set()
        for piece, source in sources.items():
            module = types.ModuleType(f"compiled_piece_{piece}")
            module.__file__ = str(work_dir / f"{piece}.py")
            exec(compile(source, module.__file__, "exec"), module.__dict__)
            loaded[piece] = CompiledPiece(run=module.call, source=source)
    return loaded


def _find_kernels_here(work_dir: Path) -> None:
    """Triton lists the files of a kernel by their absolute paths, and builds a kernel again whose files are not where its list says."""
    for listed in work_dir.glob("triton/*/__grp__*.json"):
        names = json.loads(listed.read_text())["child_paths"]
        listed.write_text(json.dumps({"child_paths": {name: str(listed.parent / name) for name in names}}))


def fake_arguments(gm: GraphModule, device: torch.device) -> tuple[Any, list[Any]]:
    """(fake mode, fakes on `device` of the piece's inputs), with one fresh symbol for each of its symbolic lengths."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    names = symbolic_lengths(gm)
    mode, symbols = fake_mode_with_symbols(names, dict.fromkeys(names, MAX_TOKENS))

    def concrete(size: Any) -> Any:
        return symbols[str(size)] if isinstance(size, torch.SymInt) else size

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return concrete(value)
        assert value.is_contiguous(), "a strided tensor crosses a split point"
        return torch.empty([concrete(size) for size in value.shape], dtype=value.dtype, device=device)

    with mode:
        return mode, [fake(value) for value in values]


@contextmanager
def _as_piece_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PieceCompileError(f"Inductor could not compile a piece: {type(error).__name__}: {error}") from error


@contextmanager
def _waits_put_off() -> Iterator[list[Callable[[], None]]]:
    """A module that this thread generates in the block leaves waiting for its kernels, which it would end with, to the functions
    collected here.
    """
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels

    waits: list[Callable[[], None]] = []
    wait, thread = AsyncCompile.wait, get_ident()
    CompiledTritonKernels.cache_clear()  # a kernel that another piece still waits for would lie in that one's folder alone

    def put_off(compiles: AsyncCompile, scope: dict[str, Any]) -> None:
        if get_ident() == thread:
            waits.append(partial(wait, compiles, scope))
        else:  # somebody else's module
            wait(compiles, scope)

    AsyncCompile.wait = put_off
    try:
        yield waits
    finally:
        AsyncCompile.wait = wait


_compilers: Any = None  # Inductor's pool of processes, while it is ours


@contextmanager
def _kernel_compilers() -> Iterator[Callable[[], None]]:
    """Inductor's processes that compile Triton kernels, from their start on, which takes seconds, until the block has ended. Yields a
    function that waits for them, but no longer than it takes to compile a kernel or two without them.

    A pool that is there already stays.
    """
    global _compilers
    from torch._inductor import async_compile

    compile_here = async_compile.AsyncCompile
    if compile_here.process_pool.cache_info().currsize or async_compile.get_compile_threads() <= 1:
        yield lambda: None
        return
    _name_ptxas()  # they have the environment that they begin with
    with _bytecode_named():
        compile_here.use_process_pool()
    _compilers = compile_here.process_pool()

    def wait() -> None:
        with suppress(Exception):  # said by `_only_a_working_pool`
            compile_here._ready_future.result(READY_SECONDS)

    try:
        yield wait
    finally:
        pool, _compilers = _compilers, None
        # Inductor forgets it first: whoever compiles next starts another.
        compile_here._ready_future = None
        compile_here.process_pool.cache_clear()
        async_compile._pool_set.discard(pool)
        Thread(target=pool.shutdown, name="close-compilers").start()


@contextmanager
def _bytecode_named() -> Iterator[None]:
    """Processes that start in the block take torch's bytecode from where this one keeps it, instead of compiling all of torch again."""
    name = "PYTHONPYCACHEPREFIX"
    if sys.pycache_prefix is None or name in os.environ:
        yield
        return
    os.environ[name] = sys.pycache_prefix
    try:
        yield
    finally:
        del os.environ[name]


def end_kernel_compilers() -> None:
    """End the processes that compile kernels, whatever they do; for a process that leaves by `os._exit`, which does so before."""
    if _compilers is None:
        return
    with suppress(OSError):
        first = _compilers.process.pid
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for process in (first, *map(int, children)):  # the first first: it would start the others anew
            os.kill(process, signal.SIGKILL)


@contextmanager
def _only_a_working_pool() -> Iterator[None]:
    """Inside, Inductor compiles by itself where its processes could not be started, which is said once."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    ready = AsyncCompile._ready_future
    reason = ready.exception() if ready is not None and ready.done() and not ready.cancelled() else None
    if reason is None:
        yield
        return
    _warn_no_pool(f"{type(reason).__name__}: {reason}".splitlines()[0])
    with config.patch({"compile_threads": 1}):
        yield


@cache
def _warn_no_pool(reason: str) -> None:
    log.warning("Inductor's processes that compile kernels do not run, kernels compile one after another: %s", reason)


def _name_ptxas() -> None:
    """Inductor names one of its own where none is named, in this process or in those that compile for it, and leaves it so: what was
    assembled by it this time and by another the next would be built again.
    """
    import triton

    os.environ.setdefault("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas.path)


def _allow_fallback_of_our_ops() -> None:
    """Without this, Inductor's note about each op that it does not lower prints the whole graph (minutes on a deep one)."""
    from torch._inductor import lowering

    from compile_and_serve.custom_ops.library import OPS

    for name in OPS:
        lowering.FALLBACK_ALLOW_LIST.add(name)


def _try_one_instruction_set() -> None:
    """Leave on Inductor's list the best instruction set that works: it uses that one, but would try them all.

    A trial builds and loads a test library and takes as long as a kernel; a CPU with AVX-512 has 7.
    """
    from torch._inductor import cpu_vec_isa

    candidates = cpu_vec_isa.supported_vec_isa_list
    if len(candidates) == 1 or platform.machine() != "x86_64" or "ATEN_CPU_CAPABILITY" in os.environ:
        return
    present = cpu_vec_isa.x86_isa_checker()
    works = (isa for isa in candidates if all(flag in present for flag in str(isa).split()) and isa)
    candidates[:] = [best] if (best := next(works, None)) else []


_one_cache_dir = RLock()  # at a time, the process over


@contextmanager
def _cache_dir(path: Path, device: torch.device) -> Iterator[None]:
    """Inductor keeps its files in `path`, kernels of Triton included, while the block runs; other threads' blocks wait for its end."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with _one_cache_dir:
        path.mkdir(parents=True, exist_ok=True)
        if device.type != "cuda":
            with temporary_cache_dir(str(path)):
                yield
        else:
            with _triton_cache_dir(path), temporary_cache_dir(str(path)):
                yield


@contextmanager
def _triton_cache_dir(path: Path) -> Iterator[None]:
    import triton

    _name_ptxas()
    # Inductor sets this variable where it is not set, and leaves it so: kernels of a later piece, and our own, would go to a folder that
    # is gone at the next start. So it is always set.
    outside = os.environ.get("TRITON_CACHE_DIR") or triton.knobs.cache.dir
    os.environ["TRITON_CACHE_DIR"] = str(path / "triton")
    try:
        yield
    finally:
        os.environ["TRITON_CACHE_DIR"] = outside
