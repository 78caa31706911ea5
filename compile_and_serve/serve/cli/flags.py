"""The engine's flags, shared by every command that starts an engine. A flag that vLLM has too carries vLLM's name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Literal

import typer

from compile_and_serve.compiler.config import CaptureTime, CudaGraphMode, Quantization
from compile_and_serve.serve.cli.output import run_command
from compile_and_serve.serve.cli.server_flags import server_flags

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

LORA_PANEL = "LoRA"
MODEL_PANEL, CACHE_PANEL, SCHEDULER_PANEL, COMPILER_PANEL, PARALLEL_PANEL, DEVICE_PANEL = (
    "Model",
    "KV cache and prefix cache",
    "Scheduler",
    "Compiler",
    "Ranks and replicas",
    "Device",
)

Policy = Literal["fcfs", "priority"]
Device = Literal["auto", "cpu", "cuda"]

ModelArgument = Annotated[str, typer.Argument(help="A model folder, a .gguf file, the name smollm2-135m, or a Hugging Face Hub id.")]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Log more, and show tracebacks of errors.")]


def parse_size(text: str) -> int:
    """The number of bytes in "2G", "512MiB", "1.5GiB" or "1000000". Raises `ValueError` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"A size must be like 2G, 512MiB or a number of bytes, got {text!r}.")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def parse_counts(text: str) -> list[int]:
    """The numbers in a list such as "1,2,4". Raises `ValueError` for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"Token counts must be numbers separated by commas, got {text!r}.") from None


def engine_flags(
    *,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model on the Hugging Face Hub.", rich_help_panel=MODEL_PANEL)
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or file of a tokenizer other than the model's.", rich_help_panel=MODEL_PANEL)
    ] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(
            help="auto: bfloat16 if the device has instructions for it, else float32; float32 for a GGUF file on the CPU.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest sequence in tokens, prompt and output together. By default the model's own limit.", rich_help_panel=MODEL_PANEL
        ),
    ] = None,
    model_impl: Annotated[
        Literal["auto", "transformers"],
        typer.Option(
            help="transformers: use the transformers package's class. auto: only for models without a native implementation.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "auto",
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        typer.Option(
            help="generate: text. pooling: embeddings or class scores. auto: pooling for checkpoints that are meant for it.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "auto",
    pooling_type: Annotated[
        Literal["last", "mean", "cls"] | None,
        typer.Option(
            help="Which hidden states make an embedding: the last token's, the mean, or the first token's. By default what the "
            "checkpoint's sentence-transformers files say, else last.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    max_logprobs: Annotated[
        int,
        typer.Option(
            help="Most log-probabilities per token that a request may ask for; -1: the whole vocabulary, which takes much time and memory.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = 20,
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"],
        typer.Option(
            help="raw: before penalties, temperature and filters. processed: after them. logits: not normalized.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = "raw_logprobs",
    load_format: Annotated[
        Literal["auto", "dummy"], typer.Option(help="dummy: random weights; only the config is read.", rich_help_panel=MODEL_PANEL)
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling and of dummy weights.", rich_help_panel=MODEL_PANEL)] = 0,
    kv_cache_dtype: Annotated[
        Literal["auto", "model", "fp8", "int8"],
        typer.Option(
            help="model: the model's dtype. fp8: float8_e4m3, which doubles the tokens in the same memory. int8: with a scale for each "
            "token and head. auto: the checkpoint's choice.",
            rich_help_panel=CACHE_PANEL,
        ),
    ] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.", rich_help_panel=CACHE_PANEL)] = 16,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="Number of KV blocks, also on the CPU.", rich_help_panel=CACHE_PANEL)
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory",
            "--kv-cache-memory-bytes",
            metavar="SIZE",
            help="Memory for the KV cache, e.g. 2GiB.",
            rich_help_panel=CACHE_PANEL,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the GPU's memory that the engine may use.", rich_help_panel=CACHE_PANEL)
    ] = 0.9,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV blocks of equal prompt prefixes.", rich_help_panel=CACHE_PANEL)
    ] = True,
    max_num_seqs: Annotated[int, typer.Option(help="Maximum number of sequences per step.", rich_help_panel=SCHEDULER_PANEL)] = 256,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens per step, decodes and prefill chunks together. By default 2048 on the CPU and 8192 on CUDA.",
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = None,
    scheduling_policy: Annotated[
        Policy,
        typer.Option(
            help="fcfs: in order of arrival; requests with a priority are refused. priority: lower numbers run first.",
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = "fcfs",
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            help="Schedule a step while the previous one runs. By default on with CUDA and off on the CPU.", rich_help_panel=SCHEDULER_PANEL
        ),
    ] = None,
    max_waiting: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of waiting requests; further ones get HTTP 503. By default there is no limit.",
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = None,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            "--quantization",
            "-q",
            help="Quantize the weights of linears to 8 bits, and their activations too unless the name ends in -weight-only.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    quantization_exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Modules that --quantization leaves alone, e.g. '*.down_proj' (repeatable). By default lm_head.",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", "--eager", help="Run the model uncompiled.", rich_help_panel=COMPILER_PANEL)
    ] = False,
    user_passes: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            metavar="MODULE:CLASS",
            help="A graph pass of your own, or the name of one that an installed package declares (repeatable). "
            "Its module imports ours as compile_and_serve.compiler….",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = None,
    force_pass: Annotated[
        list[str] | None,
        typer.Option(
            help="Let this pass fuse every site, even where Inductor was measured to be faster (repeatable).",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = None,
    disable_pass: Annotated[
        list[str] | None, typer.Option(help="Skip this graph pass (repeatable).", rich_help_panel=COMPILER_PANEL)
    ] = None,
    verify_passes: Annotated[
        bool,
        typer.Option(
            "--verify-passes",
            help="Compare the graph before and after each pass in float64 on random inputs, and skip passes that are wrong.",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = False,
    profile_pieces: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…",
            help="Measure each piece in decode steps of these token counts (e.g. 1,16,64) against the device's limits.",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = None,
    dump_dir: Annotated[
        str | None,
        typer.Option(
            help="Write every stage of the compilation to this folder as readable files, for `inspect`.", rich_help_panel=COMPILER_PANEL
        ),
    ] = None,
    cudagraph_mode: Annotated[
        CudaGraphMode, typer.Option(help="Which CUDA graphs are captured.", rich_help_panel=COMPILER_PANEL)
    ] = "full_and_piecewise",
    cudagraph_capture_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Token counts for which a CUDA graph is captured.", rich_help_panel=COMPILER_PANEL)
    ] = None,
    capture: Annotated[
        CaptureTime,
        typer.Option(
            help="lazy: capture a few sizes before serving, the others when idle or due. all: capture every size first.",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = "lazy",
    cache_dir: Annotated[
        str | None, typer.Option(help="Folder of compiled artifacts. By default the user's cache.", rich_help_panel=COMPILER_PANEL)
    ] = None,
    artifact: Annotated[
        str | None,
        typer.Option(
            help="An artifact written by `compile-and-serve compile --output`. It contains code that runs: use only one that you trust.",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor store artifacts.", rich_help_panel=COMPILER_PANEL)] = False,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            help="Number of ranks that the model's tensors are sharded over, each on its own device.",
            rich_help_panel=PARALLEL_PANEL,
        ),
    ] = 1,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            "--data-parallel-size",
            "-dp",
            help="Number of replicas of the model, each with its own ranks, scheduler and KV cache (only for serve).",
            rich_help_panel=PARALLEL_PANEL,
        ),
    ] = 1,
    distributed_executor_backend: Annotated[
        Literal["mp", "ray"] | None,
        typer.Option(
            help="How ranks are started. mp: as child processes; ray: on a Ray cluster. By default mp.", rich_help_panel=PARALLEL_PANEL
        ),
    ] = None,
    disable_custom_all_reduce: Annotated[
        bool,
        typer.Option(
            "--disable-custom-all-reduce",
            help="Use NCCL for all-reduces even if the ranks can access each other's memory.",
            rich_help_panel=PARALLEL_PANEL,
        ),
    ] = False,
    enable_lora: Annotated[bool, typer.Option("--enable-lora", help="Let requests use LoRA adapters.", rich_help_panel=LORA_PANEL)] = False,
    max_loras: Annotated[int, typer.Option(help="Adapters on the device at once, that one step may mix.", rich_help_panel=LORA_PANEL)] = 4,
    max_lora_rank: Annotated[
        int, typer.Option(help="The largest rank of an adapter. Every slot has room for it.", rich_help_panel=LORA_PANEL)
    ] = 16,
    lora_experts: Annotated[
        bool,
        typer.Option(
            "--lora-experts",
            help="Let adapters change experts, too. Every slot then has room for all experts of all layers.",
            rich_help_panel=LORA_PANEL,
        ),
    ] = False,
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="Adapters kept in host memory. By default --max-loras.", rich_help_panel=LORA_PANEL)
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='Speculative decoding, as JSON with vLLM\'s keys, such as {"method": "ngram", "num_speculative_tokens": 5}.',
            rich_help_panel=SCHEDULER_PANEL,
        ),
    ] = None,
    expert_metrics: Annotated[
        bool,
        typer.Option("--expert-metrics", help="Show the tokens of each expert of each layer under /metrics.", rich_help_panel=MODEL_PANEL),
    ] = False,
    device: Annotated[Device, typer.Option(help="auto: CUDA if there is a CUDA device, else CPU.", rich_help_panel=DEVICE_PANEL)] = "auto",
    attention_backend: Annotated[
        str | None, typer.Option(help="By default the first one that supports the model and the device.", rich_help_panel=DEVICE_PANEL)
    ] = None,
    num_threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads per rank. By default OMP_NUM_THREADS, or the rank's share of the cores.", rich_help_panel=DEVICE_PANEL
        ),
    ] = None,
) -> dict[str, Any]:
    """The flags as arguments of `compile_and_serve.runtime.options.make_engine_config`."""
    return {
        "revision": revision,
        "tokenizer": tokenizer,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "model_impl": model_impl,
        "runner": runner,
        "max_logprobs": max_logprobs,
        "logprobs_mode": logprobs_mode,
        "pooling_type": pooling_type,
        "load_format": load_format,
        "seed": seed,
        "kv_cache_dtype": kv_cache_dtype,
        "block_size": block_size,
        "num_kv_blocks": num_gpu_blocks_override,
        "kv_cache_memory_bytes": None if kv_cache_memory is None else parse_size(kv_cache_memory),
        "gpu_memory_utilization": gpu_memory_utilization,
        "enable_prefix_caching": enable_prefix_caching,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "scheduling_policy": scheduling_policy,
        "async_scheduling": async_scheduling,
        "max_waiting": max_waiting,
        "enforce_eager": enforce_eager,
        "disabled_passes": disable_pass or (),
        "user_passes": user_passes or (),
        "quantization": quantization,
        "quantization_exclude": quantization_exclude or None,
        "forced_passes": force_pass or (),
        "verify_passes": verify_passes,
        "profile_tokens": () if profile_pieces is None else parse_counts(profile_pieces),
        "dump_dir": dump_dir,
        "cudagraph_mode": cudagraph_mode,
        "capture_sizes": None if cudagraph_capture_sizes is None else parse_counts(cudagraph_capture_sizes),
        "capture": capture,
        "cache_dir": cache_dir,
        "artifact_dir": artifact,
        "use_cache": not no_cache,
        "tensor_parallel_size": tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "distributed_executor_backend": distributed_executor_backend,
        "disable_custom_all_reduce": disable_custom_all_reduce,
        "enable_lora": enable_lora,
        "max_loras": max_loras,
        "max_lora_rank": max_lora_rank,
        "lora_experts": lora_experts,
        "max_cpu_loras": max_cpu_loras,
        "speculative_config": speculative_config,
        "expert_metrics": expert_metrics,
        "device": device,
        "attention_backend": attention_backend,
        "num_threads": num_threads,
    }


_FLAG_GROUPS: dict[str, Callable[..., dict[str, Any]]] = {"server_options": server_flags, "engine_options": engine_flags}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command: errors print one sentence, `--verbose` is added, and parameters named in `_FLAG_GROUPS` become their flags."""
    own = inspect.signature(function, eval_str=True)
    groups = {name: flags for name, flags in _FLAG_GROUPS.items() if name in own.parameters}
    parameters = [p for p in own.parameters.values() if p.name not in groups]
    names_of = {}
    for group, flags in groups.items():
        of_group = inspect.signature(flags, eval_str=True).parameters
        names_of[group] = [name for name in of_group if name not in own.parameters]
        parameters += [of_group[name] for name in names_of[group]]
    verbose_flag = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VerboseFlag)

    @wraps(function)
    def wrapper(verbose: bool = False, **values: Any) -> None:
        def run() -> None:
            for group, flags in groups.items():
                values[group] = flags(**{name: values.pop(name) for name in names_of[group]})
            function(**values)

        run_command(run, verbose=verbose)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    wrapper.__signature__ = own.replace(parameters=[*keyword_only, verbose_flag])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*keyword_only, verbose_flag]}
    return wrapper
