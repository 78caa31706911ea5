"""Turns options (CLI flags or `LLM(...)` arguments) into an `EngineConfig`. No other place does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_and_serve.custom_ops.mesh import EXPERT
from compile_and_serve.option_fields import make_config, options_of, require, signature_of
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.handover.config import names_mooncake_store, parse_kv_transfer_config
from compile_and_serve.runtime.drafting.config import parse_speculative_config
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.eplb_config import ExpertBalanceConfig, parse_eplb_config
from compile_and_serve.runtime.kv_events.config import parse_kv_events_config

logger = logging.getLogger(__name__)


def make_engine_config(model: str, **options: Any) -> EngineConfig:
    """Check every option and resolve `model` (folder, .gguf file, known name or Hub id) to local files.

    The fields of `EngineConfig` and of the dataclasses in it are the options. Raises `ValueError` with one sentence for an option out
    of range, `WeightError` if `resolve_model` does not find the model, and `TypeError` for an unknown option.
    """
    from compile_and_serve.runtime.weights import resolve_model
    from compile_and_serve.runtime.weights.stored_method import names_a_format, scheme_to_apply

    for name in options.keys() - options_of(EngineConfig).keys():
        raise TypeError(f"make_engine_config() got an unexpected keyword argument {name!r}")
    require(bool(model), "model", "a folder, a .gguf file, a known name or a Hub id", model)
    quantization = options.pop("quantization", None)
    options["quantization"] = None if names_a_format(quantization) else quantization
    drafting = parse_speculative_config(options.get("speculative_config"))
    events = parse_kv_events_config(options.get("kv_events_config"))
    if names_mooncake_store(options.get("kv_transfer_config")):
        named = options.get("kv_connector")
        require(named in (None, "mooncake"), "kv_connector", "left out beside kv_transfer_config", named)
        options |= {"kv_transfer_config": None, "kv_connector": "mooncake"}
    transfer = parse_kv_transfer_config(options.get("kv_transfer_config"), num_replicas=options.get("data_parallel_size") or 1)
    parsed = {"speculative_config": drafting, "kv_events_config": events, "kv_transfer_config": transfer, **_expert_options(options)}
    config = _with_data_groups(make_config(EngineConfig, options | parsed | {"model": model, "path": Path(model)}))
    compile_config, mesh = config.compile, config.mesh
    require(
        compile_config.quantization_exclude is None or compile_config.quantization is not None,
        "quantization_exclude",
        "given together with quantization",
        options.get("quantization_exclude"),
    )
    if config.cache.num_blocks is not None and config.cache.memory_bytes is not None:
        raise ValueError("num_kv_blocks and kv_cache_memory_bytes both set the size of the KV cache: give one of them.")
    if compile_config.mode == "eager" and mesh.tensor > 1:
        raise ValueError(f"tensor_parallel_size is {mesh.tensor}, but only a compiled model can be sharded: remove enforce_eager.")
    if compile_config.mode == "eager" and mesh.pipe > 1:
        raise ValueError(f"pipeline_parallel_size is {mesh.pipe}, but only a compiled model can be cut: remove enforce_eager.")
    if config.model.merge_lora is not None and config.model.load_format == "dummy":
        raise ValueError("merge_lora changes the weights of a checkpoint, but load_format is dummy: leave one of them out.")
    if config.enable_lora and compile_config.mode == "eager":
        raise ValueError("enable_lora is a pass of the compiler: remove enforce_eager.")
    if compile_config.lora_experts and not config.enable_lora:
        raise ValueError("lora_experts lets adapters change experts: give it together with enable_lora.")
    if config.max_cpu_loras is not None and config.max_cpu_loras < compile_config.max_loras:
        raise ValueError(f"max_cpu_loras is {config.max_cpu_loras}, but must be at least max_loras, {compile_config.max_loras}.")
    if compile_config.profile_tokens and mesh.data > 1:
        raise ValueError("profile_tokens does not go with data-parallel attention, whose ranks wait for one another: leave it out.")
    if compile_config.profile_tokens and mesh.tensor > 1:
        raise ValueError(
            "profile_tokens runs pieces on a single rank, but with tensor_parallel_size > 1 they wait for the other ranks: "
            "set tensor_parallel_size to 1."
        )
    _check_experts(config)
    _check_stages(config)
    _check_hosts(config)
    _check_tiers(config)
    _check_data_groups(config)
    _check_handover(config)
    path = resolve_model(model, config.model.revision, download_dir=config.model.download_dir, with_code=config.model.trust_remote_code)
    max_loras = compile_config.max_loras if config.enable_lora else 0
    offload_dir = config.cache.offload_dir
    return replace(
        config,
        cache=replace(config.cache, offload_dir=offload_dir and offload_dir.absolute()),
        # Absolute, since ranks may run in other folders.
        model=replace(config.model, path=path, merge_lora=config.model.merge_lora and config.model.merge_lora.absolute()),
        compile=replace(compile_config, max_loras=max_loras, quantization=scheme_to_apply(quantization, path)),
        drafter_path=None
        if drafting is None or drafting.model is None
        else resolve_model(drafting.model, with_pickled=method_of(drafting).may_be_pickled, download_dir=config.model.download_dir),
    )


def _with_data_groups(config: EngineConfig) -> EngineConfig:
    """With experts spread over ranks, data_parallel_size is the number of groups of one engine, not of replicas."""
    if config.parallel.enable_elastic_ep and config.parallel.executor is None:  # also a single rank may end, so it is a process
        config = replace(config, parallel=replace(config.parallel, executor="mp"))
    size = config.parallel.data_parallel_size
    if not config.compile.enable_expert_parallel or size == 1:
        return config
    return replace(
        config,
        compile=replace(config.compile, data_parallel_attention_size=size * config.compile.data_parallel_attention_size),
        parallel=replace(config.parallel, data_parallel_size=1),
    )


def _expert_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the balance of experts: without enable_eplb there is none, and eplb_config may say the number of redundant experts."""
    balance = parse_eplb_config(options.get("eplb_config"))
    if not options.get("enable_eplb"):
        require(balance is None, "eplb_config", "given together with enable_eplb", options.get("eplb_config"))
        return {}
    balance = balance or ExpertBalanceConfig()
    return {"eplb_config": balance, "num_redundant_experts": options.get("num_redundant_experts") or balance.num_redundant_experts}


