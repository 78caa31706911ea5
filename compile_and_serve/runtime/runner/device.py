"""The dtypes that the engine computes in, and its threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.models.quantization.stored_weights import checkpoint_cache_dtype
from compile_and_serve.runtime.config import EngineConfig, KVCacheDtype, StateDtype

logger = logging.getLogger(__name__)


def resolve_dtype(name: Literal["auto", "bfloat16", "float16", "float32"], device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; "auto" is bfloat16 where the device computes in it, else float32."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    return torch.bfloat16 if platform_of(device).computes_in(torch.bfloat16) else torch.float32


def model_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """`resolve_dtype` of the config's model. On the CPU, "auto" is float32 for a GGUF file that stays quantized, as in llama.cpp: its
    weights take no more memory, and rounding activations to bfloat16 changed answers of a small model for 5 to 20 % of speed.
    """
    stays_gguf = config.model.path.suffix == ".gguf" and config.compile.quantization is None
    if config.model.dtype == "auto" and stays_gguf and platform_of(device).shares_host_memory:
        return torch.float32
    return resolve_dtype(config.model.dtype, device)


def resolve_kv_cache_dtype(name: KVCacheDtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache of a model in `dtype`: "fp8" is float8_e4m3fn, "int8" is int8, others the same."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(name, dtype)


def resolve_state_dtype(name: StateDtype) -> torch.dtype | None:
    """The dtype of recurrent state; None: the model's choice."""
    dtype: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    return dtype


def with_cache_dtype(config: EngineConfig, model_config: Mapping[str, Any], device: torch.device) -> EngineConfig:
    """The config with its cache's "auto" decided: "fp8" or "int8" if the config.json asks for it and the device has kernels for it."""
    if config.cache.dtype != "auto":
        return config
    platform = platform_of(device)
    wanted = checkpoint_cache_dtype(model_config)
    if wanted == "fp8" and platform.runs_triton_kernels and not platform.computes_in(torch.float8_e4m3fn):
        logger.warning("The checkpoint is made for a float8 KV cache, which %s does not compute with.", platform.name)
        wanted = None
    if wanted == "int8" and model_config.get("kv_lora_rank"):
        logger.warning("The checkpoint is made for an int8 KV cache, which latent attention does not have.")
        wanted = None
    if wanted is not None:
        logger.info(
            "The KV cache is %s, as the checkpoint's quantization_config says (--kv-cache-dtype model: not).",
            {"fp8": "float8", "int8": "int8"}[wanted],
        )
    return replace(config, cache=replace(config.cache, dtype=wanted or "model"))


def use_threads(num_threads: int | None, num_processes: int = 1) -> int:
    """Let CPU kernels use `num_threads` threads; the number.

    None: OMP_NUM_THREADS, or else this process's part of the cores that it may run on, when `num_processes` share them.
    """
    if num_threads is None:
        variable = os.environ.get("OMP_NUM_THREADS", "")
        num_threads = int(variable) if variable.isdigit() else num_cores() // num_processes
        num_threads = max(1, num_threads)
    torch.set_num_threads(num_threads)
    return num_threads


def num_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
