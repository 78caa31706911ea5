"""`Worker`: one rank. A device, the model's part that it holds, its KV cache, and the runner of its steps.

Start-up, each stage reported with its time: read the config → (the compiler's stages) → load the weights → on a GPU compile
our kernels; then, once the number of KV blocks is settled (ranks agree on one), allocate the cache → warm up. All ranks go through the same
calls of the model in the same order: a sharded model waits in each for the other ranks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

from compile_and_serve.compiler import available_kernels, compile_model
from compile_and_serve.compiler.cudagraphs.graph_capture import CudaGraphs
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.compiler.model import CompiledModel, Model
from compile_and_serve.compiler.reports.dump import add_to_report
from compile_and_serve.compiler.weights.adapter_slots import adapter_sites
from compile_and_serve.custom_ops.build.cpu_kernels import load_cpu_kernels, quantized_cpu_kernel_library
from compile_and_serve.custom_ops.build.sources import PACKAGE
from compile_and_serve.custom_ops.build.triton_launch import compile_ahead
from compile_and_serve.custom_ops.collectives.collectives import (
    gather_objects,
    join_groups,
    rank_group,
)
from compile_and_serve.custom_ops.platform import platform_of, resolve_device
from compile_and_serve.custom_ops.tuning.token_ranges import token_range, token_ranges
from compile_and_serve.custom_ops.tuning.tuner import tuning_off, unmeasured_token_counts
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.lora.device_adapters import DeviceAdapters, adapter_targets
from compile_and_serve.runtime.runner import memory
from compile_and_serve.runtime.runner.attention_backends import backends_of_model, load_modules_in_background
from compile_and_serve.runtime.runner.decode_step import begin_step, end_step
from compile_and_serve.runtime.runner.device import (
    model_dtype,
    num_cores,
    resolve_kv_cache_dtype,
    use_threads,
)
from compile_and_serve.runtime.runner.memory import MemoryPlan, memory_for
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.runner.state_memory import (
    GIB,
    KVCacheTooSmallError,
    PageLayout,
    plan_num_pages,
)
from compile_and_serve.runtime.scheduler.scheduler import PROMPT_LOGPROB_ROWS
from compile_and_serve.runtime.scheduler.step_messages import PagedGroup, SchedulerOutput, WorkerInfo, WorkerStats
from compile_and_serve.runtime.weights import load_weights, read_config

logger = logging.getLogger(__name__)

StageCallback = Callable[[str, float, str], None]

CAPTURED_AT_START = 7  # full CUDA graphs; a step of another size runs in the next larger one


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
        self._cache_dtype = resolve_kv_cache_dtype(config.cache.dtype, dtype)

        if rank.size > 1:
            assert rank.rendezvous is not None
            start = time.perf_counter()
            join_groups(
                rank=rank.index, size=rank.size, init_method=rank.rendezvous, device=device,
                partitions=config.rank_groups,
            )  # fmt: skip
            self._stage("join", start, f"{rank.size} ranks")
        tensor_rank, tensor_size = (rank_group().rank, rank_group().size) if rank.size > 1 else (0, 1)

        start = time.perf_counter()
        spec = build_model(
            read_config(config.model.path), dtype=dtype, model_impl=config.model.model_impl,
            requantize=config.compile.quantization is not None,
        )  # fmt: skip
        self._max_model_len = _max_model_len(config, spec)
        backends = self._backends = backends_of_model(spec, config, device, dtype)
        self._backend_names = ", ".join(dict.fromkeys(backend.name for backend in backends.values())) or "none"
        architecture = (spec.config.get("architectures") or ["?"])[0]
        self._stage("read", start, f"{architecture}, {_dtype_name(dtype)} on {platform.name}")
        facts: dict[str, int | float | str] = {"attention_backend": self._backend_names}
        if rank.size > 1 and platform.runs_cuda_kernels:
            facts["all_reduce"] = self._choose_allreduce(spec)

        with memory_for("compiling the model", device, memory.LOADING):
            model = self._model = compile_model(
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
            backends = self._backends = backends_of_model(
                replace(spec, state=tuple(model.state)), config, device, dtype
            )
        spec = replace(spec, inputs=tuple(model.inputs), state=tuple(model.state))
        # From here on the rank's part: its share of the heads.
        self._spec = replace(spec, state=tuple(group.of_rank(tensor_size) for group in spec.state))
        self._pages = PageLayout.of(self._spec.state, config.cache.block_size, self._cache_dtype)

        start = time.perf_counter()
        with memory_for("loading the weights", device, memory.LOADING):
            self._loaded = load_weights(
                model,
                spec,
                config.model.path,
                load_format=config.model.load_format,
                device=device,
                dtype=dtype,
                seed=config.model.seed,
                rank=tensor_rank,
            )
        self._stage("load", start, f"{self._loaded.num_tensors} tensors, {self._loaded.num_bytes / GIB:.2f} GiB")

        self._adapters = self._device_adapters(model, spec, tensor_rank)
        self._graphs = self._graph_runner()
        self._said_all_captured = False
        self._to_measure: list[int] = []  # token counts to run in idle moments, the next one last
        weights = platform.used_bytes()
        if platform.runs_triton_kernels:
            with memory_for("compiling kernels", device, memory.LARGEST_STEP):
                self._compile_kernels()
        self._start_of_cache = time.perf_counter()
        self._memory_plan = None if platform.shares_host_memory else self._measure_memory(weights)
        self.info = WorkerInfo(
            num_blocks=self._num_blocks(),
            is_asynchronous=platform.is_asynchronous,
            has_idle_tasks=platform.replays_graphs,  # captures and measurements
            device=platform.name,
            dtype=_dtype_name(dtype),
            max_model_len=self._max_model_len,
            vocab_size=spec.vocab_size,
            groups=[
                PagedGroup(block_size=self._pages.tokens_per_page[group.name], window=group.window)
                for group in self._spec.state
                if group.paged
            ],
            num_draft_tokens=0 if spec.drafter is None else spec.drafter.num_tokens,
            prefix_caching_unsupported=_prefix_caching_unsupported(spec),
            adapter_targets=None if self._adapters is None else dict(self._adapters.targets),
            compile_report=_flat_report(model.report) | facts | self._memory_facts(),
        )

    def start(self, num_blocks: int) -> None:
        """Allocate the cache of `num_blocks` blocks and run every kind of step once."""
        cache = self._config.cache
        slots = self._config.scheduler.max_num_seqs + 1
        cache_bytes = num_blocks * self._pages.page_bytes + slots * self._pages.slot_bytes
        with memory_for(f"allocating a KV cache of {cache_bytes / GIB:.2f} GiB", self.device, memory.KV_CACHE):
            self.runner = self._new_runner(num_blocks)
        tokens = num_blocks * cache.block_size
        rounded = "" if self._cache_dtype == self._dtype else f" in {_dtype_name(self._cache_dtype)}"
        self._stage("kv cache", self._start_of_cache, f"{tokens} tokens, {cache_bytes / GIB:.2f} GiB" + rounded)

        self._say_memory(cache_bytes, tokens)
        start = time.perf_counter()
        with memory_for("warming up and capturing CUDA graphs", self.device, memory.WARMING_UP):
            self._stage("warm up", start, self._warm_up())
        load_modules_in_background(
            self._spec, self._backends, self._dtype, self.device
        )  # now, because it would slow the start down

        if self._config.compile.dump_dir is not None:
            facts = {
                "attention_backend": self._backend_names,
                "kv_cache_tokens": tokens,
                "kv_cache_bytes": cache_bytes,
                "kv_cache_dtype": _dtype_name(self._cache_dtype),
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
        with tuning_off():
            return self.runner.launch(scheduled)

    def idle(self) -> bool:
        """Do one piece of work that can wait (measure how linears run, capture one more graph); False when there is none. Nothing may be
        in flight. Which piece it is depends on the steps so far alone, so that ranks do the same.
        """
        if self._graphs is not None and self._graphs.capture_next():
            return True
        if self._to_measure:
            count = self._to_measure.pop()
            self._measure(count)
            if self._graphs is not None:
                self._graphs.capture_pieces_up_to(count if self._to_measure else None)
            return True
        if self._graphs is None:
            return False
        while (size := self._graphs.next_piecewise_size()) is not None:
            if size <= self.runner.max_num_tokens:  # no step is longer
                self.runner.warm_up(size, 1)
                return True
        if not self._said_all_captured and self.rank.index == 0:
            self._said_all_captured = True
            logger.info("CUDA graphs of all sizes are captured: %s.", self._graph_memory())
        return False

    def stats(self) -> WorkerStats:
        """Counters after the last launched step."""
        if self._graphs is None:
            return WorkerStats(padded_tokens=self.runner.padded_tokens)
        return WorkerStats(
            padded_tokens=self.runner.padded_tokens,
            captures_due=self.runner.captures_due,
            steps_on_device=self.runner.steps_on_device,
            graph_replays=self._graphs.stats.replays,
        )

    @property
    def adapters(self) -> DeviceAdapters:
        """The rank's LoRA adapters."""
        assert self._adapters is not None, "the engine takes no adapters"
        return self._adapters

    def _device_adapters(self, model: Model, spec: ModelSpec, rank: int) -> DeviceAdapters | None:
        options = self._config.compile
        if not options.max_loras:
            return None
        assert isinstance(model, CompiledModel)
        sites = adapter_sites(model.plan.transforms)
        return DeviceAdapters(
            sites, adapter_targets(sites, spec.weight_map), model.weights, options.max_lora_rank,
            device=self.device, dtype=self._dtype, rank=rank,
        )  # fmt: skip

    def _graph_runner(self) -> CudaGraphRunner | None:
        options = self._config.compile
        if not self.platform.replays_graphs or options.mode == "eager" or options.cudagraph_mode == "none":
            return None
        return CudaGraphRunner(
            self._model,
            mode=options.cudagraph_mode,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            backends=tuple(self._backends.values()),
            device=CudaGraphs(self.device),
            sizes=options.capture_sizes,
            query_len=1 if self._spec.drafter is None else 1 + self._spec.drafter.num_tokens,
            decode_head=begin_step,
            decode_tail=end_step,
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
        )
        self._stage("all-reduce", start, how)
        return how

    def _new_runner(self, num_blocks: int, *, captures: bool = True) -> ModelRunner:
        graphs = self._graphs if captures else None
        runner = ModelRunner(
            self._config,
            self._spec,
            PlainRunner(self._model) if graphs is None else graphs,
            self._backends,
            self.device,
            self._cache_dtype,
            num_blocks,
            max_model_len=self._max_model_len,
        )
        if graphs is not None:
            graphs.bind(runner.decode_step, lambda size: runner.made_up_step(size, 1))
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
                self._pages,
                max_model_len=self._max_model_len,
                max_num_seqs=self._config.scheduler.max_num_seqs,
                max_step_tokens=self._config.scheduler.token_budget,
                free_bytes=free,
                shares_host_memory=self.platform.shares_host_memory,
            )
        except KVCacheTooSmallError:
            self._say_memory(0, 0, is_mine=True)
            raise

    def _memory_facts(self) -> dict[str, int | float | str]:
        plan = {} if self._memory_plan is None else asdict(self._memory_plan)
        return {"kv_cache_dtype": _dtype_name(self._cache_dtype)} | {f"memory.{name}": n for name, n in plan.items()}

    def _say_memory(self, cache_bytes: int, cache_tokens: int, *, is_mine: bool = False) -> None:
        """is_mine: what the table explains is this rank's alone; else rank 0 speaks for all."""
        if self._memory_plan is not None and (is_mine or self.rank.index == 0):
            logger.info("%s", self._memory_plan.table(self.platform.name, cache_bytes, cache_tokens))

    def _measure_memory(self, weights: int) -> MemoryPlan:
        """Run the largest step that there can be, on a cache of one block, and look at what it takes beside the weights' bytes."""
        device, platform, scheduler = self.device, self.platform, self._config.scheduler
        platform.reset_peak()
        probe = self._new_runner(1)
        tokens, seqs = self._largest_step(probe)
        with memory_for(f"measuring a step of {tokens} tokens", device, memory.LARGEST_STEP):
            with tuning_off(), contextlib.ExitStack() as stack:
                for backend in self._backends.values():
                    stack.enter_context(getattr(backend, "without_modules", nullcontext)())
                probe.warm_up(tokens, seqs)
            largest_step = platform.peak_bytes() - weights
            workspaces = (getattr(backend, "workspace_to_come", 0) for backend in self._backends.values())
            largest_step += max(workspaces, default=0)  # the groups' backends share it
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
            sampling=3 * (scheduler.max_num_seqs + PROMPT_LOGPROB_ROWS) * self._spec.vocab_size * 4,
            graphs=graphs,
        )

    def _largest_step(self, runner: ModelRunner) -> tuple[int, int]:
        """The most tokens of a step, and sequences that they may be of."""
        most_seqs = self._config.scheduler.max_num_seqs
        tokens = min(runner.max_num_tokens, most_seqs * self._max_model_len)  # of all sequences at their full length
        return tokens, min(most_seqs, tokens)

    def _compile_kernels(self) -> None:
        """Compile the Triton kernels of the steps before serving, many at once instead of each when it is first launched."""
        start = time.perf_counter()
        runner = self._new_runner(1, captures=False)  # nothing runs that a graph could be captured of
        tokens, seqs = self._largest_step(runner)
        many = min(tokens, 2 * token_range(seqs))  # more than decodes' kernels are for; libraries' products do run

        def steps() -> None:
            with tuning_off():
                runner.warm_up(many, seqs)
            runner.warm_up(min(8, tokens), 1)
            for count in token_ranges(seqs):
                runner.warm_up(count, count)
            runner.warm_up_sampler(self._dtype)

        artifact = self._model.report.get("artifact_key")
        block_size = self._config.cache.block_size
        kind = (self._backend_names, self._cache_dtype, block_size, self._max_model_len, seqs, many)
        count = compile_ahead(
            steps,
            self.device,
            threads=max(1, num_cores() // self._num_sharing),
            # Ranks all do it or none: the model waits for all of them.
            known_as=f"{artifact} {kind}" if artifact and self.rank.size == 1 else None,
            sources=PACKAGE / "runtime",
        )
        self._stage("kernels", start, f"{count} of Triton's" if count else "compiled at an earlier start")

    def _warm_up(self) -> str:
        runner = self.runner
        runner.warm_up(1, 1)
        runner.warm_up(min(8, runner.max_num_tokens), 1)
        # Each range of token counts once, where linears still have to find out by measuring how they run: those of decodes before their
        # graphs are captured, the others in idle moments, from few to many, and no graph of these is captured before.
        unmeasured = self._of_any_rank(unmeasured_token_counts(self.device, runner.max_num_tokens))
        most_decodes = token_range(self._config.scheduler.max_num_seqs)
        for count in unmeasured:
            if count <= most_decodes:
                self._measure(count)
        self._to_measure = [count for count in reversed(unmeasured) if count > most_decodes]
        if self._to_measure and self._graphs is not None:
            self._graphs.capture_pieces_up_to(most_decodes)
        runner.warm_up_sampler(self._dtype)
        if self._graphs is None:
            return ""
        self._graphs.capture(CAPTURED_AT_START)  # the others in idle moments, or when steps make them due
        report = self._graphs.report()
        return f"{report['full_graphs']} CUDA graphs, {report['waiting']} to come; {self._graph_memory()}"

    def _of_any_rank(self, counts: tuple[int, ...]) -> list[int]:
        """Those of all ranks, which have to make the same calls, although one may know what another does not."""
        if self.rank.size == 1:
            return list(counts)
        return sorted(set().union(*gather_objects(counts)))

    def _measure(self, num_tokens: int) -> None:
        """Run a step with about as many rows of logits as a step of so many tokens may have, so that the output head is measured too; not
        one of decodes alone, which would count as asking for its graph.
        """
        self.runner.warm_up(num_tokens, max(1, min(num_tokens - 1, self._config.scheduler.max_num_seqs)))

    def _graph_memory(self) -> str:
        assert self._graphs is not None
        stats = self._graphs.stats
        return f"estimated {stats.estimated_bytes / GIB:.2f} GiB for all, took {stats.used_bytes / GIB:.2f} GiB"

    def _stage(self, stage: str, start: float, detail: str) -> None:
        self._on_stage(stage, time.perf_counter() - start, detail)


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return spec.max_model_len
    if wanted > spec.max_model_len:
        raise ValueError(
            f"max_model_len is {wanted}, but the model's positions end at {spec.max_model_len}: lower --max-model-len."
        )
    return wanted


def _prefix_caching_unsupported(spec: ModelSpec) -> str | None:
    recurrent = ", ".join(group.name for group in spec.state if not group.paged)
    return f"the model keeps recurrent state ({recurrent}), which no other request can take up" if recurrent else None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat_report(report: dict[str, Any]) -> dict[str, int | float | str]:
    """Numbers and strings of a compile report; those of a nested dict as `outer.inner`."""
    flat: dict[str, int | float | str] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in _flat_report(value).items()}
        elif isinstance(value, (int, float, str)):
            flat[name] = value
    return flat
