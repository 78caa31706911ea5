"""`Worker`: one rank. A device, the model's part that it holds, its KV cache, and the runner of its steps.

Its life, with the file to read for each part:
- Build (`__init__`): read the config, compile the model, load the weights; on a GPU also compile our kernels (warm_up.py) and plan the
  memory (memory.py). `start`: once the ranks agree on a number of KV blocks, allocate the cache and warm up. Each stage is reported
  with its time.
- `launch`: a step (model_runner.py), which replays CUDA graphs where it can (cuda_graphs.py).
- `idle`: what remains of the warm-up (warm_up.py).
- `sleep` and `wake_up`: free the memory and bring it back (sleeping_weights.py).

All ranks make the same calls of the model in the same order: a sharded model waits in each for the other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from compile_and_serve.compiler import available_kernels, compile_model
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import PlainRunner
from compile_and_serve.compiler.model import CompiledModel, Model
from compile_and_serve.compiler.passes.fuse_allreduce_quantize import may_quantize
from compile_and_serve.compiler.reports.dump import add_to_report
from compile_and_serve.compiler.weights.adapter_sites import adapter_sites
from compile_and_serve.custom_ops.build.background_thread import num_running
from compile_and_serve.custom_ops.build.cpu_kernels import load_cpu_kernels, quantized_cpu_kernel_library
from compile_and_serve.custom_ops.collectives.collectives import join_groups, rank_group
from compile_and_serve.custom_ops.moe.expert_load import ExpertLoad
from compile_and_serve.custom_ops.platform import platform_of, resolve_device
from compile_and_serve.custom_ops.quantization import dtype_name
from compile_and_serve.custom_ops.tuning.tuner import tuning_off
from compile_and_serve.models.pooling import build_pooling_model
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.lora.device_adapters import DeviceAdapters, adapter_targets
from compile_and_serve.runtime.pooling_files import does_pool
from compile_and_serve.runtime.runner import memory
from compile_and_serve.runtime.runner.attention_backends import backends_of_model
from compile_and_serve.runtime.runner.base_runner import BaseRunner
from compile_and_serve.runtime.runner.cuda_graphs import make_graph_runners
from compile_and_serve.runtime.runner.decode_step import advances_on_device
from compile_and_serve.runtime.runner.device import model_dtype, num_cores, resolve_kv_cache_dtype, use_threads, with_cache_dtype
from compile_and_serve.runtime.runner.draft_model import build_drafter, compile_drafter, sleeping_weights
from compile_and_serve.runtime.runner.memory import MemoryPlan, memory_for
from compile_and_serve.runtime.runner.model_facts import flat_report, max_model_len, pooling_info, prefix_caching_unsupported
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.runner.pooling_runner import PoolingRunner
from compile_and_serve.runtime.runner.state_memory import GIB, KVCacheTooSmallError, PageLayout, plan_num_pages
from compile_and_serve.runtime.runner.warm_up import (
    WarmUp,
    compile_kernels,
    graph_memory,
    largest_step_size,
    made_up_step,
    run_made_up_step,
)
from compile_and_serve.runtime.scheduler.scheduler import PROMPT_LOGPROB_ROWS
from compile_and_serve.runtime.scheduler.step_messages import PagedGroup, SchedulerOutput, WorkerInfo, WorkerStats
from compile_and_serve.runtime.weights import load_weights, read_config

logger = logging.getLogger(__name__)

StageCallback = Callable[[str, float, str], None]


class Worker:
    """Built with its weights loaded; `start` gives it its cache, then it takes steps.

    Construction raises the `ValueError` family with one sentence for whatever is wrong with the model, its files or
    the options.
    """

    def __init__(self, config: EngineConfig, rank: Rank, on_stage: StageCallback) -> None:
        self.rank = rank
        self._on_stage = on_stage
        device = self.device = resolve_device(config.device, rank.device_index)
        platform = self.platform = platform_of(device)
        scheduler = config.scheduler.for_device(is_asynchronous=platform.is_asynchronous)
        config = self._config = replace(config, scheduler=scheduler)
        self._num_sharing = config.num_processes if rank.num_sharing is None else rank.num_sharing
        use_threads(config.num_threads, self._num_sharing)
        dtype = self._dtype = model_dtype(config, device)
        if platform.runs_cpp_kernels:
            # The longest wait of a bare machine's start: the compilers run while we import and read.
            load = quantized_cpu_kernel_library if config.compile.quantization else load_cpu_kernels
            threading.Thread(target=load, name="cpu-kernels", daemon=True).start()

        if rank.size > 1:
            assert rank.rendezvous is not None
            start = time.perf_counter()
            join_groups(rank=rank.index, size=rank.size, init_method=rank.rendezvous, device=device, partitions=config.rank_groups)
            self._stage("join", start, f"{rank.size} ranks")
        tensor_rank, tensor_size = (rank_group().rank, rank_group().size) if rank.size > 1 else (0, 1)

        start = time.perf_counter()
        model_config = read_config(config.model.path)
        config = self._config = with_cache_dtype(config, model_config, device)
        self._cache_dtype = resolve_kv_cache_dtype(config.cache.dtype, dtype)
        spec = (build_pooling_model if does_pool(config.model, model_config) else build_model)(
            model_config, dtype=dtype, model_impl=config.model.model_impl, requantize=config.compile.quantization is not None
        )
        self._max_model_len = max_model_len(config, spec)
        drafter = build_drafter(config, spec, dtype)
        spec = spec if drafter is None else drafter.target
        backends = self._backends = backends_of_model(spec, config, device, dtype)
        self._backend_names = ", ".join(dict.fromkeys(backend.name for backend in backends.values())) or "none"
        architecture = (spec.config.get("architectures") or ["?"])[0]
        self._stage("read", start, f"{architecture}, {dtype_name(dtype)} on {platform.name}")
        facts: dict[str, int | float | str] = {"attention_backend": self._backend_names}
        if rank.size > 1 and platform.runs_cuda_kernels:
            facts["all_reduce"] = self._choose_allreduce(spec)

        with memory_for("compiling the model", device, memory.LOADING):
            model = self.model = compile_model(
                spec,
                config.compile,
                device=device,
                dtype=dtype,
                kernels=available_kernels(device=device, dtype=dtype, attention_backends=backends.values()),
                attention_backends=backends,
                kv_cache_dtype=self._cache_dtype,
                on_stage=on_stage,
            )
        if len(model.state) > len(spec.state):  # passes added some
            backends = self._backends = backends_of_model(replace(spec, state=tuple(model.state)), config, device, dtype)
        spec = replace(spec, inputs=tuple(model.inputs), state=tuple(model.state))
        # From here on the rank's part: its share of the heads.
        self._spec = replace(spec, state=tuple(group.of_rank(tensor_size) for group in spec.state))
        self._pages = PageLayout.of(self._spec.state, config.cache.block_size, self._cache_dtype)

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
                rank=tensor_rank,
                fold_cache_scales=config.cache.dtype == "fp8" and not config.compile.max_loras,
            )
            self._loaded = load_all()
        self._stage("load", start, f"{self._loaded.num_tensors} tensors, {self._loaded.num_bytes / GIB:.2f} GiB")
        self._drafter = None
        if drafter is not None:
            with memory_for("loading the drafter", device, memory.LOADING):
                self._drafter = compile_drafter(
                    config, drafter, self._max_model_len, device=device, dtype=dtype, rank=tensor_rank, on_stage=on_stage
                )
                self._drafter.load()
        self._sleeping_weights = sleeping_weights(model, self._drafter, load_all)

        self._adapters = self._device_adapters(model, spec, tensor_rank)
        self._graphs = self._graph_runners()
        self._said_all_captured = False
        self._started: WarmUp | None = None  # the runner with its cache and what remains of its warm-up; None while the worker sleeps
        self._is_asleep = False
        self._stats_before_sleep = WorkerStats()
        self._expert_load = None
        if config.expert_metrics and rank.index == 0:  # all ranks route alike
            self._expert_load = ExpertLoad(device)
        weights = platform.used_bytes()
        if platform.runs_triton_kernels:
            start = time.perf_counter()
            with memory_for("compiling kernels", device, memory.LARGEST_STEP):
                count = self._compile_kernels()
            self._stage("kernels", start, f"{count} of Triton's" if count else "compiled at an earlier start")
        self._start_of_cache = time.perf_counter()
        with self._counting():
            self._memory_plan = None if platform.shares_host_memory else self._measure_memory(weights)
        self.info = WorkerInfo(
            num_blocks=self._num_blocks(),
            is_asynchronous=platform.is_asynchronous,
            has_idle_tasks=platform.replays_graphs,  # captures and measurements
            device=platform.name,
            dtype=dtype_name(dtype),
            max_model_len=self._max_model_len,
            vocab_size=spec.vocab_size,
            groups=[
                PagedGroup(block_size=self._pages.tokens_per_page[group.name], window=group.window)
                for group in self._spec.state
                if group.paged
            ],
            drafts_run_ahead=self._graphs is not None and self._graphs.drafts_run_ahead and advances_on_device(spec.inputs),
            prefix_caching_unsupported=prefix_caching_unsupported(spec),
            adapter_targets=None if self._adapters is None else dict(self._adapters.targets),
            compile_report=flat_report(model.report) | facts | self._memory_facts() | self._drafter_facts(),
            pooling=pooling_info(config, spec),
        )

    def start(self, num_blocks: int) -> None:
        """Allocate the cache of `num_blocks` blocks and run every kind of step once."""
        cache = self._config.cache
        self._num_blocks_started = num_blocks
        cache_bytes = self._allocate_cache()
        tokens = num_blocks * cache.block_size
        rounded = "" if self._cache_dtype == self._dtype else f" in {dtype_name(self._cache_dtype)}"
        self._stage("kv cache", self._start_of_cache, f"{tokens} tokens, {cache_bytes / GIB:.2f} GiB" + rounded)

        self._say_memory(cache_bytes, tokens)
        start = time.perf_counter()
        with memory_for("warming up and capturing CUDA graphs", self.device, memory.WARMING_UP), self._counting():
            self._stage("warm up", start, self._warm_up.run())
            if self._config.compile.capture == "all":
                start = time.perf_counter()
                self._stage("capture all", start, self._finish_warm_up())
        if self._expert_load is not None and not self._expert_load.num_layers:
            logger.warning("The model has no mixture of experts: --expert-metrics counts nothing.")

        if self._config.compile.dump_dir is not None:
            facts = {
                "attention_backend": self._backend_names,
                "kv_cache_tokens": tokens,
                "kv_cache_bytes": cache_bytes,
                "kv_cache_dtype": dtype_name(self._cache_dtype),
                "block_size": cache.block_size,
                "loaded_bytes": self._loaded.num_bytes,
                "memory": {} if self._memory_plan is None else asdict(self._memory_plan),
            }
            graphs = {} if self._graphs is None else {"sizes": self._graphs.sizes, **self._graphs.report()}
            add_to_report(self._config.compile.dump_dir, "engine", facts | {"cudagraphs": graphs})

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Start a step. On the CPU it is over when this returns."""
        for slot, adapter_id in scheduled.adapter_loads:
            self.adapters.place(slot, adapter_id)
        load = self._expert_load
        if load is not None:
            load.begin_step(scheduled.total_num_scheduled_tokens)
        with tuning_off(), self._counting():
            step = self.runner.launch(scheduled)
        if load is not None:
            step.expert_tokens = load.read()
        return step

    def idle(self, *, requests_wait: bool = False) -> bool:
        """Do one piece of work that can wait: measure linears or capture one more graph. Returns False if none is left.

        No step may be in flight. The piece depends only on the steps so far, so that all ranks do the same. requests_wait: see
        `WarmUp.idle`.
        """
        if self._is_asleep:
            return False
        if self._expert_load is not None:
            self._expert_load.begin_step(0)
        with self._counting():
            if self._warm_up.idle(requests_wait=requests_wait):
                return True
        if requests_wait:
            return False
        if self._graphs is not None and not self._said_all_captured and self.rank.index == 0:
            self._said_all_captured = True
            logger.info("CUDA graphs of all sizes are captured: %s.", graph_memory(self._graphs))
        return False

    def stats(self) -> WorkerStats:
        """Counters after the last launched step. They start from 0 again when the worker wakes."""
        if self._is_asleep:
            return self._stats_before_sleep
        stats = self.runner.stats()
        stats.to_come = self._to_come()
        if self._graphs is not None:
            stats.graph_replays = self._graphs.stats.replays
        return stats

    def _to_come(self) -> dict[str, int]:
        """Work that is done while the engine serves: kind → how many pieces are left."""
        pieces = self._warm_up.to_come() | {"builds": num_running()}
        return {kind: count for kind, count in pieces.items() if count}

    def sleep(self, level: int) -> None:
        """Free the KV cache, the CUDA graphs and the weights, which level 1 copies to the host and level 2 drops.

        Nothing may be in flight, and only `wake_up` may follow.
        """
        assert not self._is_asleep, "the worker sleeps already"
        start, platform = time.perf_counter(), self.platform
        platform.synchronize()
        before = platform.memory().free
        self._stats_before_sleep = self.stats()
        self._is_asleep = True
        self._started = self._graphs = None
        self._sleeping_weights.release(keep=level == 1)
        gc.unfreeze()
        gc.collect()  # the runner and its graphs refer to each other
        platform.release_cached()
        if self.rank.index == 0:
            freed = (platform.memory().free - before) / GIB
            logger.info("Asleep at level %d after %.2f s: %.2f GiB freed.", level, time.perf_counter() - start, freed)

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Bring back parts of what `sleep` freed. Once both are back, CUDA graphs are captured again and steps can run.

        kv_cache: its content stays forgotten.
        """
        start = time.perf_counter()
        if weights:
            with memory_for("waking the weights", self.device, memory.LOADING):
                self._sleeping_weights.restore()
        if kv_cache:
            self._graphs = self._graph_runners()
            self._allocate_cache()
        if not self._sleeping_weights.is_asleep and self._started is not None:
            if self._expert_load is not None:
                self._expert_load.forget_addresses()
                self._expert_load.begin_step(0)
            with memory_for("capturing CUDA graphs", self.device, memory.WARMING_UP), self._counting():
                detail = self._warm_up.run()
                self._is_asleep = False
                if self._config.compile.capture == "all":
                    detail = self._finish_warm_up()
            if self.rank.index == 0:
                logger.info("Awake after %.2f s. %s", time.perf_counter() - start, detail)

    def _finish_warm_up(self) -> str:
        """Do now what `idle` would do later. Returns what the CUDA graphs take, for the log."""
        while self.idle():
            pass
        return "" if self._graphs is None else graph_memory(self._graphs)

    def _counting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._expert_load is None else self._expert_load.counting()

    @property
    def _all_pages(self) -> PageLayout:
        """With what the drafter keeps under each page's number."""
        drafter = self._drafter
        added = 0 if drafter is None else drafter.page_bytes(self._pages.tokens_per_page)
        return replace(self._pages, page_bytes=self._pages.page_bytes + added)

    @property
    def runner(self) -> BaseRunner:
        """What runs the rank's steps."""
        return self._warm_up.runner

    def compile_grammar(self, grammar: str) -> Future[Any]:
        """Compile a grammar of structured output in a thread."""
        assert isinstance(self.runner, ModelRunner), "only a model that generates follows grammars"
        return self.runner.grammars.compile(grammar)

    @property
    def _warm_up(self) -> WarmUp:
        assert self._started is not None, "the worker has not started, or sleeps"
        return self._started

    @property
    def adapters(self) -> DeviceAdapters:
        """The rank's LoRA adapters."""
        assert self._adapters is not None, "the engine takes no adapters"
        return self._adapters

    def _allocate_cache(self) -> int:
        """Make the runner with its cache. Returns the cache's bytes."""
        slots = self._config.scheduler.max_num_seqs + 1
        cache_bytes = self._num_blocks_started * self._all_pages.page_bytes + slots * self._pages.slot_bytes
        with memory_for(f"allocating a KV cache of {cache_bytes / GIB:.2f} GiB", self.device, memory.KV_CACHE):
            self._started = WarmUp(self._new_runner(self._num_blocks_started), self._graphs, self._dtype, is_alone=self.rank.size == 1)
        return cache_bytes

    def _device_adapters(self, model: Model, spec: ModelSpec, rank: int) -> DeviceAdapters | None:
        options = self._config.compile
        if not options.max_loras:
            return None
        assert isinstance(model, CompiledModel)
        sites = adapter_sites(model.plan.transforms)
        return DeviceAdapters(
            sites,
            adapter_targets(sites, spec.weight_map, spec.parts),
            model.weights,
            options.max_lora_rank,
            device=self.device,
            dtype=self._dtype,
            rank=rank,
        )

    def _graph_runners(self) -> GraphRunners | None:
        drafter_backends = None if self._drafter is None else self._drafter.backends
        return make_graph_runners(
            self._config, self._spec, self.model.plans, self._backends, drafter_backends, self.device, logs=self.rank.index == 0
        )

    def _choose_allreduce(self, spec: ModelSpec) -> str:
        """How all-reduces before a norm go on the ranks' GPUs, as a sentence."""
        if self._config.parallel.disable_custom_all_reduce:
            return "over NCCL: --disable-custom-all-reduce"
        if "fuse_allreduce_add_rms_norm" in self._config.compile.disabled_passes:
            return "over NCCL: the pass fuse_allreduce_add_rms_norm is off"
        hidden_size = (spec.config.get("text_config") or spec.config).get("hidden_size")
        if hidden_size is None:
            return "over NCCL: the model's config says no hidden_size"
        from compile_and_serve.custom_ops.collectives.allreduce_choice import choose_allreduce

        start = time.perf_counter()
        how = choose_allreduce(
            num_features=hidden_size,
            dtype=self._dtype,
            max_rows=self._config.scheduler.token_budget,
            device=self.device,
            quantizes=may_quantize(self._config.compile, spec.quantized_weights),
        )
        self._stage("all-reduce", start, how)
        return how

    def _new_runner(self, num_blocks: int, *, captures: bool = True) -> BaseRunner:
        graphs = self._graphs if captures else None
        runners = [PlainRunner(model) for model in self.model.plans] if graphs is None else graphs.runners
        common = self._config, self._spec, runners[0], self._backends, self.device, self._cache_dtype, num_blocks
        limits: dict[str, Any] = {"max_model_len": self._max_model_len, "plain_steps": runners[-1]}
        runner: BaseRunner
        if self._spec.pooling is not None:
            runner = PoolingRunner(*common, **limits)
        else:
            runner = ModelRunner(
                *common,
                drafted_steps=None if graphs is None else graphs.drafted,
                drafter=self._drafter,
                drafter_graphs=None if graphs is None else graphs.drafter,
                **limits,
            )
        if graphs is not None:
            runner.bind(graphs, lambda size: made_up_step(runner, size, 1))
        return runner

    def _num_blocks(self) -> int:
        cache = self._config.cache
        if self.platform.shares_host_memory:
            free = self.platform.memory().free // self._num_sharing
        else:
            assert self._memory_plan is not None
            free = self._memory_plan.free_for_cache
        try:
            return plan_num_pages(
                cache,
                self._spec.state,
                self._all_pages,
                max_model_len=self._max_model_len,
                max_num_seqs=self._config.scheduler.max_num_seqs,
                max_step_tokens=self._config.scheduler.token_budget,
                free_bytes=free,
                shares_host_memory=self.platform.shares_host_memory,
            )
        except KVCacheTooSmallError:
            self._say_memory(0, 0, is_mine=True)
            raise

    def _drafter_facts(self) -> dict[str, int | float | str]:
        return {} if self._drafter is None else flat_report({"drafter": self._drafter.model.report})

    def _memory_facts(self) -> dict[str, int | float | str]:
        plan = {} if self._memory_plan is None else asdict(self._memory_plan)
        facts: dict[str, int | float | str] = {"kv_cache_dtype": dtype_name(self._cache_dtype), "loaded_bytes": self._loaded.num_bytes}
        return facts | {f"memory.{name}": n for name, n in plan.items()}

    def _say_memory(self, cache_bytes: int, cache_tokens: int, *, is_mine: bool = False) -> None:
        """is_mine: what the table explains is this rank's alone; else rank 0 speaks for all."""
        if self._memory_plan is not None and (is_mine or self.rank.index == 0):
            logger.info("%s", self._memory_plan.table(self.platform.name, cache_bytes, cache_tokens))

    def _measure_memory(self, weights: int) -> MemoryPlan:
        """Run the largest step that there can be, on a cache of one block, and look at what it takes beside the weights' bytes."""
        device, platform = self.device, self.platform
        backends = list(self._backends.values())
        if self._drafter is not None:
            backends += self._drafter.backends.values()
        platform.reset_peak()
        probe = self._new_runner(1)
        tokens, seqs = largest_step_size(probe)
        with memory_for(f"measuring a step of {tokens} tokens", device, memory.LARGEST_STEP):
            with tuning_off(), contextlib.ExitStack() as stack:
                for backend in backends:
                    stack.enter_context(backend.without_modules())
                run_made_up_step(probe, tokens, seqs)
            largest_step = platform.peak_bytes() - weights
            workspaces = (backend.pending_workspace_bytes for backend in backends)
            largest_step += max(workspaces, default=0)  # the backends share it
            graphs = 0 if self._graphs is None else self._graphs.estimate_bytes(tokens, largest_step)
        if self._graphs is not None:
            self._graphs.bind(None)  # its buffers are the probe's
        del probe
        platform.release_cached()
        free, total, reserved = platform.memory()
        return MemoryPlan(
            total=total,
            utilization=self._config.cache.gpu_memory_utilization,
            others=max(0, total - free - reserved),
            weights=weights,
            largest_step=largest_step,
            step_tokens=tokens,
            # The sampler's float32 copies of the logits, and what the logits of prompts take.
            sampling=3 * (self._max_sampled_rows() + PROMPT_LOGPROB_ROWS) * self._spec.vocab_size * 4,
            graphs=graphs,
        )

    def _max_sampled_rows(self) -> int:
        speculative, max_num_seqs = self._config.speculative, self._config.scheduler.max_num_seqs
        return max_num_seqs if speculative is None else max(max_num_seqs, self._config.max_drafted_rows)

    def _compile_kernels(self) -> int:
        artifact = self.model.report.get("artifact_key")
        drafter = None if self._drafter is None else self._drafter.model.report.get("artifact_key")
        kind = (self._backend_names, self._cache_dtype, self._config.cache.block_size, self._max_model_len, drafter)
        return compile_kernels(
            self._new_runner(1, captures=False),  # nothing runs that a graph could be captured of
            self._dtype,
            threads=max(1, num_cores() // self._num_sharing),
            # Ranks all do it or none: the model waits for all of them.
            known_as=f"{artifact} {kind}" if artifact and self.rank.size == 1 else None,
        )

    def _stage(self, stage: str, start: float, detail: str) -> None:
        self._on_stage(stage, time.perf_counter() - start, detail)
