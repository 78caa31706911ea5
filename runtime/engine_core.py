"""`EngineCore`: builds everything from an `EngineConfig`, then turns requests into tokens, one `step` after the
other.

Start-up, each stage reported with its time: read the config → (the compiler's stages) → load the weights → size the
KV cache → warm up.

With async scheduling a step is launched before the result of the one before it is read, so the device never waits for
the host.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from compiler import Model, available_kernels, compile_model
from compiler.cudagraphs import CudaGraphRunner
from compiler.dump import add_to_report
from compiler.graph_capture import CudaGraphs
from custom_ops.attention import AttentionBackend
from models.registry import build_model
from models.spec import ModelSpec
from runtime.attention_backends import backend_of_model
from runtime.config import EngineConfig
from runtime.device import describe_device, resolve_device, resolve_dtype, use_threads
from runtime.executor import Executor, InProcessExecutor, StepHandle
from runtime.kv_cache import GIB, bytes_per_block, free_cpu_bytes, plan_num_blocks
from runtime.messages import EngineInfo, EngineRequest, EngineStats, RequestOutput, StepOutputs
from runtime.model_runner import ModelRunner, RunnableModel
from runtime.sampling_checks import verify_token_ids
from runtime.sampling_ops import argmax_rows
from runtime.schedule import SchedulerOutput
from runtime.scheduler import Scheduler
from runtime.weights import load_weights, read_config

logger = logging.getLogger(__name__)

StageCallback = Callable[[str, float, str], None]
UtilityValue = dict[str, int | float | str | bool | None]


CAPTURE_SECONDS = 0.5  # of start-up, for CUDA graphs
MISSES_BEFORE_CAPTURE = 4  # a capture costs several steps


def _ignore_stage(stage: str, seconds: float, detail: str) -> None: ...


class EngineCore:
    """`add_request` and `abort` at any time between steps; `step` while `has_work`.

    Construction raises the `ValueError` family with one sentence for whatever is wrong with the model, its files or
    the options.
    """

    def __init__(self, config: EngineConfig, *, on_stage: StageCallback = _ignore_stage) -> None:
        self._on_stage = on_stage
        self.device = resolve_device(config.device)
        config = self.config = replace(config, scheduler=config.scheduler.for_device(self.device.type))
        self.num_threads = use_threads(config.num_threads)
        self.dtype = resolve_dtype(config.model.dtype, self.device)

        start = time.perf_counter()
        spec = build_model(read_config(config.model.path), dtype=self.dtype)
        self.max_model_len = _max_model_len(config, spec)
        backend = backend_of_model(spec, config, self.device, self.dtype)
        architecture = (spec.config.get("architectures") or ["?"])[0]
        self._stage("read", start, f"{architecture}, {_dtype_name(self.dtype)} on {describe_device(self.device)}")

        model = compile_model(
            spec,
            config.compile,
            device=self.device,
            dtype=self.dtype,
            kernels=available_kernels(device=self.device, dtype=self.dtype, attention_backend=backend),
            attention_backend=backend,
            on_stage=on_stage,
        )
        start = time.perf_counter()
        loaded = load_weights(
            model,
            spec,
            config.model.path,
            load_format=config.model.load_format,
            device=self.device,
            dtype=self.dtype,
            seed=config.model.seed,
        )
        self._stage("load", start, f"{loaded.num_tensors} tensors, {loaded.num_bytes / GIB:.2f} GiB")

        start = time.perf_counter()
        self._graphs = self._graph_runner(model, backend)
        runnable = model if self._graphs is None else self._graphs
        num_blocks = self._num_blocks(spec, runnable, backend)
        runner = self._new_runner(spec, runnable, backend, num_blocks)
        cache_bytes = num_blocks * bytes_per_block(spec.kv_cache_specs, config.cache.block_size, self.dtype)
        tokens = num_blocks * config.cache.block_size
        self._stage("kv cache", start, f"{tokens} tokens, {cache_bytes / GIB:.2f} GiB")

        start = time.perf_counter()
        self._stage("warm up", start, self._warm_up(runner))

        if config.compile.dump_dir is not None:
            facts = {
                "attention_backend": backend.name,
                "kv_cache_tokens": tokens,
                "kv_cache_bytes": cache_bytes,
                "block_size": config.cache.block_size,
                "loaded_bytes": loaded.num_bytes,
            }
            graphs = {} if self._graphs is None else {"sizes": self._graphs.sizes, **self._graphs.report()}
            add_to_report(config.compile.dump_dir, "engine", facts | {"cudagraphs": graphs})

        self._runner = runner
        self._executor: Executor = InProcessExecutor(runner)
        self._scheduler = Scheduler(
            config.scheduler, config.cache, num_blocks=num_blocks, max_model_len=self.max_model_len
        )
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._depth = 2 if config.scheduler.async_scheduling else 1
        self._decode_misses = 0  # those before the last graph was captured
        self._host_gap = 0.0
        self._idle_since: float | None = None
        self._vocab_size = spec.vocab_size
        self.info = EngineInfo(
            max_model_len=self.max_model_len,
            vocab_size=spec.vocab_size,
            num_kv_blocks=num_blocks,
            block_size=config.cache.block_size,
            dtype=_dtype_name(self.dtype),
            device=describe_device(self.device),
            compile_report=_flat_report(model.report) | {"attention_backend": backend.name},
        )

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ValueError` (a sentence) for one that can never run and `QueueFullError` for one
        too many.
        """
        request.sampling_params.verify()
        verify_token_ids(request.sampling_params, request.stop_token_ids, self._vocab_size)
        prompt = request.prompt_token_ids
        if prompt and (min(prompt) < 0 or max(prompt) >= self._vocab_size):
            wrong = next(token for token in prompt if not 0 <= token < self._vocab_size)
            raise ValueError(f"The prompt has token id {wrong}, but the model's ids are 0 to {self._vocab_size - 1}.")
        self._scheduler.add_request(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        self._scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._in_flight) or self._scheduler.has_work()

    def step(self) -> StepOutputs:
        """Launch what can be launched, wait for the oldest step in flight; what it brought (nothing when there is no
        work).
        """
        scheduler, in_flight = self._scheduler, self._in_flight
        depth = self._depth
        if self._graphs is not None and self._runner.decode_misses - self._decode_misses >= MISSES_BEFORE_CAPTURE:
            depth = 1  # a graph can be captured only while nothing is in flight
            if not in_flight:
                self.idle()
        while len(in_flight) < depth:
            scheduled = scheduler.schedule()
            if scheduled is None:
                break
            if not in_flight and self._idle_since is not None:
                self._host_gap += time.perf_counter() - self._idle_since
            in_flight.append((scheduled, self._executor.launch(scheduled)))
        if not in_flight:
            self._idle_since = None
            return StepOutputs(stats=self.stats())
        scheduled, handle = in_flight.popleft()
        result = self._executor.result(handle)
        self._idle_since = None if in_flight else time.perf_counter()
        outputs = scheduler.update(scheduled, result)
        if not scheduler.has_work():
            self._idle_since = None
        return StepOutputs(outputs=outputs, stats=self.stats())

    def idle(self) -> bool:
        """Do one piece of work that can wait (capture one more graph); False when there is none. Nothing may be in
        flight.
        """
        if self._graphs is None or self._in_flight:
            return False
        self._decode_misses = self._runner.decode_misses
        if self._graphs.capture_next():
            return True
        while (size := self._graphs.next_piecewise_size()) is not None:
            if size <= self._runner.max_num_tokens:  # no step is longer
                self._runner.warm_up(size, 1)
                return True
        return False

    def stats(self) -> EngineStats:
        """State after the last step."""
        stats = self._scheduler.stats()
        stats.padded_tokens = self._runner.padded_tokens
        stats.host_gap_seconds = self._host_gap
        if self._graphs is not None:
            stats.graph_replays = self._graphs.stats.replays
        return stats

    def utility(self, method: str) -> UtilityValue:
        """Answer a `UtilityCall`. Raises `ValueError` for an unknown method, naming the known ones."""
        if method == "ping":
            return {"ok": True}
        if method == "reset_prefix_cache":
            return {"ok": self._scheduler.reset_prefix_cache()}
        if method == "stats":
            stats = self.stats()
            return {
                name: value for name in stats.__struct_fields__ if not isinstance(value := getattr(stats, name), dict)
            }
        raise ValueError(f"The engine has no method {method!r}: known are ping, reset_prefix_cache, stats.")

    def abort_all(self) -> list[RequestOutput]:
        """End every request; an output with finish_reason "abort" for each."""
        outputs = self._scheduler.fail_all("")
        for output in outputs:
            output.finish_reason, output.error = "abort", None
        while self._in_flight:
            self._executor.result(self._in_flight.popleft()[1])
        return outputs

    def shutdown(self) -> None:
        """Stop the executor; the core cannot be used afterwards. May be called more than once."""
        self._in_flight.clear()
        self._executor.shutdown()

    def _graph_runner(self, model: Model, backend: AttentionBackend) -> CudaGraphRunner | None:
        options = self.config.compile
        if self.device.type != "cuda" or options.mode == "eager" or options.cudagraph_mode == "none":
            return None
        return CudaGraphRunner(
            model,
            mode=options.cudagraph_mode,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            backend=backend,
            device=CudaGraphs(self.device),
            sizes=options.capture_sizes,
            decode_tail=lambda logits, inputs: argmax_rows(logits),
        )

    def _new_runner(
        self, spec: ModelSpec, model: RunnableModel, backend: AttentionBackend, num_blocks: int
    ) -> ModelRunner:
        runner = ModelRunner(
            self.config, spec, model, backend, self.device, self.dtype, num_blocks, max_model_len=self.max_model_len
        )
        if self._graphs is not None:
            self._graphs.bind(runner.decode_inputs)
        return runner

    def _num_blocks(self, spec: ModelSpec, model: RunnableModel, backend: AttentionBackend) -> int:
        cache = self.config.cache
        if self.device.type == "cpu":
            free = free_cpu_bytes()
        elif cache.num_blocks is None and cache.memory_bytes is None:
            free = self._free_cuda_bytes(spec, model, backend)
        else:
            free = 0
        return plan_num_blocks(
            cache,
            spec.kv_cache_specs,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            free_bytes=free,
            is_cpu=self.device.type == "cpu",
        )

    def _free_cuda_bytes(self, spec: ModelSpec, model: RunnableModel, backend: AttentionBackend) -> int:
        """What the device has left for the cache when the largest step runs: measured by running one."""
        scheduler = self.config.scheduler
        torch.cuda.reset_peak_memory_stats(self.device)
        probe = self._new_runner(spec, model, backend, 1)
        probe.warm_up(probe.max_num_tokens, min(scheduler.max_num_seqs, probe.max_num_tokens))
        graphs = 0 if self._graphs is None else self._graphs.estimate_bytes()
        del probe
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)  # of other processes, and of the driver
        # The sampler works on float32 copies of the logits.
        sampler = 3 * scheduler.max_num_seqs * spec.vocab_size * 4
        budget = int(total * self.config.cache.gpu_memory_utilization)
        return budget - peak - graphs - others - sampler

    def _warm_up(self, runner: ModelRunner) -> str:
        runner.warm_up(1, 1)
        runner.warm_up(min(8, runner.max_num_tokens), 1)
        runner.warm_up_sampler(self.dtype)
        if self._graphs is None:
            return ""
        # The sizes that are wanted first; the others are captured in idle moments, or when steps ask for them.
        until = time.perf_counter() + CAPTURE_SECONDS
        while self._graphs.capture_next() and time.perf_counter() < until:
            pass
        report = self._graphs.report()
        return f"{report['full_graphs']} CUDA graphs, {report['waiting']} to come"

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
