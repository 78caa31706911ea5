"""Options of the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CudaGraphMode = Literal["none", "piecewise", "full", "full_and_piecewise"]
CaptureTime = Literal["lazy", "all"]
# Formats to which linears are quantized while the weights are loaded; see `compiler/passes/quantize_linears.py`.
Quantization = Literal["fp8", "fp8-block", "fp8-weight-only", "int8", "int8-weight-only"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """How a model is compiled.

    mode: "compile" captures, rewrites, splits and compiles; "eager" runs the plain module.
    disabled_passes: names of passes that are not run.
    forced_passes: names of passes that fuse every site, without measuring whether it is faster (`compiler/artifacts/autotune.py`).
    user_passes: additional passes, as `package.module:Class` or the name of an entry point (`compiler/rewrite/user_passes.py`).
    quantization: format to which linears are quantized; None: the checkpoint's.
    quantization_exclude: globs over the names of modules that are not quantized; None: the default for `quantization`.
    verify_passes: run the graph before and after each pass on the same random inputs, and compare the outputs.
    cudagraph_mode: how compiled pieces are replayed on CUDA; ignored on a CPU.
    capture_sizes: token counts for which a CUDA graph is captured; None: 1, 2, 4, then steps of 8 up to max_num_seqs.
    capture: "lazy" captures a few sizes before serving, the others in idle moments or when steps make them due; "all" captures every size,
        and measures every choice of kernels, before serving.
    cache_dir: folder of the artifact store; None: the user's cache folder.
    artifact_dir: folder with artifacts that were built ahead of time. It is searched before the store and never changed. An
        artifact contains code that runs in this process, so it must come from someone you trust.
    use_cache: False compiles without reading or writing artifacts.
    dump_dir: folder to which every stage is written as readable files (`compiler/reports/dump.py`). The model is captured again.
    profile_tokens: numbers of tokens at which each piece is measured (`compiler/reports/profile.py`). The model is captured again.
    work_dir: parent of the folder with the loaded pieces' files, which lives as long as the process; None: the system's
        temporary folder.
    tensor_parallel_size: number of ranks that share the model's tensors. All ranks have the same configuration.
    max_loras: LoRA adapters on the device at once; 0: the model takes none. max_lora_rank: the largest rank of an adapter.
    lora_experts: adapters may change experts, too; each slot then has room for all experts of all layers.
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
    capture: CaptureTime = "lazy"
    cache_dir: Path | None = None
    artifact_dir: Path | None = None
    use_cache: bool = True
    dump_dir: Path | None = None
    profile_tokens: tuple[int, ...] = ()
    work_dir: Path | None = None
    tensor_parallel_size: int = 1
    max_loras: int = 0
    max_lora_rank: int = 16
    lora_experts: bool = False
