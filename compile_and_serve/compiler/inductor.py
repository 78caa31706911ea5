"""Compiles pieces with Inductor and loads compiled pieces.

Inductor turns the FX graph of a piece into a Python module (`source`) and builds that module's kernels. The artifact store
keeps the source and the built files, so that a later start loads them without tracing or lowering.
AOTAutograd's cache and run-time wrapper are not used: a piece is functional and needs no gradient, so calling the
module's `call(list of tensors)` is enough.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import RLock, Thread, get_ident
from typing import Any

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.built_kernels import (
    BuiltKernels,
    has_all_files,
    scope_with_kernels,
    show_data_pointers,
    without_unused_imports,
)
from compile_and_serve.compiler.compat import LinearsOfRows, fake_mode_with_symbols
from compile_and_serve.compiler.fusion import fusion_of
from compile_and_serve.compiler.pieces.plan import symbolic_lengths
from compile_and_serve.compiler.pieces.splitter import is_contiguous
from compile_and_serve.custom_ops.platform import platform_of

log = logging.getLogger(__name__)

PieceCallable = Callable[[list[Any]], Sequence[torch.Tensor]]

POOL_START_SECONDS = 4.0  # longest wait for the processes that compile kernels
MAX_TOKENS = 1 << 16  # upper bound of a symbolic length, so that generated kernels can index with 32 bits

OPTIONS: dict[str, Any] = {
    "size_asserts": False,  # the caller guarantees the sizes
    "nan_asserts": False,
    "fx_graph_cache": False,  # the artifact store does this, with its own keys
    "enable_auto_functionalized_v2": True,
}


class PieceCompileError(RuntimeError):
    """Inductor could not compile a piece, or its result cannot be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPiece:
    """A piece that can be called.

    run: takes the inputs as a list, which it empties, and returns the outputs. source: text of the generated module.
    """

    run: PieceCallable
    source: str


class PendingPiece:
    """A piece whose module is generated and whose kernels are still being built by other processes."""

    def __init__(self, piece: CompiledPiece, waits: Sequence[Callable[[], None]], device: torch.device, work_dir: Path):
        self._piece, self._waits, self._device, self._work_dir = piece, waits, device, work_dir

    def result(self) -> CompiledPiece:
        """Wait until the kernels are built. Raises `PieceCompileError`."""
        from torch._inductor import config

        with _cache_dir(self._work_dir, self._device), config.patch(OPTIONS), _as_piece_error():
            for wait in self._waits:
                wait()
        return self._piece