def _check_experts(config: EngineConfig) -> None:
    """Raise `ValueError` for an option that does not go with experts spread over ranks."""
    if not config.compile.enable_expert_parallel:
        if config.enable_eplb or config.compile.num_redundant_experts:
            what = "enable_eplb" if config.enable_eplb else "num_redundant_experts"
            raise ValueError(f"{what} is about experts that are spread over ranks: give it together with enable_expert_parallel.")
        return
    if config.enable_eplb and config.mesh.pipe > 1:
        raise ValueError("enable_eplb does not go with pipeline_parallel_size: only a model in one piece counts the tokens of its experts.")
    if config.compile.lora_experts:
        raise ValueError("lora_experts does not go with enable_expert_parallel, which spreads experts over ranks: leave one of them out.")
    if config.compile.mode == "eager" and config.mesh.of_axis(EXPERT) > 1:
        raise ValueError("enable_expert_parallel is a pass of the compiler: remove enforce_eager.")
    if config.mesh.of_axis(EXPERT) == 1:
        logger.info("enable_expert_parallel changes nothing: one rank has all experts.")


def _check_tiers(config: EngineConfig) -> None:
    """Raise `ValueError` for an option that the tiers of the KV cache do not go with."""
    cache = config.cache
    if cache.connector == "mooncake" and (not cache.enable_prefix_caching or config.mesh.pipe > 1 or config.enable_lora):
        raise ValueError("kv_connector mooncake does not go with enable_prefix_caching=False, pipeline_parallel_size and enable_lora.")
    if cache.offloading_bytes is None and cache.offload_dir is None:
        return
    if cache.connector is not None:
        raise ValueError("kv_connector takes the place of the tiers: leave out kv_offloading_size and kv_offload_dir.")
    if not cache.enable_prefix_caching:
        raise ValueError("kv_offloading_size and kv_offload_dir keep cached prefixes: remove enable_prefix_caching=False.")
    if config.mesh.pipe > 1:
        raise ValueError("kv_offloading_size and kv_offload_dir do not go with pipeline_parallel_size: the stages' blocks differ.")
    if cache.offload_dir is not None and config.enable_lora:
        raise ValueError("kv_offload_dir does not go with enable_lora: after a restart an adapter's number may be another one's.")


