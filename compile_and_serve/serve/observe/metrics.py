"""Prometheus metrics: vLLM's names with the prefix `cas:`, in a separate registry, labelled with the model's name."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from compile_and_serve.runtime.ledger.records import MISSES
from compile_and_serve.runtime.messages import EngineInfo, EngineStats, FinishReason
from compile_and_serve.runtime.text.output_processor import CompletionDelta
from compile_and_serve.serve.observe.throughput import TokenCounts, total_load
from compile_and_serve.serve.settings import MetricsPrefix

Sample = tuple[str, dict[str, str], float]  # name, labels, value
MetricFamily = tuple[str, str, str, list[Sample]]  # name, text, type, samples

PREFIX = "cas:"
_NAMES = re.compile(rb"^(# (?:HELP|TYPE) )?cas:", re.MULTILINE)
_LABEL = "model_name"
_MAX_ADAPTERS = 100  # labels; further adapters are counted together
_OTHER_ADAPTERS = "other"
_MAX_TENANTS = 100
_OTHER_TENANTS = "other"
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_ENGINE_COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "num_preemptions": "Preempted requests, which are recomputed later.",
    "canary_checked_blocks": "Blocks of the KV cache that --verify-state compared with what they held before.",
    "canary_recomputed_blocks": "Blocks of the KV cache that --verify-state compared with the same tokens computed again.",
    "canary_findings": "What --verify-state found to be overwritten or wrong.",
    "padded_tokens": "Padding tokens computed to reach a captured graph size.",
    "steps_on_device": "Steps whose inputs the device computed from the previous step.",
    "spec_decode_num_drafts": "Drafts that speculative decoding checked, one per sequence and step.",
    "spec_decode_num_draft_tokens": "Tokens proposed by speculative decoding.",
    "spec_decode_num_accepted_tokens": "Proposed tokens that were accepted.",
}
_REPLICA_GAUGES = {
    "num_running": ("num_requests_running", "Requests in the replica's running batch."),
    "num_waiting": ("num_requests_waiting", "Requests that wait to run on the replica."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of the replica's KV cache in use, 0 to 1."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the replica's prefix cache since its start."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the replica's prefix cache since its start."),
    "num_preemptions": ("num_preemptions", "Requests that the replica preempted since its start."),
}
_TENANT_COUNTERS = {
    "prompt_tokens": "Prompt tokens of an API key.",
    "generation_tokens": "Tokens generated for an API key.",
    "request_success": "Finished requests of an API key.",
    "requests_refused": "Requests of an API key beyond its limits a minute.",
}
_TENANT_GAUGES = {"running": "Requests of an API key that run.", "waiting": "Requests of an API key that wait."}
_WAITING = "num_requests_waiting"
_STAGE = "stages."  # prefix of the stages' seconds in the compile report
_PASS_GAUGES = {
    "matched": "Sites that a graph pass rewrote.",
    "expected": "Sites that a graph pass rewrote or should have rewritten; expected - matched are near misses.",
}


@dataclass(slots=True)
class SequenceClock:
    """Times (time.monotonic, seconds) and counts of one sequence in flight."""

    arrival: float
    prompt_tokens: int
    first_token: float = 0.0
    last_token: float = 0.0
    new_tokens: int = 0
    adapter: str | None = None  # label of its LoRA adapter
    tenant: str | None = None  # label of its API key


class Metrics:
    """Everything under /metrics. Updated from the engine's outputs and stats; `render` gives the text for Prometheus."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # they double the number of series, and dashboards do not use them
        self.registry = CollectorRegistry()
        self._model = model_name
        self.tokens = TokenCounts()
        self.last_stats: dict[int, EngineStats] = {}  # by replica
        self._replica_gauges: dict[str, Gauge] = {}
        self._expert_tokens: Counter | None = None
        self._expert_tokens_known: dict[int, list[list[int]]] = {}  # by replica
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge(_WAITING, "Requests that wait to run.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._engine_counters = {name: self._counter(name, text) for name, text in _ENGINE_COUNTERS.items()}
        self._host_gap = self._counter("host_gap_seconds", "Seconds for which the device was idle between steps.")
        self._stage_wait = self._counter("stage_wait_seconds", "Seconds for which the last stage waited for the one before.")
        self._accepted_at = Counter(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft.",
            [_LABEL, "position"],
            registry=self.registry,
        )
        self._success = Counter(PREFIX + "request_success", "Finished requests.", [_LABEL, "finished_reason"], registry=self.registry)
        labels = [_LABEL, "adapter"]
        self._adapters: set[str] = set()
        self._adapter_requests = Counter(
            PREFIX + "lora_request_success", "Finished requests of a LoRA adapter.", labels, registry=self.registry
        )
        self._adapter_tokens = Counter(
            PREFIX + "lora_generation_tokens", "Tokens generated with a LoRA adapter.", labels, registry=self.registry
        )
        self._tenants: set[str] = set()
        self._tenant_counters = {
            name: Counter(PREFIX + "tenant_" + name, text, [_LABEL, "tenant"], registry=self.registry)
            for name, text in _TENANT_COUNTERS.items()
        }
        self._tenant_gauges = {
            name: Gauge(f"{PREFIX}tenant_num_requests_{name}", text, [_LABEL, "tenant"], registry=self.registry)
            for name, text in _TENANT_GAUGES.items()
        }
        text = "Steps with prompts by whose attention kernels ran them."
        self._prompt_steps = Counter(PREFIX + "prompt_steps", text, [_LABEL, "kernels"], registry=self.registry)
        self._replays = Counter(PREFIX + "graph_replays", "Replays of captured graphs by mode.", [_LABEL, "mode"], registry=self.registry)
        self._tiers: dict[str, Gauge] = {}  # by name, as the engine tells them
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", "Time between two tokens of a request.", _ITL)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled.", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "First scheduled to first token.", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _LATENCY)
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_generated = self._histogram("request_generation_tokens", "New tokens of a request.", _TOKENS)
        self._misses = Counter(
            PREFIX + "misses",
            "What was not reused or not used, by kind and reason: prefixes by request, graphs and drafts by step.",
            [_LABEL, "kind", "reason"],
            registry=self.registry,
        )
        for kind, reasons in MISSES.items():
            for reason in reasons:
                self._misses.labels(model_name, kind, reason)
        self._media = Histogram(
            PREFIX + "media_seconds",
            "Time for one image, video or audio: download, decode, preprocess.",
            [_LABEL, "stage"],
            buckets=_TTFT,
            registry=self.registry,
        )
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens of one engine step.", _STEP_TOKENS)

    def observe_media(self, stage: str, seconds: float) -> None:
        """Count a stage of the preparation of an image, a video or audio: "download", "decode" or "preprocess"."""
        self._media.labels(self._model, stage).observe(seconds)

    def describe_engine(self, info: EngineInfo) -> None:
        """Publish the facts known after start-up: compilation, KV cache and limits."""
        facts = {name: str(getattr(info, name)) for name in ("dtype", "device", "block_size", "num_kv_blocks")}
        facts["max_model_len"] = str(info.max_model_len)
        of_report = ("attention_backend", "latent_decodes", "kv_cache_dtype", "all_reduce", "token_exchange")
        facts |= {name: str(info.compile_report.get(name, "")) for name in of_report}
        gauge = Gauge(PREFIX + "engine_info", "Properties of the engine.", [_LABEL, *facts], registry=self.registry)
        gauge.labels(self._model, *facts.values()).set(1)
        cache = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_kv_blocks),
            "cache_dtype": facts["kv_cache_dtype"],
            "enable_prefix_caching": str(info.prefix_caching),
        }
        gauge = Gauge(PREFIX + "cache_config_info", "The KV cache.", [_LABEL, *cache], registry=self.registry)
        gauge.labels(self._model, *cache.values()).set(1)
        report = info.compile_report
        stages = [v for name, v in report.items() if name.startswith(_STAGE) and isinstance(v, (int, float))]
        self._gauge("compile_seconds", "Seconds of compilation at start-up, all stages.").set(sum(stages))
        for name, source, text in (
            ("unique_pieces", "distinct_pieces", "Distinct compiled pieces of the model."),
            ("total_pieces", "pieces", "Pieces of the model; equal pieces share one compilation."),
        ):
            self._gauge(name, text).set(float(report.get(source, 0)))
        self._gauge("artifact_hits", "1 if start-up found the compiled artifact in the store.").set(report.get("artifact") == "hit")
        memory = Gauge(PREFIX + "device_memory_bytes", "Device memory by use.", [_LABEL, "part"], registry=self.registry)
        for part in ("others", "weights", "largest_step", "sampling", "graphs"):
            if isinstance(count := report.get(f"memory.{part}"), int):  # only CUDA measures it
                memory.labels(self._model, part).set(count)
        self._describe_passes(report)

    def _describe_passes(self, report: Mapping[str, int | float | str]) -> None:
        """Publish the report's `pass_sites.<pass>.matched`, `….expected` and `failed_passes.<pass>`."""
        labels = [_LABEL, "graph_pass"]
        counts = {count: Gauge(f"{PREFIX}pass_sites_{count}", text, labels, registry=self.registry) for count, text in _PASS_GAUGES.items()}
        failed = Gauge(PREFIX + "pass_failed", "1 for a pass that failed --verify-passes.", labels, registry=self.registry)
        for name, value in report.items():
            group, *rest = name.split(".")
            if group == "pass_sites" and len(rest) == 2 and rest[1] in counts and isinstance(value, (int, float)):
                counts[rest[1]].labels(self._model, rest[0]).set(value)
            elif group == "failed_passes":
                failed.labels(self._model, ".".join(rest)).set(1)

    def start(self, prompt_tokens: int, adapter: str | None = None, tenant: str | None = None) -> SequenceClock:
        """The clock of a sequence that is being sent to the engine. adapter: name of its LoRA adapter. tenant: name of its API key."""
        if adapter is not None and adapter not in self._adapters:
            if len(self._adapters) < _MAX_ADAPTERS:
                self._adapters.add(adapter)
            else:
                adapter = _OTHER_ADAPTERS
        return SequenceClock(arrival=time.monotonic(), prompt_tokens=prompt_tokens, adapter=adapter, tenant=self._tenant_label(tenant))

    def observe(self, clock: SequenceClock, delta: CompletionDelta, now: float) -> None:
        """Record one delta of a sequence. now: when its step arrived (time.monotonic)."""
        count = len(delta.token_ids)
        if delta.queue_seconds is not None:  # set once per sequence, after the prefill
            self._prompt_tokens.inc(clock.prompt_tokens)
            self.tokens.prompt += clock.prompt_tokens
            if clock.tenant is not None:
                self._tenant_counters["prompt_tokens"].labels(self._model, clock.tenant).inc(clock.prompt_tokens)
            self._queue.observe(delta.queue_seconds)
        if delta.prefill_seconds is not None:
            self._prefill.observe(delta.prefill_seconds)
        if count:
            self._generation_tokens.inc(count)
            self.tokens.generation += count
            if clock.tenant is not None:
                self._tenant_counters["generation_tokens"].labels(self._model, clock.tenant).inc(count)
            if clock.adapter is not None:
                self._adapter_tokens.labels(self._model, clock.adapter).inc(count)
            if clock.new_tokens == 0:
                clock.first_token = now
                self._ttft.observe(now - clock.arrival)
            else:
                gap = (now - clock.last_token) / count
                for _ in range(count):
                    self._itl.observe(gap)
            clock.new_tokens += count
            clock.last_token = now
        if delta.finish_reason is not None:
            self._finished(clock, delta.finish_reason, now)

    def observe_refused_structure(self) -> None:
        """Count a request whose form of structured output was refused."""
        self._misses.labels(self._model, "structured", "refused").inc()

    def observe_refused(self, tenant: str) -> None:
        """Record a request of an API key that has used up what it may have a minute."""
        label = self._tenant_label(tenant)
        assert label is not None
        self._tenant_counters["requests_refused"].labels(self._model, label).inc()

    def observe_aborted(self, clocks: Sequence[SequenceClock]) -> None:
        """Record sequences that were aborted because their client disconnected."""
        now = time.monotonic()
        for clock in clocks:
            self._finished(clock, "abort", now)

    def describe_replicas(self, count: int) -> None:
        """Also publish each replica's state, as `replica_…`. The other metrics are totals over the replicas."""
        self._replica_gauges = {
            name: Gauge(PREFIX + "replica_" + metric, text, [_LABEL, "replica"], registry=self.registry)
            for name, (metric, text) in _REPLICA_GAUGES.items()
        }
        for replica in range(count):
            self.last_stats[replica] = EngineStats()
            self._describe_replica(replica, self.last_stats[replica])

    def observe_step(self, stats: EngineStats, replica: int = 0) -> None:
        """Record an engine's state after a step."""
        before = self.last_stats.get(replica, EngineStats())
        self.last_stats[replica] = stats
        running, waiting, kv_usage = total_load(self.last_stats.values())
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(kv_usage)
        if stats.step_tokens:
            self._step_tokens.observe(stats.step_tokens)
        for name, counter in self._engine_counters.items():
            counter.inc(max(0, getattr(stats, name) - getattr(before, name)))
        places = stats.spec_decode_num_accepted_tokens_per_pos
        before_at = before.spec_decode_num_accepted_tokens_per_pos or [0] * len(places)
        for place, (total, known) in enumerate(zip(places, before_at, strict=True)):
            self._accepted_at.labels(self._model, str(place)).inc(max(0, total - known))
        self._host_gap.inc(max(0.0, stats.host_gap_seconds - before.host_gap_seconds))
        self._stage_wait.inc(max(0.0, stats.stage_wait_seconds - before.stage_wait_seconds))
        for mode, total in stats.graph_replays.items():
            self._replays.labels(self._model, mode).inc(max(0, total - before.graph_replays.get(mode, 0)))
        for kernels, total in stats.prompt_steps.items():
            self._prompt_steps.labels(self._model, kernels).inc(max(0, total - before.prompt_steps.get(kernels, 0)))
        if stats.misses != before.misses:
            for name, total in stats.misses.items():
                self._misses.labels(self._model, *name.split(".")).inc(max(0, total - before.misses.get(name, 0)))
        for name, value in stats.kv_tiers.items():
            if name not in self._tiers:
                text = f"Of the tiers of the KV cache: {name.replace('_', ' ')}."
                self._tiers[name] = Gauge(f"{PREFIX}kv_{name}", text, [_LABEL, "replica"], registry=self.registry)
            self._tiers[name].labels(self._model, str(replica)).set(value)
        self._describe_replica(replica, stats)
        if stats.expert_tokens:
            self._describe_experts(replica, stats.expert_tokens)
        if stats.tenants or before.tenants:
            self._describe_tenants({*stats.tenants, *before.tenants})

    def observe_held(self, stats: EngineStats, replica: int) -> None:
        """Note an engine's state after a step that the first API process records. Publish only what waits in this process."""
        self.last_stats[replica] = stats
        self._waiting.set(self.num_held)

    @property
    def num_held(self) -> int:
        """Sequences that wait in this process for any replica to have room."""
        return sum(one.num_held for one in self.last_stats.values())

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def families(self) -> list[MetricFamily]:
        """All metrics as data, for another process to add up."""
        return [
            (one.name, one.documentation, one.type, [(s.name, dict(s.labels), s.value) for s in one.samples])
            for one in self.registry.collect()
        ]

    def _finished(self, clock: SequenceClock, reason: FinishReason, now: float) -> None:
        self._success.labels(self._model, reason).inc()
        if clock.tenant is not None:
            self._tenant_counters["request_success"].labels(self._model, clock.tenant).inc()
        if clock.adapter is not None:
            self._adapter_requests.labels(self._model, clock.adapter).inc()
        self._e2e.observe(now - clock.arrival)
        self._request_prompt.observe(clock.prompt_tokens)
        self._request_generated.observe(clock.new_tokens)
        if clock.new_tokens:
            self._decode.observe(clock.last_token - clock.first_token)

    def _tenant_label(self, name: str | None) -> str | None:
        if name is None or name in self._tenants:
            return name
        if len(self._tenants) >= _MAX_TENANTS:
            return _OTHER_TENANTS
        self._tenants.add(name)
        return name

    def _describe_tenants(self, names: Iterable[str]) -> None:
        """Publish what the API keys have on all replicas together."""
        labels = {name: self._tenant_label(name) for name in names}
        for label in set(labels.values()):
            known = [one for stats in self.last_stats.values() for name, one in stats.tenants.items() if self._tenant_label(name) == label]
            self._tenant_gauges["running"].labels(self._model, label).set(sum(one.num_running for one in known))
            self._tenant_gauges["waiting"].labels(self._model, label).set(sum(one.num_waiting for one in known))

    def _describe_replica(self, replica: int, stats: EngineStats) -> None:
        for name, gauge in self._replica_gauges.items():
            gauge.labels(self._model, str(replica)).set(getattr(stats, name))

    def _describe_experts(self, replica: int, layers: list[list[int]]) -> None:
        if self._expert_tokens is None:
            labels = [_LABEL, "layer", "expert"]
            self._expert_tokens = Counter(PREFIX + "expert_tokens", "Tokens of an expert of a layer.", labels, registry=self.registry)
            self._expert_imbalance = Gauge(
                PREFIX + "expert_imbalance",
                "Tokens of a layer's busiest expert over those of its average expert.",
                labels[:2],
                registry=self.registry,
            )
        replicas = self._expert_tokens_known
        known, replicas[replica] = replicas.get(replica, []), layers
        for number, layer in enumerate(layers):
            before = known[number] if number < len(known) else [0] * len(layer)
            for expert, (count, counted) in enumerate(zip(layer, before, strict=True)):
                self._expert_tokens.labels(self._model, str(number), str(expert)).inc(max(0, count - counted))
            of_replicas = (one[number] for one in replicas.values() if number < len(one))
            totals = [sum(counts) for counts in zip(*of_replicas, strict=True)]
            if any(totals):
                self._expert_imbalance.labels(self._model, str(number)).set(max(totals) * len(totals) / sum(totals))

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, [_LABEL], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, [_LABEL], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, [_LABEL], registry=self.registry, buckets=buckets).labels(self._model)


