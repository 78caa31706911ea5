"""Start-up, decode, prefill and mixed load on one GPU or several, with random weights. Prints one JSON line per workload.

    python -m benchmarks.gpu MODEL_DIR [--quantization fp8] [--kv-cache-dtype fp8] [--tp N] [--ep] [--dp N] [--pp N] [--quick] [--out FILE]
                             [--work startup,load,decode,prefill,mixed,long,contexts,samples,profile,prompts] [--force-pass NAME]

MODEL_DIR needs only a config.json. Prompts are random token ids; every request is greedy and runs to its full length.

startup: from the start of this process to the first token. `compilers`: Dynamo and Inductor, if the start imported them.
decode: (time of 129 new tokens − time of 1 new token) / 128 at prompts of 128, each the better of two runs, after warm-up runs that
    capture the CUDA graphs. One more run gives `device_ms` (a step's time on the device), `host_gap` (the share of a step in which
    the device is idle) and `late` (the share of steps that the host launched too late). A mixture of experts also has `distinct_experts`
    and `distinct_experts_min` (the experts of a layer that had a token in a step: mean over layers, and the least) and `busiest_eighth`
    (the share of all tokens that the busiest eighth of a layer's experts got). Random weights must route about evenly, as trained ones do.
    `read_gb`: what a step must move (`decode_bytes.py`). `bandwidth`: read_gb by step_ms, as a share of the device's bandwidth, which is
    measured first. On one rank.
prefill: prompts of one length, one new token, the best of three runs.
load (not by default): the requests of `mixed`, three times from the moment that the engine is ready. Nothing is warmed up or captured by
    hand. `graphs`: what was captured and replayed until the end of each.
mixed: 512 requests at once with prompts of 64 to 1024 and outputs of 32 to 320 tokens. Every engine gets the same requests
    (`peer-*.jsonl`). `with_prompts`: the steps that contained prompt tokens. `decodes`: the steps of decodes alone, by batch size.
    Rows with prompts say whose attention kernels ran them, `prompt_steps`: kernels → steps since the row before.
    `bubble`: with `--pp`, the share of the time in which the last stage waits for the one before.
long (not by default): 16 prompts of 24000 tokens at once, or those of `--long`, then 128 tokens of each; with `--max-model-len 32768`.
    `prompt_tok_s` is of all prompts with one token each; `step_ms` and `tok_s` are of the time that 128 further tokens take; the rest is of
    the steps in which all prompts' sequences decode, as for decode.
contexts (not by default): decode steps over prompts of `--contexts` tokens, for each of `--batches` up to 32 that fits into the KV cache
    and `--max-model-len` (take 131072, and `--kv-cache-dtype fp8` for larger batches). `step_ms`: the median from the end of a step to
    the end of the next. `read_gb`, `bandwidth`: as of decode. The rows follow once more as a table. For dense models on one rank.
samples (not by default): 16 prompts of 2000 tokens, 8 sequences of 128 tokens each, three times.
profile (not by default): time per kernel, in captured decode steps, in a prefill of 4 × 4096, and in the steps of `mixed` that contain
    prompt tokens (128 of its requests, 4 new tokens each). A kernel's time begins when the kernels before it have ended.
prompts (not by default): the kernels of a prefill of 8 × 4096. `products_ms`: of libraries' and own products. `fla_ms`: of fla-core.
    `ratio`: the device's time, from the first kernel's start to the last one's end, divided by both. `others`: the other kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.distributed.bytecode import keep_bytecode

PREFILLS = ((1, 1024), (1, 4096), (16, 4096))  # (number of prompts, tokens per prompt)
WORKS = ("startup", "load", "decode", "prefill", "mixed", "long", "contexts", "samples", "profile", "prompts")
DEFAULT_WORKS = ("startup", "decode", "prefill", "mixed")


def seconds_since_process_start() -> float:
    """Seconds since this process was created, the interpreter's start included (Linux)."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


