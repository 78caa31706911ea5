"""`Worker`: one rank. A device, the model's part that it holds, its KV cache, and the runner of its steps.

Its life, with the file to read for each part:
- Build (`__init__`): join the ranks, read, compile and load the model (loaded_model.py); on a GPU also compile our kernels (warm_up.py)
  and plan the memory (memory.py). `start`: once the ranks agree on a number of KV blocks, allocate the cache and warm up. Each stage is
  reported with its time.
- `launch`: a step (model_runner.py), which replays CUDA graphs where it can (cuda_graphs.py).
- `idle`: what remains of the warm-up (warm_up.py).
- `sleep` and `wake_up`: free the memory and bring it back (sleeping_weights.py).

All ranks of a stage make the same calls of the model in the same order: a sharded model waits in each for the other ranks.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pieces.trace import start_trace, stop_trace
from compile_and_serve.compiler.reports.dump import add_to_report
from compile_and_serve.custom_ops.jit.cpu_kernels import build_cpu_kernels
from compile_and_serve.custom_ops.jit.triton_launch import prepare_cache_key
from compile_and_serve.custom_ops.mesh import DATA, EXPERT
from compile_and_serve.custom_ops.moe.expert_load import ExpertLoad
from compile_and_serve.custom_ops.platform import platform_of, resolve_device
from compile_and_serve.custom_ops.quantization import dtype_name
from compile_and_serve.custom_ops.tuning.tuner import tuning_off
from compile_and_serve.runtime.child_process import unfreeze_heap
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.configured import configured_connector
from compile_and_serve.runtime.connector.connector import WorkerConnector
from compile_and_serve.runtime.connector.messages import FinishedTransfers
from compile_and_serve.runtime.lora.device_adapters import DeviceAdapters
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.runner import memory
from compile_and_serve.runtime.runner.base_runner import BaseRunner
from compile_and_serve.runtime.runner.cpu_threads import CpuThreads
from compile_and_serve.runtime.runner.device import use_threads
from compile_and_serve.runtime.runner.loaded_model import join_ranks, load_model
from compile_and_serve.runtime.runner.memory import memory_for
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.padding_steps import run_padding
from compile_and_serve.runtime.runner.pending_step import PendingStep, StepWithoutTokens
from compile_and_serve.runtime.runner.spread_experts import SpreadExperts
from compile_and_serve.runtime.runner.stage_costs import StageCosts, measures_stages
from compile_and_serve.runtime.runner.state_memory import GIB, KVCacheTooSmallError
from compile_and_serve.runtime.runner.warm_up import WarmUp, graph_memory
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, WorkerStats

logger = logging.getLogger(__name__)


class Worker:
    """Built with its weights loaded; `start` gives it its cache, then it takes steps.

    Construction raises the `ValueError` family with one sentence for whatever is wrong with the model, its files or
    the options.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: Rank,
        on_stage: StageCallback,
        *,
        before_join: Callable[[], None] | None = None,
        device_is_taken: bool = False,
    ) -> None:
        """before_join: returns once the rank may join the others; until then ranks of before run. It is called before the device's memory
        is needed if it `device_is_taken`, else once the weights are loaded.
        """
        self.rank = rank
        self._on_stage = on_stage
        device = self.device = resolve_device(config.device, rank.device_index)
        platform = self.platform = platform_of(device)
        if platform.runs_triton_kernels:
            prepare_cache_key()
        num_sharing = config.num_processes if rank.num_sharing is None else rank.num_sharing
        num_threads = use_threads(config.num_threads, num_sharing)
        self._threads = CpuThreads(num_threads if platform.shares_host_memory else 1)
        if platform.runs_cpp_kernels:
            build_cpu_kernels(quantized=config.compile.quantization is not None)
        # Ranks that share more than experts choose kernels together before they compile.
        loads_first = rank.mesh.tensor == rank.mesh.pipe == 1 and (platform.shares_host_memory or not device_is_taken)
        if before_join is None or not loads_first:
            if before_join is not None:
                before_join()
            join_ranks(rank, device, on_stage)
        loaded = self.loaded = load_model(config, rank, device, on_stage)
        if before_join is not None and loads_first:
            before_join()
            join_ranks(rank, device, on_stage)
        if rank.mesh.data > 1 and rank.mesh.of_axis(EXPERT) > 1 and platform.runs_cuda_kernels:
            loaded.choose_token_exchange()
        self._graphs = loaded.graph_runners(logs=rank.index == 0)
        self._said_all_captured = False
        self._started: WarmUp | None = None  # the runner with its cache and what remains of its warm-up; None while the worker sleeps
        self._is_asleep = False
        self._stats_before_sleep = WorkerStats()
        balance = config.expert_balance
        self._expert_load: ExpertLoad | None = None
        # All ranks have the tokens of all groups, and route alike.
        if (config.expert_metrics or balance is not None) and rank.answers and not rank.coordinates[DATA]:
            read_steps = None if balance is None else max(1, balance.step_interval // 4)
            self._expert_load = ExpertLoad(device, read_steps, num_groups=rank.mesh.data)
        self._spread: SpreadExperts | None = None
        if balance is not None and isinstance(loaded.model, CompiledModel) and rank.mesh.of_axis(EXPERT) > 1:
            self._spread = SpreadExperts(loaded.model, device)
        weights = platform.used_bytes()
        if platform.runs_triton_kernels:
            start = time.perf_counter()
            count = loaded.compile_kernels(num_sharing, is_alone=rank.is_alone)
            self._stage("kernels", start, f"{count} of Triton's" if count else "compiled at an earlier start")
        self._connector: WorkerConnector | None = None
        if (connector := configured_connector(config)) is not None:
            sized = replace(config.cache, block_size=loaded.config.cache.block_size)
            self._connector = connector.worker_side(replace(config, cache=sized), rank, loaded.pages.page_bytes)
        self._start_of_cache = time.perf_counter()
        with self._counting():
            plan = self._memory_plan = None if platform.shares_host_memory else loaded.measure_memory(weights, self._graphs)
        try:
            num_pages = loaded.num_pages(platform.memory().free // num_sharing if plan is None else plan.free_for_cache)
        except KVCacheTooSmallError:
            self._say_memory(0, 0, is_mine=True)
            raise
        if plan is not None:
            loaded.facts |= {f"memory.{name}": count for name, count in asdict(plan).items()}
        loaded.facts["memory_bandwidth"] = platform.memory_bandwidth
        self.info = loaded.info(num_pages, self._graphs)
        if self._spread is not None:
            self.info.spread = self._spread.info()

    def start(self, num_blocks: int) -> None:
        """Allocate the cache of `num_blocks` blocks and run every kind of step once."""
        loaded, options = self.loaded, self.loaded.config.compile
        self._num_blocks_started = num_blocks
        cache_bytes = self._allocate_cache()
        tokens = num_blocks * loaded.config.cache.tokens_per_block
        rounded = "" if loaded.cache_dtype == loaded.dtype else f" in {dtype_name(loaded.cache_dtype)}"
        self._stage("kv cache", self._start_of_cache, f"{tokens} tokens, {cache_bytes / GIB:.2f} GiB" + rounded)

        self._say_memory(cache_bytes, tokens)
        start = time.perf_counter()
        with memory_for("warming up and capturing CUDA graphs", self.device, memory.WARMING_UP), self._counting():
            self._stage("warm up", start, self._warm_up.run())
            if measures_stages(loaded.config):
                assert isinstance(loaded.model, CompiledModel)
                StageCosts(loaded.config, self.device).measure(self.runner, loaded.model)
            if options.capture == "all":
                start = time.perf_counter()
                self._stage("capture all", start, self._finish_warm_up())
        if self._expert_load is not None and not self._expert_load.num_layers:
            logger.warning("The model has no mixture of experts: nothing is counted.")

        if options.dump_dir is not None:
            facts = {
                "attention_backend": loaded.facts["attention_backend"],
                "kv_cache_tokens": tokens,
                "kv_cache_bytes": cache_bytes,
                "kv_cache_dtype": loaded.facts["kv_cache_dtype"],
                "block_size": loaded.config.cache.tokens_per_block,
                "loaded_bytes": loaded.facts["loaded_bytes"],
                "memory": {} if self._memory_plan is None else asdict(self._memory_plan),
            }
            graphs = {} if self._graphs is None else {"sizes": self._graphs.sizes, **self._graphs.report()}
            add_to_report(options.dump_dir, "engine", facts | {"cudagraphs": graphs})

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Start a step. On the CPU it is over when this returns."""
        if scheduled.expert_moves is not None and self._spread is not None:
            self._spread.apply(scheduled.expert_moves)
        connector = self._connector
        checks = scheduled.checks
        checksums = [] if checks is None else self.runner.page_memory().checksums(checks.pages)
        differences = [] if checks is None else self.runner.differences(checks.pairs)
        if scheduled.emptied_blocks:
            self.runner.page_memory().poison(scheduled.emptied_blocks)
        if connector is not None and scheduled.transfers is not None:
            connector.start(scheduled.transfers)
        step: PendingStep = StepWithoutTokens(scheduled.step)
        if scheduled.num_scheduled_tokens or scheduled.shape is not None:
            step = self._launch(scheduled)
        if checks is not None:
            step.differences = differences
            step.checksums, step.wrong_tables = checksums, self.runner.batch.wrong_tables(checks.tables)
        if connector is not None:
            self._add_ended(connector.poll(), step)
        return step

    def result(self, step: PendingStep) -> ModelRunnerOutput:
        """Wait for a launched step, from the thread that launches: transfers that end meanwhile are told at once."""
        output = step.result()
        if self._connector is not None and self._connector.is_polled_often and not self._is_asleep:
            self._add_ended(self._connector.poll(), output)
        return output

    @staticmethod
    def _add_ended(ended: FinishedTransfers, step: PendingStep | ModelRunnerOutput) -> None:
        if not (ended.finished or ended.failed):
            return
        before = step.transfers or FinishedTransfers()
        step.transfers = FinishedTransfers(finished=before.finished + ended.finished, failed=before.failed | ended.failed)

    def _launch(self, scheduled: SchedulerOutput) -> PendingStep:
        for slot, adapter_id in scheduled.adapter_loads:
            self.adapters.place(slot, adapter_id)
        load = self._expert_load
        if load is not None:
            shape = scheduled.shape
            load.begin_step(*((scheduled.total_num_scheduled_tokens,) if shape is None else shape.group_tokens))
        with tuning_off(), self._counting(), self._threads.step():
            if scheduled.num_scheduled_tokens:
                step = self.runner.launch(scheduled)
            else:
                assert isinstance(self.runner, ModelRunner)
                assert scheduled.shape is not None
                run_padding(self.runner, scheduled.shape)
                step = StepWithoutTokens(scheduled.step)
        step.ran, step.encoding = self.runner.take_ran(), self.runner.take_encoding()
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
        stats.pending_work = self._pending_work()
        if self._graphs is not None:
            stats.graph_replays = self._graphs.stats.replays
        return stats

    def _pending_work(self) -> dict[str, int]:
        """Work that is done while the engine serves: kind → how many pieces are left."""
        return {kind: count for kind, count in self._warm_up.pending_work().items() if count}

    def sleep(self, level: int) -> None:
        """Free the KV cache, the CUDA graphs and the weights, which level 1 copies to the host and level 2 drops.

        Nothing may be in flight, and only `wake_up` may follow.
        """
        assert not self._is_asleep, "the worker sleeps already"
        start, platform = time.perf_counter(), self.platform
        platform.synchronize()
        self.close()
        before = platform.memory().free
        self._stats_before_sleep = self.stats()
        self._is_asleep = True
        self._started = self._graphs = None
        self.loaded.weights.release(keep=level == 1)
        if self._spread is not None and level == 2:
            self._spread.reset()
        unfreeze_heap()
        gc.collect()  # the runner and its graphs refer to each other
        platform.release_cached()
        if self.rank.index == 0:
            freed = (platform.memory().free - before) / GIB
            logger.info("Asleep at level %d after %.2f s: %.2f GiB freed.", level, time.perf_counter() - start, freed)

    def profile(self, folder: str) -> str:
        """Begin to record a trace, or write what was recorded to `folder`, unless it is "". → the file. Raises `ValueError`."""
        if not folder:
            start_trace()
            return ""
        self.platform.synchronize()
        return stop_trace(Path(folder), f"rank{self.rank.index}")

    def close(self) -> None:
        """Stop what is transferred to other memory, or from there."""
        if self._connector is not None:
            self._connector.close()

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Bring back parts of what `sleep` freed. Once both are back, CUDA graphs are captured again and steps can run.

        kv_cache: its content stays forgotten.
        """
        start = time.perf_counter()
        if weights:
            with memory_for("waking the weights", self.device, memory.LOADING):
                self.loaded.weights.restore()
        if kv_cache:
            self._graphs = self.loaded.graph_runners(logs=self.rank.index == 0)
            self._allocate_cache()
        if not self.loaded.weights.is_asleep and self._started is not None:
            if self._expert_load is not None:
                self._expert_load.forget_addresses()
                self._expert_load.begin_step(0)
            with memory_for("capturing CUDA graphs", self.device, memory.WARMING_UP), self._counting():
                detail = self._warm_up.run()
                self._is_asleep = False
                if self.loaded.config.compile.capture == "all":
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
    def runner(self) -> BaseRunner:
        """What runs the rank's steps."""
        return self._warm_up.runner

    @property
    def _warm_up(self) -> WarmUp:
        assert self._started is not None, "the worker has not started, or sleeps"
        return self._started

    def compile_grammar(self, grammar: str, tenant: str = "") -> Future[Any]:
        """Compile a grammar of structured output in a thread. tenant: the API key whose request it is."""
        assert isinstance(self.runner, ModelRunner), "only a model that generates follows grammars"
        return self.runner.grammars.compile(grammar, tenant)

    @property
    def adapters(self) -> DeviceAdapters:
        """The rank's LoRA adapters."""
        assert self.loaded.adapters is not None, "the engine takes no adapters"
        return self.loaded.adapters

    def _allocate_cache(self) -> int:
        """Make the runner with its cache. Returns the cache's bytes."""
        loaded, pages = self.loaded, self.loaded.pages
        cache_bytes = (self._num_blocks_started + pages.num_padding_pages) * pages.page_bytes
        with memory_for(f"allocating a KV cache of {cache_bytes / GIB:.2f} GiB", self.device, memory.KV_CACHE):
            runner = loaded.new_runner(self._num_blocks_started, self._graphs)
        if self._connector is not None:
            self._connector.bind(runner.page_memory())
        self._started = WarmUp(runner, self._graphs, loaded.dtype, is_alone=self.rank.is_alone)
        return cache_bytes

    def _say_memory(self, cache_bytes: int, cache_tokens: int, *, is_mine: bool = False) -> None:
        """is_mine: what the table explains is this rank's alone; else rank 0 speaks for all."""
        if self._memory_plan is not None and (is_mine or self.rank.index == 0):
            logger.info("%s", self._memory_plan.table(self.platform.name, cache_bytes, cache_tokens))

    def _stage(self, stage: str, start: float, detail: str) -> None:
        self._on_stage(stage, time.perf_counter() - start, detail)
