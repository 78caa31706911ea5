"""Turns options (CLI flags or `LLM(...)` arguments) into an `EngineConfig`. No other place does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from compile_and_serve.compiler.config import CaptureTime, CompileConfig, CudaGraphMode, Quantization
from compile_and_serve.runtime.config import (
    MAX_TOKEN_BUDGET,
    CacheConfig,
    EngineConfig,
    KVCacheDtype,
    LogprobsMode,
    ModelConfig,
    ParallelConfig,
    RunnerKind,
    SchedulerConfig,
)
from compile_and_serve.runtime.drafting.config import parse_speculative_config
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.pooling_params import PoolingType


def make_engine_config(
    model: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    max_model_len: int | None = None,
    model_impl: Literal["auto", "transformers"] = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    skip_tokenizer_init: bool = False,
    seed: int = 0,
    runner: RunnerKind = "auto",
    max_logprobs: int = 20,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    pooling_type: PoolingType | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
    enable_prefix_caching: bool = True,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    async_scheduling: bool | None = None,
    max_waiting: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    attention_backend: str | None = None,
    num_threads: int | None = None,
    enforce_eager: bool = False,
    disabled_passes: Iterable[str] = (),
    user_passes: Iterable[str] = (),
    quantization: Quantization | None = None,
    quantization_exclude: Iterable[str] | None = None,
    forced_passes: Iterable[str] = (),
    verify_passes: bool = False,
    cudagraph_mode: CudaGraphMode = "full_and_piecewise",
    capture_sizes: Iterable[int] | None = None,
    capture: CaptureTime = "lazy",
    cache_dir: str | Path | None = None,
    artifact_dir: str | Path | None = None,
    use_cache: bool = True,
    dump_dir: str | Path | None = None,
    profile_tokens: Iterable[int] = (),
    tensor_parallel_size: int = 1,
    data_parallel_size: int = 1,
    distributed_executor_backend: Literal["mp", "ray"] | None = None,
    disable_custom_all_reduce: bool = False,
    enable_lora: bool = False,
    max_loras: int = 4,
    max_lora_rank: int = 16,
    lora_experts: bool = False,
    max_cpu_loras: int | None = None,
    speculative_config: Mapping[str, Any] | str | None = None,
    expert_metrics: bool = False,
) -> EngineConfig:
    """Check every option and resolve `model` (folder, .gguf file, known name or Hub id) to local files. revision: of a model on the Hub.

    The dataclasses of `config.py` describe the options. Raises `ValueError` with one sentence for an option out of range,
    and `WeightError` if `resolve_model` does not find the model.
    """
    from compile_and_serve.runtime.weights import resolve_model

    _require(bool(model), "model", "a folder, a .gguf file, a known name or a Hub id", model)
    _choice("dtype", dtype, ("auto", "bfloat16", "float16", "float32"))
    _choice("kv_cache_dtype", kv_cache_dtype, get_args(KVCacheDtype))
    _choice("model_impl", model_impl, ("auto", "transformers"))
    _choice("load_format", load_format, ("auto", "dummy"))
    _choice("logprobs_mode", logprobs_mode, get_args(LogprobsMode))
    _require(max_logprobs >= -1, "max_logprobs", "-1 (the whole vocabulary) or at least 0", max_logprobs)
    _choice("runner", runner, get_args(RunnerKind))
    if pooling_type is not None:
        _choice("pooling_type", pooling_type, get_args(PoolingType))
    _choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
    _choice("device", device, ("auto", "cpu", "cuda"))
    if distributed_executor_backend is not None:
        _choice("distributed_executor_backend", distributed_executor_backend, ("mp", "ray"))
    if quantization is not None:
        _choice("quantization", quantization, get_args(Quantization))
    _require(
        quantization_exclude is None or quantization is not None,
        "quantization_exclude",
        "given together with quantization",
        quantization_exclude,
    )
    _choice("cudagraph_mode", cudagraph_mode, ("none", "piecewise", "full", "full_and_piecewise"))
    _choice("capture", capture, get_args(CaptureTime))
    for name, value in (
        ("max_model_len", max_model_len),
        ("block_size", block_size),
        ("num_kv_blocks", num_kv_blocks),
        ("kv_cache_memory_bytes", kv_cache_memory_bytes),
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("num_threads", num_threads),
        ("tensor_parallel_size", tensor_parallel_size),
        ("data_parallel_size", data_parallel_size),
        ("max_loras", max_loras),
        ("max_lora_rank", max_lora_rank),
    ):
        _require(value is None or value >= 1, name, "at least 1", value)
    _require(
        max_num_batched_tokens is None or max_num_batched_tokens <= MAX_TOKEN_BUDGET,
        "max_num_batched_tokens",
        f"at most {MAX_TOKEN_BUDGET}",
        max_num_batched_tokens,
    )
    _require(max_waiting is None or max_waiting >= 0, "max_waiting", "at least 0", max_waiting)
    _require(0.0 < gpu_memory_utilization <= 1.0, "gpu_memory_utilization", "in (0, 1]", gpu_memory_utilization)
    if num_kv_blocks is not None and kv_cache_memory_bytes is not None:
        raise ValueError("num_kv_blocks and kv_cache_memory_bytes both set the size of the KV cache: give one of them.")
    sizes = None if capture_sizes is None else tuple(sorted(set(capture_sizes)))
    _require(sizes is None or (len(sizes) > 0 and sizes[0] >= 1), "capture_sizes", "positive token counts", sizes)
    profiled = tuple(profile_tokens)
    _require(all(count >= 1 for count in profiled), "profile_tokens", "positive token counts", profiled)
    if enforce_eager and tensor_parallel_size > 1:
        raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}, but only a compiled model can be sharded: remove enforce_eager.")
    if enable_lora and enforce_eager:
        raise ValueError("enable_lora is a pass of the compiler: remove enforce_eager.")
    if lora_experts and not enable_lora:
        raise ValueError("lora_experts lets adapters change experts: give it together with enable_lora.")
    if max_cpu_loras is not None and max_cpu_loras < max_loras:
        raise ValueError(f"max_cpu_loras is {max_cpu_loras}, but must be at least max_loras, {max_loras}.")
    if profiled and tensor_parallel_size > 1:
        raise ValueError(
            "profile_tokens runs pieces on a single rank, but with tensor_parallel_size > 1 they wait for the other ranks: "
            "set tensor_parallel_size to 1."
        )
    speculative = parse_speculative_config(speculative_config)
    return EngineConfig(
        model=ModelConfig(
            model=model,
            path=resolve_model(model, revision),
            tokenizer=tokenizer,
            dtype=dtype,
            max_model_len=max_model_len,
            model_impl=model_impl,
            load_format=load_format,
            skip_tokenizer_init=skip_tokenizer_init,
            seed=seed,
            runner=runner,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
            pooling_type=pooling_type,
        ),
        cache=CacheConfig(
            dtype=kv_cache_dtype,
            block_size=block_size,
            num_blocks=num_kv_blocks,
            memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=scheduling_policy,
            async_scheduling=async_scheduling,
            max_waiting=max_waiting,
        ),
        compile=CompileConfig(
            mode="eager" if enforce_eager else "compile",
            disabled_passes=frozenset(disabled_passes),
            user_passes=tuple(user_passes),
            quantization=quantization,
            quantization_exclude=None if quantization_exclude is None else tuple(quantization_exclude),
            forced_passes=frozenset(forced_passes),
            verify_passes=verify_passes,
            cudagraph_mode=cudagraph_mode,
            capture_sizes=sizes,
            capture=capture,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            artifact_dir=None if artifact_dir is None else Path(artifact_dir),
            use_cache=use_cache,
            dump_dir=None if dump_dir is None else Path(dump_dir),
            profile_tokens=profiled,
            tensor_parallel_size=tensor_parallel_size,
            max_loras=max_loras if enable_lora else 0,
            max_lora_rank=max_lora_rank,
            lora_experts=lora_experts,
        ),
        parallel=ParallelConfig(
            data_parallel_size=data_parallel_size,
            executor=distributed_executor_backend,
            disable_custom_all_reduce=disable_custom_all_reduce,
        ),
        device=device,
        attention_backend=attention_backend,
        num_threads=num_threads,
        max_cpu_loras=max_cpu_loras,
        speculative=speculative,
        drafter_path=None
        if speculative is None or speculative.model is None
        else resolve_model(speculative.model, with_pickled=method_of(speculative).may_be_pickled),
        expert_metrics=expert_metrics,
    )


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, name, "one of " + ", ".join(allowed), value)


def _require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {expected}, got {value!r:.200}.")