class Bench:
    """One engine, its workloads and the rows that they printed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        config = json.loads((args.model / "config.json").read_text())
        self.vocab: int = config["vocab_size"]
        self.has_experts = any(name.startswith(("num_", "n_routed")) and name.endswith("experts") for name in config)
        self.rng = random.Random(0)
        self.rows: list[dict[str, Any]] = []
        started = time.perf_counter()
        from compile_and_serve import LLM, SamplingParams

        self.make_params = SamplingParams
        imported = time.perf_counter()
        stages: dict[str, float] = {}

        def on_stage(stage: str, seconds: float, detail: str) -> None:
            stages[stage] = round(stages.get(stage, 0.0) + seconds, 3)

        self.prompt_steps_before: dict[str, int] = {}
        self.llm = LLM(
            str(args.model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            device=args.device,
            max_model_len=args.max_model_len,
            max_num_seqs=max(256, max(args.batches) // args.dp) * args.pp,  # as many in each stage's step
            max_num_batched_tokens=args.max_num_batched_tokens,
            gpu_memory_utilization=0.85,
            enable_prefix_caching=False,
            async_scheduling=True,
            enforce_eager=args.eager,
            cudagraph_mode=args.cudagraph_mode,
            attention_backend=args.attention_backend,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            tensor_parallel_size=args.tp,
            enable_expert_parallel=args.ep,
            data_parallel_size=args.dp,
            pipeline_parallel_size=args.pp,
            disable_custom_all_reduce=args.disable_custom_all_reduce,
            num_kv_blocks=args.num_kv_blocks,
            forced_passes=args.force_pass,
            on_stage=on_stage,
        )
        ready = time.perf_counter()
        self.generate(self.prompts(1, 8), [1])
        first_token = seconds_since_process_start()
        compilers = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
        if "startup" in args.work:
            self.emit(
                work="startup",
                import_s=round(imported - started, 2),
                init_s=round(ready - imported, 2),
                first_token_s=round(first_token, 2),
                stages=stages,
                compilers=compilers,
                report=self.llm.info.compile_report,
            )

    def emit(self, **row: Any) -> None:
        from benchmarks.gpu_timing import environment

        row = {
            "engine": "compile-and-serve",
            "model": self.args.model.name,
            "quant": self.args.quantization,
            "kv_cache_dtype": self.args.kv_cache_dtype,
            "eager": self.args.eager,
            "tp": self.args.tp,
            "pp": self.args.pp,
            "dp": self.args.dp,
            "label": self.args.label,
            **({"state_each_step": True} if self.args.state_each_step else {}),
            **row,
            **self.prompt_steps(),
            **environment(),
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def prompt_steps(self) -> dict[str, Any]:
        """Since the row before: whose attention ran prompts."""
        total = self.llm.core.stats().prompt_steps
        new = {kernels: count - self.prompt_steps_before.get(kernels, 0) for kernels, count in total.items()}
        self.prompt_steps_before = total
        return {"prompt_steps": {kernels: count for kernels, count in new.items() if count}}

    def prompts(self, count: int, shortest: int, longest: int | None = None) -> list[Any]:
        rng = self.rng
        return [
            {"prompt_token_ids": [rng.randrange(100, self.vocab - 1000) for _ in range(rng.randint(shortest, longest or shortest))]}
            for _ in range(count)
        ]

    def generate(self, prompts: list[Any], new_tokens: list[int]) -> tuple[float, int]:
        """→ seconds, output tokens."""
        params = [self.make_params(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for n in new_tokens]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, sum(len(output.outputs[0].token_ids) for output in outputs)

    def capture_graphs(self) -> None:
        """Capture the CUDA graphs that a server captures while idle, so that none is captured during a measurement."""
        while self.llm.core.idle():
            pass

    def decode(self) -> None:
        prompt, new = 128, 128
        for batch in (1, 64) if self.args.quick else self.args.batches:
            for _ in range(4):
                self.generate(self.prompts(batch, prompt), [1] * batch)
            one = many = float("inf")
            for _ in range(2):
                prompts = self.prompts(batch, prompt)
                one = min(one, self.generate(prompts, [1] * batch)[0])
                many = min(many, self.generate(prompts, [new + 1] * batch)[0])
            best = (many - one) / new
            row: dict[str, Any] = {"step_ms": round(best * 1e3, 3), "tok_s": round(batch / best, 1)}
            row |= self.times_of_decodes(batch, prompt, new)
            row |= self.expert_load(batch)
            row |= self.share_of_bandwidth(batch, prompt + new // 2, best, row.get("distinct_experts"))
            self.emit(work="decode", batch=batch, prompt=prompt, **row)

    def times_of_decodes(self, batch: int, prompt: int, new: int) -> dict[str, float]:
        """`StepTimes.of_decodes` of one run; empty if the ranks are other processes."""
        from benchmarks.gpu_timing import StepTimes

        if self.worker is None:
            return {}
        with StepTimes(self.executor) as times:
            self.generate(self.prompts(batch, prompt), [new + 1] * batch)
        return times.of_decodes(batch)

    @cached_property
    def device_bandwidth(self) -> float:
        """Bytes/s of the device's memory, measured."""
        from compile_and_serve.compiler.reports.profile import measure_bandwidth

        return measure_bandwidth(self.worker.device)

    def share_of_bandwidth(self, batch: int, context: int, seconds: float, distinct_experts: float | None) -> dict[str, float]:
        """What a decode step of so many seconds moves; empty if the ranks are other processes."""
        from benchmarks.decode_bytes import decode_bytes

        if self.worker is None:
            return {}
        num_bytes = decode_bytes(self.worker.loaded, batch, context, distinct_experts)
        return {"read_gb": round(num_bytes / 1e9, 6), "bandwidth": round(num_bytes / seconds / self.device_bandwidth, 3)}

    def expert_load(self, batch: int) -> dict[str, float]:
        """The distinct experts of a layer in a decode step, counted in a run without CUDA graphs; empty for a model without experts."""
        from compile_and_serve.custom_ops.moe.expert_load import counting_experts

        if self.worker is None or not self.has_experts:
            return {}
        runners = self.worker._graphs.runners if self.worker._graphs is not None else ()
        kept = [(runner._full, runner._waiting, runner._piecewise) for runner in runners]
        for runner in runners:
            runner._full, runner._waiting, runner._piecewise = {}, [], None
        try:
            with counting_experts() as layers:
                self.generate(self.prompts(batch, 128), [9] * batch)
        finally:
            for runner, graphs in zip(runners, kept, strict=True):
                runner._full, runner._waiting, runner._piecewise = graphs
        distinct = [layer.mean_distinct(batch) for layer in layers.values()]
        busiest = [layer.tokens.sort(descending=True).values for layer in layers.values()]
        shares = [(top[: max(1, len(top) // 8)].sum() / top.sum()).item() for top in busiest]
        return {
            "distinct_experts": round(sum(distinct) / len(distinct), 1),
            "distinct_experts_min": round(min(distinct), 1),
            "busiest_eighth": round(sum(shares) / len(shares), 3),
        }

    def captured_graph(self, batch: int) -> Any:
        """The graph of a decode step, or None if there is none or the ranks are other processes."""
        graphs = self.worker._graphs if self.worker is not None else None
        return graphs.captured_graph(batch) if graphs is not None else None

    @property
    def executor(self) -> Any:
        return self.llm.core.executor

    @property
    def worker(self) -> Any:
        return getattr(self.executor, "worker", None)

    def prefill(self) -> None:
        for count, length in ((8, 4096),) if self.args.quick else PREFILLS:
            best = min(self.generate(self.prompts(count, length), [1] * count)[0] for _ in range(3))
            self.emit(work="prefill", n=count, prompt=length, s=round(best, 4), tok_s=round(count * length / best, 1))

    def mixed_load(self, count: int) -> tuple[list[Any], list[int]]:
        """Prompts and numbers of new tokens: always those that the peers' benchmark draws after its decodes and prefills."""
        kept, self.rng = self.rng, random.Random(0)
        decodes = [(batch, 128) for batch in (1, 8, 32, 64, 128, 256) for _ in range(2)]
        for number, length in ((4, 64), *decodes, *(prefill for prefill in PREFILLS for _ in range(3))):
            self.prompts(number, length)
        prompts = self.prompts(count, 64, 1024)
        new_tokens = [self.rng.randint(32, 320) for _ in range(count)]
        self.rng = kept
        return prompts, new_tokens

    def mixed(self) -> None:
        from benchmarks.gpu_timing import StepTimes

        count = 128 if self.args.quick else self.args.requests
        prompts, new_tokens = self.mixed_load(count)
        waited = self.llm.core.stats().stage_wait_seconds
        with nullcontext() if self.worker is None else StepTimes(self.executor) as times:
            seconds, output_tokens = self.generate(prompts, new_tokens)
        all_tokens = output_tokens + sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        self.emit(
            work="mixed",
            n=count,
            s=round(seconds, 3),
            out_tok_s=round(output_tokens / seconds, 1),
            total_tok_s=round(all_tokens / seconds, 1),
            req_s=round(count / seconds, 2),
            with_prompts=times and times.of_prompts(),
            decodes=times and times.by_batch(),
            bubble=round((self.llm.core.stats().stage_wait_seconds - waited) / seconds, 3) if self.args.pp > 1 else None,
        )

    def load(self) -> None:
        prompts, new_tokens = self.mixed_load(128 if self.args.quick else 512)
        num_tokens = sum(new_tokens) + sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        for nth in range(1, 4):
            seconds, _ = self.generate(prompts, new_tokens)
            graphs = None if self.worker is None else self.worker._graphs.report()
            self.emit(work="load", nth=nth, n=len(prompts), s=round(seconds, 3), total_tok_s=round(num_tokens / seconds, 1), graphs=graphs)

    def long(self) -> None:
        from benchmarks.gpu_timing import StepTimes

        (count, context), new = self.args.long, 128
        self.generate(self.prompts(2, context), [1, 1])
        one = self.generate(self.prompts(count, context), [1] * count)[0]
        with nullcontext() if self.worker is None else StepTimes(self.executor) as times:
            many = self.generate(self.prompts(count, context), [new + 1] * count)[0]
        self.emit(
            work="long",
            n=count,
            prompt=context,
            s=round(many, 3),
            step_ms=round((many - one) / new * 1e3, 3),
            tok_s=round(count * new / (many - one), 1),
            prompt_tok_s=round(count * context / one, 1),
            total_tok_s=round(count * (context + new + 1) / many, 1),
            **({} if times is None else times.of_decodes(count)),
        )

    def contexts(self) -> None:
        from benchmarks.decode_bytes import decode_bytes
        from benchmarks.gpu_timing import StepTimes

        if self.worker is None:
            raise ValueError("contexts looks at the ranks' memory: it runs with --tp 1.")
        info, device = self.llm.info, self.device_bandwidth
        rows = []
        for context in self.args.contexts:
            for batch in self.args.batches:
                # The first prompt's sequence still decodes in the 32 steps after the last prompt.
                new = 32 + -(-batch * context // self.args.max_num_batched_tokens)
                fits_cache = batch * -(-(context + new) // info.block_size) <= info.num_kv_blocks
                if batch > 32 or context + new > info.max_model_len or not fits_cache:
                    continue
                with StepTimes(self.executor) as times:
                    self.generate(self.prompts(batch, context), [new] * batch)
                seconds, num_bytes = times.decode_seconds(batch), decode_bytes(self.worker.loaded, batch, context)
                row = {
                    "context": context,
                    "batch": batch,
                    "step_ms": round(seconds * 1e3, 3),
                    "read_gb": round(num_bytes / 1e9, 6),
                    "bandwidth": round(num_bytes / seconds / device, 3),
                }
                rows.append(row)
                self.emit(work="contexts", **row, device_gb_s=round(device / 1e9, 1), **times.of_decodes(batch))
        print("| context | batch | step, ms | read, GB | share of bandwidth |\n|---:|---:|---:|---:|---:|")
        for row in rows:
            print("| {context} | {batch} | {step_ms} | {read_gb:.2f} | {bandwidth:.0%} |".format(**row))

    def samples(self) -> None:
        prompts = self.prompts(16, 2000)
        params = self.make_params(temperature=1.0, ignore_eos=True, n=8, max_tokens=128, detokenize=False)
        for nth in range(1, 4):
            started = time.perf_counter()
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
            self.emit(work="samples", nth=nth, prompts=16, prompt=2000, n=8, s=round(seconds, 3), out_tok_s=round(num_tokens / seconds, 1))

    def profile(self) -> None:
        from benchmarks.gpu_timing import StepTimes, kernels_of

        for batch in self.args.batches:
            self.generate(self.prompts(batch, 128), [12] * batch)
            graph = self.captured_graph(batch)
            if graph is not None:
                times = self.times_of_decodes(batch, 128, 12)
                self.emit(work="profile", of="decode", batch=batch, **times, **kernels_of(graph.replay, repeats=4))
        for _ in range(2):
            self.generate(self.prompts(4, 4096), [1] * 4)
        prompts = self.prompts(4, 4096)
        self.emit(work="profile", of="prefill", n=4, prompt=4096, **kernels_of(lambda: self.generate(prompts, [1] * 4)))
        count = 128
        prompts, _ = self.mixed_load(count)
        with nullcontext() if self.worker is None else StepTimes(self.executor) as steps:
            self.generate(prompts, [4] * count)
        kernels = kernels_of(lambda: self.generate(prompts, [4] * count))
        self.emit(work="profile", of="mixed", n=count, with_prompts=steps and steps.of_prompts(), **kernels)

    def prompts_of_layers(self) -> None:
        from benchmarks.gpu_timing import kernels_by_kind

        count, length = 8, 4096
        for _ in range(2):
            self.generate(self.prompts(count, length), [1] * count)
        prompts = self.prompts(count, length)
        self.emit(work="prompts", n=count, prompt=length, **kernels_by_kind(lambda: self.generate(prompts, [1] * count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=lambda text: text.split(","), default=list(DEFAULT_WORKS))
    parser.add_argument("--quantization", help="like the server's flag: fp8, int8, …")
    parser.add_argument("--kv-cache-dtype", default="auto", help="like the server's flag: auto, fp8 or int8")
    parser.add_argument("--tp", type=int, default=1, help="number of GPUs, one rank each")
    parser.add_argument("--ep", action="store_true", help="whole experts on each rank, instead of a share of every expert")
    parser.add_argument("--dp", type=int, default=1, help="with --ep: groups of --tp GPUs with requests of their own, all with all experts")
    parser.add_argument("--pp", type=int, default=1, help="stages, each on --tp GPUs")
    parser.add_argument("--requests", type=int, default=512, help="of mixed")
    parser.add_argument("--disable-custom-all-reduce", action="store_true", help="use only NCCL (also give a --label)")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=lambda text: [int(part) for part in text.split(",")], default=[4096, 16384, 65536, 130000])
    parser.add_argument(
        "--long", type=lambda text: tuple(int(part) for part in text.split(",")), default=(16, 24000), help="of long: prompts, their tokens"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--label", default="")
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--num-kv-blocks", type=int)
    parser.add_argument("--cudagraph-mode", default="full_and_piecewise")
    parser.add_argument("--attention-backend")
    parser.add_argument("--state-each-step", action="store_true", help="recurrent layers write their states in each decode step")
    parser.add_argument("--force-pass", action="append", default=[], help="like the server's flag (also give a --label)")
    args = parser.parse_args()
    if unknown := set(args.work) - set(WORKS):
        parser.error(f"--work accepts {', '.join(WORKS)}, not {', '.join(sorted(unknown))}")
    keep_bytecode()  # as the command-line program does
    if args.state_each_step:
        from benchmarks.state_each_step import write_each_step

        write_each_step()
    bench = Bench(args)
    if "load" in args.work:
        bench.load()
    bench.capture_graphs()
    bench.generate(bench.prompts(4, 64), [8] * 4)
    for work in args.work:
        if work not in ("startup", "load"):
            getattr(bench, "prompts_of_layers" if work == "prompts" else work)()
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in bench.rows)


if __name__ == "__main__":
    main()
