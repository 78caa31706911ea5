"""Options of the compiler, in one frozen place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CudaGraphMode = Literal["none", "piecewise", "full", "full_and_piecewise"]
# What linears are quantized to while weights stream in; `compiler/passes/quantize_linears.py` says what each is.
Quantization = Literal["fp8", "fp8-block", "fp8-weight-only", "int8", "int8-weight-only"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """How a model is compiled.

    mode: "compile" captures, rewrites, splits and compiles; "eager" runs the plain module.
    disabled_passes: names of passes left out.
    forced_passes: names of passes that replace whatever they can, without measuring whether it pays (`compiler/artifacts/autotune.py`).
    user_passes: passes besides our own, as `package.module:Class` or the name of an entry point (`compiler/rewrite/user_passes.py`).
    quantization: what linears are quantized to; None: as the checkpoint is.
    quantization_exclude: globs over the names of modules that are not quantized; None: what is usual for `quantization`.
    verify_passes: run the graph before and after each pass on the same random inputs and compare.
    cudagraph_mode: how compiled pieces are replayed on CUDA (ignored on the CPU).
    capture_sizes: token counts with a CUDA graph of their own; None: 1, 2, 4, then steps of 8 up to max_num_seqs.
    cache_dir: artifact store; None: the user's cache folder.
    artifact_dir: an artifact made ahead of time; tried before the store.
    dump_dir: where every stage is written to as readable files (`compiler/reports/dump.py`); the model is then captured anew.
    profile_tokens: numbers of tokens at which each piece is measured (`compiler/reports/profile.py`); the model is then captured anew.
    work_dir: where the files of loaded pieces lie as long as the process lives; None: the system's temporary folder.
    tensor_parallel_size: ranks that share the model's tensors; which of them this process is enters where weights are loaded.
    """

    mode: Literal["compile", "eager"] = "compile"
    disabled_passes: frozenset[str] = frozenset()
    forced_passes: frozenset[str] = frozenset()
    user_passes: tuple[str, ...] = ()
    quantization: Quantization | None = None
    quantization_exclude: tuple[str, ...] | None = None
    verify_passes: bool = False
    cudagraph_mode: CudaGraphMode = "full_and_piecewise"
    capture_sizes: tuple[int, ...] | None = None
    cache_dir: Path | None = None
    artifact_dir: Path | None = None
    use_cache: bool = True
    dump_dir: Path | None = None
    profile_tokens: tuple[int, ...] = ()
    work_dir: Path | None = None
    tensor_parallel_size: int = 1