def start_piece(gm: GraphModule, device: torch.device, work_dir: Path) -> PendingPiece:
    """Generate the module of a functional piece for `device` and start building its kernels.

    gm: each placeholder has meta["example_value"]; symbolic lengths may be anything in [1, MAX_TOKENS].
    work_dir: where Inductor writes its files; used by this piece only.
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
        _cache_dir(work_dir, device),
        tracing,
        V.set_fake_mode(mode),
        torch.no_grad(),
        config.patch(OPTIONS),
        _as_piece_error(),
        _without_broken_pool(),
        fusion_of(gm) if platform_of(device).runs_triton_kernels else nullcontext(),
        _deferred_kernel_waits() as waits,
    ):
        with mode:
            aten = make_fx(LinearsOfRows(gm).run, decomposition_table=select_decomp_table())(*arguments)
            _read_lengths(aten, arguments)
        compiled = compile_fx_inner(aten, arguments, is_inference=True)
    if getattr(compiled, "constants", None):
        raise PieceCompileError(
            f"The piece contains constants ({', '.join(compiled.constants)}), which cannot be stored: make them buffers of the model."
        )
    piece = CompiledPiece(run=compiled.current_callable, source=compiled.source_code)
    return PendingPiece(piece, waits, device, work_dir)


def compile_piece(gm: GraphModule, device: torch.device, work_dir: Path) -> CompiledPiece:
    """Compile a piece and wait for its kernels; arguments and errors are those of `start_piece`."""
    return start_piece(gm, device, work_dir).result()


def import_inductor() -> None:
    """Import what `start_piece` needs. Takes about a second, which a caller may spend while it waits for something else."""
    for name in ("compile_fx", "decomposition", "lowering"):
        importlib.import_module(f"torch._inductor.{name}")
    # Inductor sets this variable when it loads its first kernel, while other threads start compilers. Adding a variable moves
    # the environment, and a program that is being started may fail with "Bad address". So the variable is added here.
    show_data_pointers()


@contextmanager
def start_inductor(device: torch.device, work_dir: Path) -> Iterator[Callable[[], None]]:
    """Import Inductor and start its slow preparations, which run in parallel with the block. Yields a function that waits for them.

    On a CPU, they find the instruction set for which kernels are built. `work_dir` receives the libraries that test it;
    copied beside a piece's kernels, they need not be built again when the piece is loaded.
    On a GPU, they start the processes that compile kernels. These end with the block. Until they are there, Inductor compiles in
    this process.
    """
    platform_here = platform_of(device)
    if platform_here.runs_triton_kernels:
        import triton

        # Sets the present folder. Blocks for single pieces then only replace variables: see `import_inductor`.
        with _triton_cache_dir(Path(triton.knobs.cache.dir)), _kernel_compilers() as wait:
            import_inductor()
            yield wait
        return
    import_inductor()
    if not platform_here.runs_cpp_kernels:
        yield lambda: None
        return

    def select() -> None:
        with _cache_dir(work_dir, device):
            _select_instruction_set()

    with ThreadPoolExecutor(1, thread_name_prefix="instruction-set") as threads:
        yield threads.submit(select).result


def load_pieces(
    sources: Mapping[str, str], device: torch.device, work_dir: Path, built: Mapping[str, BuiltKernels] | None = None
) -> dict[str, CompiledPiece]:
    """Load pieces from the text of their generated modules. Kernels that are missing in `work_dir` are rebuilt.

    sources: by the piece's name, like the result. device: the one that they were compiled for. work_dir: may be a moved copy.
    built: `built_kernels` of the pieces. Inductor is not imported for those without an obstacle.
    """
    loaded, obstacles = dict[str, PieceCallable](), list[str]()
    for piece in sources:
        kernels = (built or {}).get(piece)
        if kernels is None:
            obstacles.append("nothing is stored of its kernels")
        elif kernels["obstacle"] is not None:
            obstacles.append(kernels["obstacle"])
        elif not has_all_files(kernels, work_dir):
            obstacles.append("a file of its kernels is missing")
        else:
            scope = scope_with_kernels(kernels, device, work_dir)
            loaded[piece] = _load_piece(piece, without_unused_imports(sources[piece], given=scope), work_dir, scope)
    if obstacles:
        log.info("Inductor loads %d of %d pieces, which takes seconds; the first because %s.", len(obstacles), len(sources), obstacles[0])
        loaded |= _load_with_inductor({piece: sources[piece] for piece in sources if piece not in loaded}, device, work_dir)
    return {piece: CompiledPiece(run=loaded[piece], source=source) for piece, source in sources.items()}


def _load_piece(piece: str, source: str, work_dir: Path, scope: Mapping[str, Any]) -> PieceCallable:
    module = types.ModuleType(f"compiled_piece_{piece}")
    module.__file__ = str(work_dir / f"{piece}.py")
    module.__dict__.update(scope)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module.call


def _load_with_inductor(sources: Mapping[str, str], device: torch.device, work_dir: Path) -> dict[str, PieceCallable]:
    from torch._inductor import config

    _relocate_triton_kernels(work_dir)
    with _cache_dir(work_dir, device), config.patch({**OPTIONS, "compile_threads": 1}):
        if platform_of(device).runs_cpp_kernels:
            _select_instruction_set()
        return {piece: _load_piece(piece, without_unused_imports(source), work_dir, {}) for piece, source in sources.items()}


def _relocate_triton_kernels(work_dir: Path) -> None:
    """Correct the absolute paths in Triton's lists of files: it rebuilds a kernel whose files are not at the listed paths."""
    for group in work_dir.glob("triton/*/__grp__*.json"):
        names = json.loads(group.read_text())["child_paths"]
        group.write_text(json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))


