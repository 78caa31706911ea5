"""`LoadedModel`: a rank's part of the model, compiled and loaded, with its drafter and adapters. It makes the runners of its steps."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.compiler.model import CompiledModel, Model
from compile_and_serve.compiler.passes.fuse_allreduce_quantize import may_quantize
from compile_and_serve.compiler.weights.adapter_sites import adapter_sites
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.collectives.collectives import join_groups
from compile_and_serve.custom_ops.mesh import PIPE, TENSOR
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import dtype_name
from compile_and_serve.custom_ops.tuning.tuner import tuning_off
from compile_and_serve.models.pooling import build_pooling_model
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.drafting.compiled_drafter import CompiledDrafter
from compile_and_serve.runtime.lora.device_adapters import DeviceAdapters, adapter_targets
from compile_and_serve.runtime.media.prepared import PreparedItem
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.pooling.files import does_pool, with_base_class
from compile_and_serve.runtime.pooling.rerankers import with_answers
from compile_and_serve.runtime.runner import memory
from compile_and_serve.runtime.runner.attention_backends import backends_of_model
from compile_and_serve.runtime.runner.base_runner import BaseRunner
from compile_and_serve.runtime.runner.block_size import latent_decode_kernels, with_block_size
from compile_and_serve.runtime.runner.compile_drafter import build_drafter, compile_drafter
from compile_and_serve.runtime.runner.compile_models import SideModelCompiler, compile_spec, sleeping_weights
from compile_and_serve.runtime.runner.cross_encoder import CrossCaches, CrossEncoder
from compile_and_serve.runtime.runner.cuda_graphs import make_graph_runners
from compile_and_serve.runtime.runner.device import model_dtype, num_cores, resolve_kv_cache_dtype, resolve_state_dtype, with_cache_dtype
from compile_and_serve.runtime.runner.generation_files import with_generation_files
from compile_and_serve.runtime.runner.item_encoder import CrossItemEncoder, ItemEncoder, with_longest_item
from compile_and_serve.runtime.runner.media_encoder import MediaEncoder, RowEncoder, embedded_info, encoder_info, row_bytes
from compile_and_serve.runtime.runner.memory import MemoryPlan, memory_for
from compile_and_serve.runtime.runner.model_facts import (
    flat_report,
    max_model_len,
    media_info,
    pooling_info,
    prefix_caching_unsupported,
    recurrent_kernels,
)
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pooling_runner import PoolingRunner
from compile_and_serve.runtime.runner.sleeping_weights import SleepingWeights
from compile_and_serve.runtime.runner.spread_experts import check_experts
from compile_and_serve.runtime.runner.stage_costs import StageCosts, measures_stages
from compile_and_serve.runtime.runner.stage_runner import StageRunner
from compile_and_serve.runtime.runner.stages import StageLink, check_stages, spec_of_stage
from compile_and_serve.runtime.runner.state_memory import GIB, PageLayout, log_grown_pages, plan_num_pages
from compile_and_serve.runtime.runner.warm_up import compile_kernels, dummy_step, largest_step_size, run_dummy_step
from compile_and_serve.runtime.sampling.decode_step import advances_on_device
from compile_and_serve.runtime.scheduler.scheduler import PROMPT_LOGPROB_ROWS
from compile_and_serve.runtime.scheduler.step_messages import EncoderInfo, StateGroupInfo, WorkerInfo
from compile_and_serve.runtime.side_model import SideModel
from compile_and_serve.runtime.weights import load_weights, read_model_config


def join_ranks(rank: Rank, device: torch.device, on_stage: StageCallback) -> None:
    """Wait for the other ranks and form the groups; nothing where the rank is alone."""
    if not rank.is_alone:
        assert rank.rendezvous is not None
        start = time.perf_counter()
        join_groups(rank=rank.index, mesh=rank.mesh, init_method=rank.rendezvous, device=device)
        on_stage("join", time.perf_counter() - start, f"{rank.mesh.size} ranks")


@dataclass(kw_only=True)
class LoadedModel:
    """spec: the rank's part, with what passes added. dtype: of activations. backends: by attention group. weights: of the drafter and
    the encoder, too. sample_items: of an encoder that runs one item at a time. facts: for the report. stages: the other stages of the
    model; None: there are none.
    """

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_model_len: int
    spec: ModelSpec
    model: Model
    backends: dict[str, AttentionBackend]
    drafter: CompiledDrafter | None
    encoder: SideModel | None
    encoder_info: EncoderInfo | None
    sample_items: list[PreparedItem]
    adapters: DeviceAdapters | None
    weights: SleepingWeights
    facts: dict[str, int | float | str]
    stages: StageLink | None
    tensor_rank: int

    @property
    def pages(self) -> PageLayout:
        """Of the model's state, with what the drafter keeps under each page's number."""
        pages = PageLayout.of(self.spec.paged_state, self.config.cache.tokens_per_block, self.cache_dtype)
        added = 0 if self.drafter is None else self.drafter.page_bytes(pages.tokens_per_page)
        return replace(pages, page_bytes=pages.page_bytes + added)

    def choose_token_exchange(self) -> None:
        """Choose how tokens of data-parallel groups get to the experts of all ranks and back. Every rank calls it, once it has joined."""
        hidden_size = _hidden_size(self.spec)
        if self.config.parallel.disable_custom_all_reduce:
            how = "over NCCL: --disable-custom-all-reduce"
        elif hidden_size is None:
            how = "over NCCL: the model's config says no hidden_size"
        else:
            from compile_and_serve.custom_ops.collectives.tokens import map_token_memory

            max_tokens = self.config.scheduler.token_budget
            how = map_token_memory(num_features=hidden_size, dtype=self.dtype, max_tokens=max_tokens, device=self.device)
        self.facts["token_exchange"] = how

    def num_pages(self, free_bytes: int) -> int:
        """As `plan_num_pages`."""
        scheduler, shares_host_memory = self.config.scheduler, platform_of(self.device).shares_host_memory
        if shares_host_memory:  # else it is in the plan
            free_bytes -= self.row_bytes
        return plan_num_pages(
            self.config.cache,
            self.spec.paged_state,
            self.pages,
            max_model_len=self.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_step_tokens=scheduler.token_budget,
            free_bytes=free_bytes,
            shares_host_memory=shares_host_memory,
        )

    @property
    def row_bytes(self) -> int:
        """What the region for the encoder's rows takes."""
        return 0 if self.encoder_info is None or self.encoder_info.fills_items else row_bytes(self.spec, self.encoder_info)

    def graph_runners(self, *, logs: bool) -> GraphRunners | None:
        """As `make_graph_runners`."""
        drafter_backends = None if self.drafter is None else self.drafter.backends
        has_graphs = self.encoder is not None and not self.sample_items
        encoder = self.encoder.model if self.encoder is not None and has_graphs else None
        common = self.config, self.spec, self.model.plans, self.backends, drafter_backends, self.device
        return make_graph_runners(*common, encoder, self.encoder_tokens, logs=logs)

    @property
    def encoder_tokens(self) -> int:
        """Of the encoder's longest step."""
        return 0 if self.encoder_info is None else self.encoder_info.max_tokens

    def new_runner(self, num_pages: int, graphs: GraphRunners | None) -> BaseRunner:
        """A runner with a cache of its own. graphs: to capture over its buffers; None: steps run without."""
        runners = [PlainRunner(model) for model in self.model.plans] if graphs is None else graphs.runners
        common = self.config, self.spec, runners[0], self.backends, self.device, self.cache_dtype, num_pages
        limits: dict[str, Any] = {"max_model_len": self.max_model_len, "plain_steps": runners[-1], "stages": self.stages}
        if self.encoder is not None and self.encoder_info is not None:
            limits["encoder"] = self._new_encoder(self.encoder, self.encoder_info, None if graphs is None else graphs.encoder)
        runner: BaseRunner
        if self.spec.pooling is not None:
            runner = PoolingRunner(*common, **limits)
        elif self.stages is not None and not self.stages.is_last:
            runner = StageRunner(*common, drafted_steps=None if graphs is None else graphs.drafted, **limits)
        else:
            runner = ModelRunner(
                *common,
                drafted_steps=None if graphs is None else graphs.drafted,
                drafter=self.drafter,
                drafter_graphs=None if graphs is None else graphs.drafter,
                **limits,
            )
        if graphs is not None:
            runner.bind(graphs, lambda size: dummy_step(runner, size, 1))
        return runner

    def _new_encoder(self, side: SideModel, info: EncoderInfo, graphs: CudaGraphRunner | None) -> RowEncoder:
        spec, device, size = self.spec, self.device, self.config.mesh.tensor
        if self.sample_items and info.fills_items:
            caches = CrossCaches(spec, device, tensor_rank=self.tensor_rank, tensor_size=size)
            return CrossItemEncoder(side, caches, info, self.sample_items, device)
        if self.sample_items:
            return ItemEncoder(side, spec, info, self.sample_items, device)
        parts = side, graphs or PlainRunner(side.model), spec, info, device
        if info.fills_items:
            return CrossEncoder(*parts, CrossCaches(spec, device, tensor_rank=self.tensor_rank, tensor_size=size))
        return MediaEncoder(*parts)

    def compile_kernels(self, num_sharing: int, *, is_alone: bool) -> int:
        """Compile the Triton kernels of all steps; → how many. num_sharing: processes that share the cores. is_alone: there is one rank."""
        artifact = self.model.report.get("artifact_key")
        drafter = None if self.drafter is None else self.drafter.model.report.get("artifact_key")
        kind: tuple[Any, ...] = (
            self.facts["attention_backend"],
            self.cache_dtype,
            self.config.cache.tokens_per_block,
            self.max_model_len,
            self.config.scheduler.max_num_seqs,
            self.config.scheduler.token_budget,
            drafter,
        )
        if self.encoder is not None:
            kind += (self.encoder.model.report.get("artifact_key"), self.encoder_tokens)
        with memory_for("compiling kernels", self.device, memory.LARGEST_STEP):
            return compile_kernels(
                lambda: self.new_runner(1, None),  # nothing runs that a graph could be captured of
                self.dtype,
                self.device,
                threads=max(1, num_cores() // num_sharing),
                # Ranks all do it or none: the model waits for all of them.
                known_as=f"{artifact} {kind}" if artifact and is_alone else None,
            )

    def measure_memory(self, weights: int, graphs: GraphRunners | None) -> MemoryPlan:
        """Run the largest step that there can be, on a cache of one block, and look at what it takes beside the weights' bytes."""
        device, platform = self.device, platform_of(self.device)
        backends = list(self.backends.values())
        if self.drafter is not None:
            backends += self.drafter.backends.values()
        platform.reset_peak()
        probe = self.new_runner(1, graphs)
        tokens, seqs = largest_step_size(probe)
        with memory_for(f"measuring a step of {tokens} tokens", device, memory.LARGEST_STEP):
            with tuning_off(), ExitStack() as stack:
                for backend in backends:
                    stack.enter_context(backend.without_modules())
                run_dummy_step(probe, tokens, seqs)
                if probe.encoder is not None:
                    probe.encoder.run_largest()
            largest_step = platform.peak_bytes() - weights - self.row_bytes
            workspaces = (backend.pending_workspace_bytes for backend in backends)
            largest_step += max(workspaces, default=0)  # the backends share it
            if self.stages is not None:
                largest_step += self.stages.most_bytes
            graph_bytes = 0 if graphs is None else graphs.estimate_bytes(tokens, largest_step, self.encoder_tokens)
        if graphs is not None:
            graphs.bind(None)  # its buffers are the probe's
        del probe
        platform.release_cached()
        free, total, reserved = platform.memory()
        max_num_seqs = self.config.scheduler.max_num_seqs
        sampled_rows = max_num_seqs if self.config.speculative is None else max(max_num_seqs, self.config.max_drafted_rows)
        return MemoryPlan(
            total=total,
            utilization=self.config.cache.gpu_memory_utilization,
            others=max(0, total - free - reserved),
            weights=weights,
            largest_step=largest_step,
            step_tokens=tokens,
            # The sampler's float32 copies of the logits, and what the logits of prompts take.
            sampling=3 * (sampled_rows + PROMPT_LOGPROB_ROWS) * self.spec.vocab_size * 4,
            graphs=graph_bytes,
            encoder_rows=self.row_bytes,
        )

    def info(self, num_pages: int, graphs: GraphRunners | None) -> WorkerInfo:
        """What the engine is told."""
        platform, spec = platform_of(self.device), self.spec
        beside = {name: one.model.report for name, one in (("drafter", self.drafter), ("encoder", self.encoder)) if one is not None}
        inputs = spec.inputs if spec.encoder is None else (*spec.inputs, *spec.encoder.inputs)
        return WorkerInfo(
            num_blocks=num_pages,
            block_size=self.config.cache.tokens_per_block,
            page_bytes=self.pages.page_bytes,
            is_asynchronous=platform.is_asynchronous,
            has_idle_tasks=platform.replays_graphs,  # captures and measurements
            device=platform.name,
            dtype=dtype_name(self.dtype),
            max_model_len=self.max_model_len,
            vocab_size=spec.vocab_size,
            groups=[
                StateGroupInfo(
                    unit,
                    block_size=layout.tokens_per_page or layout.rows_per_page or self.config.cache.tokens_per_block,
                    window=group.kind.window,
                    pages_per_slot=layout.pages_per_slot,
                    snapshots=group.kind.snapshots,
                    rollback_tokens=group.kind.rollback_tokens,
                    max_items_pages=self.pages.columns_of_items([group]).get(group.name, 0),
                )
                for group, layout in ((group, self.pages.groups[group.name]) for group in spec.paged_state)
                if (unit := group.kind.unit) != "rows"  # none: it tells the type checker
            ],
            drafts_run_ahead=graphs is not None and graphs.drafts_run_ahead and advances_on_device(spec.inputs),
            prefix_caching_unsupported=prefix_caching_unsupported(spec),
            adapter_targets=None if self.adapters is None else dict(self.adapters.targets),
            compile_report=flat_report(self.model.report) | self.facts | flat_report(beside),
            pooling=pooling_info(self.config, spec),
            whole_prompts=spec.whole_prompts,
            length_regimes=spec.length_regimes,
            arrays=[
                *(array for one in inputs for array in one.arrays),
                *([] if self.encoder_info is None or self.encoder_info.fills_items else [embedded_info(spec)]),
            ],
            encoder=self.encoder_info,
            media=None if spec.encoder is None or spec.decoder_start else media_info(self.config.model, spec),
        )


def load_model(config: EngineConfig, rank: Rank, device: torch.device, on_stage: StageCallback) -> LoadedModel:
    """Read the config, compile the model, load the weights. Raises the `ValueError` family as `Worker` does."""
    start = time.perf_counter()
    model_config = read_model_config(config.model)
    if config.model.runner != "generate":
        model_config = with_answers(with_base_class(model_config, config.model), config.model)
    config = with_cache_dtype(config, model_config, device)
    model_config = with_generation_files(model_config, config)
    dtype = model_dtype(config, device)
    cache_dtype = resolve_kv_cache_dtype(config.cache.dtype, dtype)
    spec = (build_pooling_model if does_pool(config.model, model_config) else build_model)(
        model_config,
        dtype=dtype,
        model_impl=config.model.model_impl,
        requantize=config.compile.quantization is not None,
        code_folder=config.model.code_folder,
    )
    state_dtype = resolve_state_dtype(config.cache.state_dtype)
    if state_dtype is not None:
        spec = replace(spec, state=tuple(group.with_state_dtype(state_dtype) for group in spec.state))
    config = with_block_size(config, spec.paged_state, device, dtype, cache_dtype)
    max_len = max_model_len(config, spec)
    limits = config.scheduler.for_device(
        is_asynchronous=platform_of(device).is_asynchronous, longest_whole_prompt=max_len if spec.whole_prompts else None
    )
    config = replace(config, scheduler=limits)
    spec, sample_items = with_longest_item(spec, config.model)
    info = encoder_info(spec, config)
    check_stages(spec, rank.mesh)
    stages = None if rank.mesh.pipe == 1 else StageLink(platform_of(device), config.max_steps_in_flight)
    drafter = build_drafter(config, spec, dtype)
    spec = spec if drafter is None else drafter.target
    backends = backends_of_model(spec, config, device, dtype)
    backend_names = ", ".join(dict.fromkeys(backend.name for backend in backends.values())) or "none"
    architecture = (spec.config.get("architectures") or ["?"])[0]
    on_stage("read", time.perf_counter() - start, f"{architecture}, {dtype_name(dtype)} on {platform_of(device).name}")
    facts: dict[str, int | float | str] = {"attention_backend": backend_names}
    if rank.mesh.tensor > 1 and platform_of(device).runs_cuda_kernels:
        facts["all_reduce"] = _choose_allreduce(config, spec, device, dtype, on_stage)

    with memory_for("compiling the model", device, memory.LOADING):
        stage = None if stages is None else rank.coordinates[PIPE]
        costs = StageCosts(config, device).seconds if measures_stages(config) else None
        model = compile_spec(spec, config, backends, device=device, dtype=dtype, on_stage=on_stage, stage=stage, stage_seconds=costs)
        check_experts(model, rank.mesh)
    if len(model.state) > len(spec.state):  # passes added some
        backends = backends_of_model(replace(spec, state=tuple(model.state)), config, device, dtype)
    whole = spec
    spec = replace(spec, inputs=tuple(model.inputs), state=tuple(model.state))
    if stages is not None:
        assert isinstance(model, CompiledModel)
        spec = spec_of_stage(spec, model.sources_of_others, is_last=stages.is_last)
        drafter = drafter if stages.is_last else None

    log_grown_pages(spec.paged_state, config.cache.tokens_per_block, cache_dtype)
    facts |= recurrent_kernels(spec, device)
    facts |= latent_decode_kernels(config, spec.paged_state, backends, device, dtype, cache_dtype)

    start = time.perf_counter()
    with memory_for("loading the weights", device, memory.LOADING):
        load_all = partial(
            load_weights,
            model,
            spec,
            config.model.path,
            load_format=config.model.load_format,
            device=device,
            dtype=dtype,
            seed=config.model.seed,
            coordinates=rank.coordinates,
            merge_lora=config.model.merge_lora,
            fold_cache_scales=config.cache.dtype == "fp8" and not config.compile.max_loras,
        )
        loaded = load_all()
    on_stage("load", time.perf_counter() - start, f"{loaded.num_tensors} tensors, {loaded.num_bytes / GIB:.2f} GiB")
    beside = SideModelCompiler(config=config, device=device, dtype=dtype, on_stage=on_stage, coordinates=rank.coordinates)
    compiled_drafter = None
    if drafter is not None:
        with memory_for("loading the drafter", device, memory.LOADING):
            compiled_drafter = compile_drafter(beside, drafter)
            compiled_drafter.load()
    encoder = None
    if spec.encoder is not None:
        with memory_for("loading the encoder", device, memory.LOADING):
            encoder = beside.compile(spec.encoder, "encoder", config.model.path)
            encoder.load()
    return LoadedModel(
        config=config,
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        max_model_len=max_len,
        spec=replace(spec, state=tuple(group.of_rank(rank.mesh) for group in spec.state)),
        model=model,
        backends=backends,
        drafter=compiled_drafter,
        encoder=encoder,
        encoder_info=info,
        sample_items=sample_items,
        adapters=_device_adapters(config, model, whole, rank, device, dtype) if config.compile.max_loras else None,
        weights=sleeping_weights(model, load_all, compiled_drafter, encoder),
        stages=stages,
        tensor_rank=rank.coordinates.get(TENSOR, 0),
        facts=facts | {"kv_cache_dtype": dtype_name(cache_dtype), "loaded_bytes": loaded.num_bytes},
    )


def _device_adapters(
    config: EngineConfig, model: Model, spec: ModelSpec, rank: Rank, device: torch.device, dtype: torch.dtype
) -> DeviceAdapters:
    assert isinstance(model, CompiledModel)
    sites = adapter_sites(model.plan.transforms)
    all_sites = sites if model.whole_transforms is None else adapter_sites(model.whole_transforms)
    return DeviceAdapters(
        sites,
        adapter_targets(all_sites, spec.weight_map, spec.parts),
        model.weights,
        config.compile.max_lora_rank,
        device=device,
        dtype=dtype,
        coordinates=rank.coordinates,
    )


def _choose_allreduce(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, on_stage: StageCallback) -> str:
    """How all-reduces before a norm go on the ranks' GPUs, as a sentence."""
    if config.parallel.disable_custom_all_reduce:
        return "over NCCL: --disable-custom-all-reduce"
    if "fuse_allreduce_add_rms_norm" in config.compile.disabled_passes:
        return "over NCCL: the pass fuse_allreduce_add_rms_norm is off"
    hidden_size = _hidden_size(spec)
    if hidden_size is None:
        return "over NCCL: the model's config says no hidden_size"
    from compile_and_serve.custom_ops.collectives.allreduce_choice import choose_allreduce

    start = time.perf_counter()
    how = choose_allreduce(
        num_features=hidden_size,
        dtype=dtype,
        max_rows=config.scheduler.token_budget,
        device=device,
        quantizes=may_quantize(config.compile, spec.quantized_weights),
    )
    on_stage("all-reduce", time.perf_counter() - start, how)
    return how


def _hidden_size(spec: ModelSpec) -> int | None:
    return (spec.config.get("text_config") or spec.config).get("hidden_size")