def _check_handover(config: EngineConfig) -> None:
    """Raise `ValueError` for an option that a handover between engines does not go with."""
    if config.kv_transfer is None:
        return
    cache = config.cache
    if cache.connector is not None or cache.offloading_bytes is not None or cache.offload_dir is not None:
        raise ValueError("kv_transfer_config does not go with kv_connector, kv_offloading_size and kv_offload_dir: give one of them.")
    if not cache.enable_prefix_caching:
        raise ValueError("kv_transfer_config hands cached prefixes over: remove enable_prefix_caching=False.")
    if config.mesh.pipe > 1 or config.compile.enable_expert_parallel:
        raise ValueError("kv_transfer_config does not go with pipeline_parallel_size and enable_expert_parallel: the ranks' blocks differ.")
    if config.enable_lora:
        raise ValueError("kv_transfer_config does not go with enable_lora: an adapter's number may be another one's on the other side.")


def _check_stages(config: EngineConfig) -> None:
    """Raise `ValueError` for an option that only a model in one piece has."""
    given = {"expert_metrics": config.expert_metrics, "distributed_executor_backend 'ray'": config.parallel.executor == "ray"}
    wrong = [name for name, is_given in given.items() if is_given]
    if config.mesh.pipe > 1 and wrong:
        raise ValueError(f"pipeline_parallel_size is {config.mesh.pipe}, but {wrong[0]} needs a model in one piece: leave one of them out.")


def _check_data_groups(config: EngineConfig) -> None:
    """Raise `ValueError` for an option that data-parallel attention does not go with."""
    cache, parallel, groups = config.cache, config.parallel, config.mesh.data
    given = {
        "pipeline_parallel_size": config.mesh.pipe > 1,
        "nnodes": parallel.num_hosts > 1,
        "speculative_config": config.speculative is not None,
        "kv_offloading_size, kv_offload_dir or kv_connector": bool(cache.offloading_bytes or cache.offload_dir or cache.connector),
        "runner 'pooling'": config.model.runner == "pooling",
    }
    elastic = {
        "verify_state": config.verify_state,
        "enable_lora": config.enable_lora,
        "kv_transfer_config": config.kv_transfer is not None,
        "distributed_executor_backend 'ray'": parallel.executor == "ray",
        "data_parallel_size without enable_expert_parallel": parallel.data_parallel_size > 1,
    }
    if parallel.enable_elastic_ep and (refused := [name for name, is_given in (given | elastic).items() if is_given]):
        raise ValueError(f"enable_elastic_ep does not go with {refused[0]}: leave one of them out.")
    wrong = [name for name, is_given in given.items() if is_given]
    if groups > 1 and wrong:
        raise ValueError(f"Data-parallel attention over {groups} groups of ranks does not go with {wrong[0]}: leave one of them out.")


def _check_hosts(config: EngineConfig) -> None:
    """Raise `ValueError` for options that several hosts cannot have."""
    parallel, pipe = config.parallel, config.mesh.pipe
    if parallel.num_hosts == 1:
        if parallel.host_rank:
            raise ValueError(f"node_rank is {parallel.host_rank}, but there is one host: set nnodes.")
        return
    if pipe % parallel.num_hosts:
        raise ValueError(
            f"nnodes is {parallel.num_hosts}, but pipeline_parallel_size is {pipe}: the stages are divided over the hosts, so it must be a "
            f"multiple of {parallel.num_hosts}."
        )
    if parallel.host_rank >= parallel.num_hosts:
        raise ValueError(f"node_rank is {parallel.host_rank}, but the {parallel.num_hosts} hosts have the numbers from 0.")
    if parallel.master_port > 65535:
        raise ValueError(f"master_port must be at most 65535, got {parallel.master_port}.")
    if parallel.master_key_file is None:
        raise ValueError("Several hosts need a secret that they share: give each the same master_key_file.")
    if parallel.data_parallel_size > 1 or parallel.executor == "ray":
        raise ValueError("nnodes does not go with data_parallel_size or distributed_executor_backend 'ray': leave one of them out.")


_MODEL = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str)
make_engine_config.__signature__ = signature_of(EngineConfig, _MODEL)  # type: ignore[attr-defined]