def fake_arguments(gm: GraphModule, device: torch.device) -> tuple[Any, list[Any]]:
    """A fake mode, and fake inputs of the piece on `device`. Each symbolic length is a fresh symbol."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    names = symbolic_lengths(gm)
    mode, symbols = fake_mode_with_symbols(names, dict.fromkeys(names, MAX_TOKENS))

    def concrete(size: Any) -> Any:
        return symbols[str(size)] if isinstance(size, torch.SymInt) else size

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return concrete(value)
        assert is_contiguous(value), "a strided tensor crosses a split point"
        return torch.empty([concrete(size) for size in value.shape], dtype=value.dtype, device=device)

    with mode:
        return mode, [fake(value) for value in values]


def _read_lengths(aten: GraphModule, arguments: Sequence[Any]) -> None:
    """Read each symbolic length from an input, at the start of the graph.

    From torch 2.15, generated code defines only the lengths that the graph reads. The check keeps a read from being removed as
    unused; Inductor generates no code for it.
    """
    placeholders = aten.graph.find_nodes(op="placeholder")
    known = {str(value) for value in arguments if isinstance(value, torch.SymInt)}
    with aten.graph.inserting_before(next(node for node in aten.graph.nodes if node.op != "placeholder")):
        for placeholder, value in zip(placeholders, arguments, strict=True):
            for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and str(size) not in known:
                    known.add(str(size))
                    length = aten.graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
                    length.meta["val"] = size
                    aten.graph.call_function(torch.ops.aten.sym_constrain_range.default, (length,), {"min": 1})


@contextmanager
def _as_piece_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PieceCompileError(f"Inductor could not compile a piece: {type(error).__name__}: {error}") from error


@contextmanager
def _deferred_kernel_waits() -> Iterator[list[Callable[[], None]]]:
    """Modules that this thread generates in the block do not wait for their kernels. The yielded list collects the waits instead."""
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels

    waits: list[Callable[[], None]] = []
    wait, thread = AsyncCompile.wait, get_ident()
    CompiledTritonKernels.cache_clear()  # else a kernel that pieces share would be in the folder of only one of them

    def defer(compiles: AsyncCompile, scope: dict[str, Any]) -> None:
        if get_ident() == thread:
            waits.append(partial(wait, compiles, scope))
        else:
            wait(compiles, scope)

    AsyncCompile.wait = defer
    try:
        yield waits
    finally:
        AsyncCompile.wait = wait


_compilers: Any = None  # Inductor's pool of processes, if `_kernel_compilers` started it


@contextmanager
def _kernel_compilers() -> Iterator[Callable[[], None]]:
    """Start Inductor's processes that compile Triton kernels, and end them after the block. A pool that already runs is kept.

    Starting takes seconds. Yields a function that waits for it for at most `POOL_START_SECONDS`: compiling a kernel or two without
    the pool takes as long.
    """
    global _compilers
    from torch._inductor import async_compile

    compile_here = async_compile.AsyncCompile
    if compile_here.process_pool.cache_info().currsize or async_compile.get_compile_threads() <= 1:
        yield lambda: None
        return
    with _triton_ptxas(), _inherited_bytecode_folder():
        compile_here.use_process_pool()
    _compilers = compile_here.process_pool()

    def wait() -> None:
        with suppress(Exception):  # `_without_broken_pool` logs it
            compile_here._ready_future.result(POOL_START_SECONDS)

    try:
        yield wait
    finally:
        pool, _compilers = _compilers, None
        # Before the shutdown, so that a compilation at the same time starts a new pool.
        compile_here._ready_future = None
        compile_here.process_pool.cache_clear()
        async_compile._pool_set.discard(pool)
        Thread(target=pool.shutdown, name="close-compilers").start()


@contextmanager
def _inherited_bytecode_folder() -> Iterator[None]:
    """Processes that start in the block use this process's bytecode folder, instead of compiling all of torch to bytecode again.

    Inductor passes nothing to them but the environment, so the variable is set for the length of the block.
    """
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
    """Kill the processes that compile kernels. A process that leaves by `os._exit` must call this first."""
    if _compilers is None:
        return
    with suppress(OSError):
        parent = _compilers.process.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for process in (parent, *map(int, children)):  # the parent first: it would replace its children
            os.kill(process, signal.SIGKILL)


@contextmanager
def _without_broken_pool() -> Iterator[None]:
    """In the block, Inductor compiles in this process if its processes could not be started. The reason is logged once."""
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
    log.warning("Inductor's compile processes could not be started; kernels are compiled one after another: %s", reason)


@contextmanager
def _triton_ptxas() -> Iterator[None]:
    """In the block, Inductor and the processes that it starts assemble with Triton's ptxas.

    Without a choice, Inductor takes the ptxas of torch's folder, if there is one, and sets it for the whole process. Kernels
    assembled by the other ptxas at the next start would not be found in the cache.
    """
    import triton

    with triton.knobs.nvidia.scope():  # restores the knobs and their environment variables
        triton.knobs.nvidia.ptxas = triton.knobs.nvidia.ptxas.path
        yield


def _allow_fallback_of_our_ops() -> None:
    """Without this, Inductor logs the whole graph for each op that it does not lower, which takes minutes for a deep graph."""
    from torch._inductor import lowering

    from compile_and_serve.custom_ops.library import OPS

    for name in OPS:
        lowering.FALLBACK_ALLOW_LIST.add(name)


def _select_instruction_set() -> None:
    """Reduce Inductor's list of instruction sets to the best one that works.

    Inductor uses that one, but tests all of them first. A test builds and loads a library, which takes as long as building a
    kernel; a CPU with AVX-512 has 7 sets.
    """
    from torch._inductor import cpu_vec_isa

    candidates = cpu_vec_isa.supported_vec_isa_list
    if len(candidates) == 1 or platform.machine() != "x86_64" or "ATEN_CPU_CAPABILITY" in os.environ:
        return
    present = cpu_vec_isa.x86_isa_checker()
    works = (isa for isa in candidates if all(flag in present for flag in str(isa).split()) and isa)
    candidates[:] = [best] if (best := next(works, None)) else []


_cache_dir_lock = RLock()  # the folder is a setting of the whole process


@contextmanager
def _cache_dir(path: Path, device: torch.device) -> Iterator[None]:
    """In the block, Inductor and Triton write their files into `path`. Blocks of other threads wait until it has ended."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with _cache_dir_lock:
        path.mkdir(parents=True, exist_ok=True)
        triton_dirs = _triton_cache_dir(path / "triton") if platform_of(device).runs_triton_kernels else nullcontext()
        with triton_dirs, temporary_cache_dir(str(path)):
            yield


@contextmanager
def _triton_cache_dir(path: Path) -> Iterator[None]:
    """In the block, Triton keeps its kernels in `path`.

    Where no folder is set, Inductor would set one of its own for the whole process, which our other kernels would use as well.
    """
    import triton

    with _triton_ptxas(), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(path)
        yield
