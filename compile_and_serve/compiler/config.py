"""Options of the compiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import not_
from pathlib import Path
from typing import Literal

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.option_fields import Check, at_least, option, parse_counts

CudaGraphMode = Literal["none", "piecewise", "full", "full_and_piecewise"]
CaptureTime = Literal["lazy", "all"]
# Formats to which linears are quantized while the weights are loaded; see `compiler/passes/quantize_linears.py`.
Quantization = Literal["fp8", "fp8-block", "fp8-weight-only", "int8", "int8-weight-only", "int4"]

_model_option, _lora_option = partial(option, panel="Model"), partial(option, panel="LoRA")
_compiler_option, _parallel_option = partial(option, panel="Compiler"), partial(option, panel="Ranks and replicas")
_counts_option = partial(_compiler_option, flag_type=str, flag_default=None, parse=parse_counts, metavar="N,N,…")
_positive_counts: Check = (lambda counts: all(count >= 1 for count in counts), "positive token counts")


def _distinct_sorted(counts: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(counts)))


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """How a model is compiled.

    mode: "compile" captures, rewrites, splits and compiles; "eager" runs the plain module.
    forced_passes: fuse every site, without measuring whether it is faster (`compiler/artifacts/autotune.py`).
    user_passes: as `package.module:Class` or the name of an entry point (`compiler/rewrite/user_passes.py`).
    quantization: None is the checkpoint's.
    cudagraph_mode: how compiled pieces are replayed on CUDA; ignored on a CPU.
    capture_sizes: None is 1, 2, 4, then steps of 8 up to max_num_seqs.
    capture: "all" also measures every choice of kernels before serving.
    artifact_dir: it is searched before the store and never changed. It must come from someone you trust: its code runs in this process.
    dump_dir: see `compiler/reports/dump.py`. profile_tokens: see `compiler/reports/profile.py`. Both capture the model again.
    work_dir: parent of the folder with the loaded pieces' files, which lives as long as the process; None: the system's
        temporary folder.
    max_loras: 0 if the model takes no adapters.
    """

    quantization: Quantization | None = _model_option(
        None,
        "Quantize the weights of linears to 8 or 4 bits. fp8, fp8-block and int8 quantize their activations, too; fp8-weight-only, "
        "int8-weight-only and int4 do not. The name of a checkpoint's own format, such as awq or gptq, is compared with the files.",
        flags=("--quantization", "-q"),
        metavar="SCHEME",
        flag_type=str,
    )
    quantization_exclude: tuple[str, ...] | None = _model_option(
        None, "Modules that --quantization leaves alone, e.g. '*.down_proj' (repeatable). By default lm_head.", metavar="GLOB"
    )
    mode: Literal["compile", "eager"] = _compiler_option(
        "compile",
        "Run the model uncompiled.",
        name="enforce_eager",
        flags=("--enforce-eager", "--eager"),
        argument_type=bool,
        argument_default=False,
        convert=lambda eager: "eager" if eager else "compile",
    )
    user_passes: tuple[str, ...] = _compiler_option(
        (),
        "A graph pass of your own, or the name of one that an installed package declares (repeatable). "
        "Its module imports ours as compile_and_serve.compiler….",
        flags=("--pass",),
        metavar="MODULE:CLASS",
    )
    forced_passes: frozenset[str] = _compiler_option(
        frozenset(), "Let this pass fuse every site, even where Inductor was measured to be faster (repeatable).", flags=("--force-pass",)
    )
    disabled_passes: frozenset[str] = _compiler_option(frozenset(), "Skip this graph pass (repeatable).", flags=("--disable-pass",))
    verify_passes: bool = _compiler_option(
        False, "Compare the graph before and after each pass in float64 on random inputs, and skip passes that are wrong."
    )
    profile_tokens: tuple[int, ...] = _counts_option(
        (),
        "Measure each piece in decode steps of these token counts (e.g. 1,16,64) against the device's limits.",
        flags=("--profile-pieces",),
        checks=(_positive_counts,),
    )
    dump_dir: Path | None = _compiler_option(
        None, "Write every stage of the compilation to this folder as readable files, for `inspect`.", flag_type=str
    )
    cudagraph_mode: CudaGraphMode = _compiler_option("full_and_piecewise", "Which CUDA graphs are captured.")
    capture_sizes: tuple[int, ...] | None = _counts_option(
        None,
        "Token counts for which a CUDA graph is captured.",
        flags=("--cudagraph-capture-sizes",),
        convert=_distinct_sorted,
        checks=(_positive_counts, (bool, "positive token counts")),
    )
    capture: CaptureTime = _compiler_option(
        "lazy", "lazy: capture a few sizes before serving, the others when idle or due. all: capture every size first."
    )
    cache_dir: Path | None = _compiler_option(None, "Folder of compiled artifacts. By default the user's cache.", flag_type=str)
    artifact_dir: Path | None = _compiler_option(
        None,
        "An artifact written by `compile-and-serve compile --output`. It contains code that runs: use only one that you trust.",
        flags=("--artifact",),
        flag_type=str,
    )
    use_cache: bool = _compiler_option(True, "Neither read nor store artifacts.", flags=("--no-cache",), flag_default=False, parse=not_)
    work_dir: Path | None = None
    tensor_parallel_size: int = _parallel_option(
        1,
        "Number of ranks that the model's tensors are sharded over, each on its own device.",
        flags=("--tensor-parallel-size", "-tp"),
        checks=(at_least(1),),
    )
    pipeline_parallel_size: int = _parallel_option(
        1,
        "Number of stages of layers, each on its own ranks, that a step runs through one after another.",
        flags=("--pipeline-parallel-size", "-pp"),
        checks=(at_least(1),),
    )
    pipeline_parallel_layers: tuple[int, ...] | None = _parallel_option(
        None,
        "Number of layers of each stage, separated by commas. By default the stages take about as long.",
        flag_type=str,
        flag_default=None,
        parse=parse_counts,
        metavar="N,N,…",
    )
    enable_expert_parallel: bool = _parallel_option(
        False, "Give each rank whole experts of its own, instead of a share of every expert.", flags=("--enable-expert-parallel", "-ep")
    )
    data_parallel_attention_size: int = _parallel_option(1, None, checks=(at_least(1),))
    num_redundant_experts: int = _parallel_option(
        0, "With --enable-expert-parallel: slots of a layer beyond one for each expert, for copies of busy experts.", checks=(at_least(0),)
    )
    max_loras: int = _lora_option(0, "Adapters on the device at once, that one step may mix.", argument_default=4, checks=(at_least(1),))
    max_lora_rank: int = _lora_option(16, "The largest rank of an adapter. Every slot has room for it.", checks=(at_least(1),))
    lora_experts: bool = _lora_option(False, "Let adapters change experts, too. Every slot then has room for all experts of all layers.")

    @property
    def mesh(self) -> Mesh:
        """The ranks that hold the model."""
        return Mesh(
            data=self.data_parallel_attention_size,
            pipe=self.pipeline_parallel_size,
            tensor=self.tensor_parallel_size,
            expert_parallel=self.enable_expert_parallel,
        )
