"""Inductor: the one place that touches its private interfaces.

A piece goes in as an FX graph and comes out as Inductor's generated Python module (`source`) plus the files which that
module's kernels were built into. Both are kept; loading them again traces and lowers nothing. AOTAutograd's cache and its
run-time wrapper are left out on purpose: a piece is functional and needs no gradient, so the generated
`call(list of tensors)` is all there is to run.
"""

from __future__ import annotations

import logging
import os
import platform
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compiler.compat import fake_mode_with_symbols
from compiler.plan import symbolic_lengths

log = logging.getLogger(__name__)

PieceCallable = Callable[[list[Any]], Sequence[torch.Tensor]]

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


def compile_piece(
    gm: GraphModule, device: torch.device, work_dir: Path, lengths: Mapping[str, int] | None = None
) -> CompiledPiece:
    """Compile a functional piece for `device`, with its symbolic lengths anywhere in [1, MAX_TOKENS].

    gm: placeholders carry meta["example_value"]. work_dir: where Inductor leaves the files that it builds.
    lengths: values of symbolic lengths, by name, that the piece is compiled for alone.
    Raises `PieceCompileError`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    _allow_fallback_of_our_ops()
    mode, arguments = fake_arguments(gm, device, lengths)
    tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
    with _cache_dir(work_dir, device), tracing, V.set_fake_mode(mode), torch.no_grad(), config.patch(OPTIONS):
        try:
            with mode:
                aten = make_fx(gm, decomposition_table=select_decomp_table())(*arguments)
            compiled = compile_fx_inner(aten, arguments, is_inference=True)
        except Exception as error:
            raise PieceCompileError(f"Inductor could not compile a piece: {type(error).__name__}: {error}") from error
    if getattr(compiled, "constants", None):
        raise PieceCompileError(
            f"The piece holds constants ({', '.join(compiled.constants)}) that cannot be kept: make them buffers of the model."
        )
    return CompiledPiece(run=compiled.current_callable, source=compiled.source_code)


def import_inductor() -> None:
    """Import what `compile_piece` will need: a second that may lie where the caller waits for something else anyway."""
    import torch._inductor.compile_fx
    import torch._inductor.decomposition
    import torch._inductor.lowering  # noqa: F401


@contextmanager
def prepared(device: torch.device, work_dir: Path) -> Iterator[Callable[[], None]]:
    """Beside the block, find out which instruction set Inductor's CPU kernels are for; yields a function that waits for the answer.

    The C++ compiler takes seconds for it, in a process of its own. work_dir: gets the test libraries; where they lie beside a piece's
    kernels, loading it builds none again.
    """
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

    sources: by fingerprint, as the result. device: what they were compiled for.
    """
    from torch._inductor import config

    loaded = {}
    with _cache_dir(work_dir, device), config.patch({**OPTIONS, "compile_threads": 1}):
        if device.type == "cpu":
            _try_one_instruction_set()
        for piece, source in sources.items():
            module = types.ModuleType(f"compiled_piece_{piece}")
            module.__file__ = str(work_dir / f"{piece}.py")
            exec(compile(source, module.__file__, "exec"), module.__dict__)
            loaded[piece] = CompiledPiece(run=module.call, source=source)
    return loaded


def fake_arguments(
    gm: GraphModule, device: torch.device, lengths: Mapping[str, int] | None = None
) -> tuple[Any, list[Any]]:
    """(fake mode, fakes on `device` of the piece's inputs), with one fresh symbol for each of its symbolic lengths not in `lengths`."""
    known = lengths or {}
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    names = [name for name in symbolic_lengths(gm) if name not in known]
    mode, symbols = fake_mode_with_symbols(names, dict.fromkeys(names, MAX_TOKENS))

    def concrete(size: Any) -> Any:
        return {**symbols, **known}[str(size)] if isinstance(size, torch.SymInt) else size

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return concrete(value)
        assert value.is_contiguous(), "a strided tensor crosses a split point"
        return torch.empty([concrete(size) for size in value.shape], dtype=value.dtype, device=device)

    with mode:
        return mode, [fake(value) for value in values]


def _allow_fallback_of_our_ops() -> None:
    """Without this, Inductor's note about each op that it does not lower prints the whole graph (minutes on a deep one)."""
    from torch._inductor import lowering

    from custom_ops.library import OPS

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


@contextmanager
def _cache_dir(path: Path, device: torch.device) -> Iterator[None]:
    """Inductor keeps its files in `path`, kernels of Triton included, while the block runs."""
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    path.mkdir(parents=True, exist_ok=True)
    if device.type != "cuda":
        with temporary_cache_dir(str(path)):
            yield
        return
    import triton

    # Inductor sets these variables where they are not set, in this process or in those that compile for it, and leaves them so: kernels
    # of a later piece, and our own, would go to a folder that is gone at the next start, or be assembled by another ptxas than this time
    # and so be built again. So they are always set.
    os.environ.setdefault("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas.path)
    outside = os.environ.get("TRITON_CACHE_DIR") or triton.knobs.cache.dir
    os.environ["TRITON_CACHE_DIR"] = str(path / "triton")
    try:
        with temporary_cache_dir(str(path)):
            yield
    finally:
        os.environ["TRITON_CACHE_DIR"] = outside