def with_prefix(text: bytes, prefix: MetricsPrefix) -> bytes:
    """Metrics in Prometheus' text format under the names that the server was asked for, all of them twice for "both"."""
    if prefix == "cas":
        return text
    renamed = _NAMES.sub(rb"\1vllm:", text)
    return text + renamed if prefix == "both" else renamed


def sum_families(processes: Sequence[Sequence[MetricFamily]]) -> list[MetricFamily]:
    """The metrics of several API processes as those of one server: counters and histograms are summed.

    Of gauges the largest counts: they describe the engine, and processes that do not know it have 0. Only what waits is summed: the first
    process counts the engine's, and each process its own.
    """
    families: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for process in processes:
        for name, text, kind, samples in process:
            families[name] = text, kind
            merged = values.setdefault(name, {})
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                before = merged.get(key)
                if before is None:
                    merged[key] = value
                else:
                    merged[key] = max(before, value) if kind == "gauge" and name != PREFIX + _WAITING else before + value
    return [
        (name, text, kind, [(sample, dict(labels), value) for (sample, labels), value in values[name].items()])
        for name, (text, kind) in families.items()
    ]


def render_families(families: Sequence[MetricFamily]) -> bytes:
    """Metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for name, text, kind, samples in self._families:
            metric = Metric(name, text, kind)
            for sample, labels, value in samples:
                metric.add_sample(sample, labels, value)
            yield metric
