"""Speculative decoding on and off. Prints JSON lines.

    python -m benchmarks.speculation cpu [--model smollm2-135m] [--methods ngram suffix] [--tasks copy chat] [--repeats 5] [--threads 2]
    python -m benchmarks.speculation gpu MODEL_DIR [--methods ngram eagle3] [--tokens 4] [--batches 1 4 16 64] [--rate 0.8] [--repeats 3]
                                        [--profile]

cpu: greedy answers at batch 1, real weights. Tasks that copy (repeat a text, rename in a program, quote a text), free chat, and
    questions of which the head of eagle3, which belongs to smollm2-135m, has not learned the answers. The same
    prompts run with and without speculation, one after another in turns, so that a change of the machine's load meets both. `ratio` is
    the median over the repeats of tokens per second with, divided by without. `equal`: whether all tokens were equal.
gpu: MODEL_DIR needs only a config.json; weights are random, and drafts are accepted with a given probability (0.8: 3.36 tokens a step for 4
    drafts). eagle3 is a head of the model's own shape with a draft vocabulary of 32000, dflash a block drafter of five such layers. How
    many tokens are drafted is decided as in service. `ratio`: tokens per second with and without. `step_ratio`: time of a step that makes
    and checks drafts, divided by that of a plain step, both from the end of one step to the end of the next. `verify_ratio`: the same of
    the model's own part, between device events around it. `draft_ms`: between events around the drafter's part, per draft token of a
    sequence.
    `whole_ratio`: as `ratio`, until the last sequence has ended; the others are of the time in which all run. `whole_rates`: tokens per
    second until then, of each repeat. Rows with `off` alone are of the engine without drafts. `start_s`, `warm_up_s`: what the engine's
    start took, and the runs before the batch's first one that counts.
    `on`, `off`: `draft_tokens` of a sequence and step, mean. `model_ms`: between the events around the model in steps with (on) or without
    (off) drafts; left out where there were none.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, cpu_name, environment

PROGRAM = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""
CHAT = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Give me three tips for learning to cook.",
    "Explain what a database index is.",
]


# Method → what its drafter's config has instead of the model's.
DRAFTERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "eagle3": lambda given: {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(32000, given["vocab_size"]),
    },
    "dflash": lambda given: {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "block_size": 16,
        "layer_types": None,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1 + i * (given["num_hidden_layers"] - 4) // 4 for i in range(5)]},
    },
}


def tasks() -> dict[str, list[str]]:
    """Name of a task → its prompts."""
    paragraphs = [p for p in (ROOT / "benchmarks/texts/ferry.txt").read_text().split("\n\n") if len(p) > 200][:3]
    return {
        "copy": [f"Repeat this text word for word:\n\n{paragraph[:900]}" for paragraph in paragraphs],
        "edit": [f"Here is a program:\n\n```python\n{PROGRAM}```\n\nWrite the same program again with the class named Wallet."],
        "quote": [f"{paragraph[:900]}\n\nQuote the first four sentences of this text exactly." for paragraph in paragraphs],
        "chat": CHAT,
        "questions": (ROOT / "benchmarks/texts/questions.txt").read_text().splitlines()[::10],
    }


def run_cpu(args: argparse.Namespace) -> None:
    from compile_and_serve import LLM, SamplingParams

    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": "cpu",
        "num_threads": args.threads,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }
    for method in args.methods:
        drafts: dict[str, Any] = {"method": method}
        if args.tokens is not None:
            drafts["num_speculative_tokens"] = args.tokens
        if method == "eagle3":
            drafts["model"] = str(ROOT / "tests/support/smollm2_eagle3")
        if method == "suffix":  # the repeats must not find the answers of those before them
            drafts["suffix_decoding_max_cached_requests"] = 0
        with LLM(args.model, **options) as plain, LLM(args.model, speculative_config=drafts, **options) as drafting:
            for task, prompts in tasks().items():
                if args.tasks and task not in args.tasks:
                    continue
                params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
                conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
                rates: dict[str, list[float]] = {"off": [], "on": []}
                answers: dict[str, list[list[int]]] = {}
                before = drafting.core.stats()
                for repeat in range(args.repeats + 1):  # the first warms up
                    for name, llm in (("off", plain), ("on", drafting)):
                        seconds, tokens, answers[name] = 0.0, 0, []
                        for conversation in conversations:  # one at a time
                            start = time.perf_counter()
                            (answer,) = llm.chat(conversation, params, use_tqdm=False)
                            seconds += time.perf_counter() - start
                            tokens += len(answer.outputs[0].token_ids)
                            answers[name].append(list(answer.outputs[0].token_ids))
                        if repeat:
                            rates[name].append(tokens / seconds)
                after = drafting.core.stats()
                drafted = after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens
                accepted = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
                num_drafts = after.spec_decode_num_drafts - before.spec_decode_num_drafts
                ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
                row = {
                    "benchmark": "speculation cpu",
                    "model": args.model,
                    "method": method,
                    "task": task,
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_min": round(min(ratios), 3),
                    "off_tokens_per_second": round(statistics.median(rates["off"]), 1),
                    "on_tokens_per_second": round(statistics.median(rates["on"]), 1),
                    "tokens": sum(map(len, answers["on"])),
                    "equal": answers["on"] == answers["off"],
                    "acceptance_rate": round(accepted / max(1, drafted), 3),
                    "mean_accepted_length": round(1 + accepted / max(1, num_drafts), 2),
                    "cpu": cpu_name(),
                    "threads": args.threads,
                    **environment(),
                }
                print(json.dumps(row), flush=True)


def run_gpu(args: argparse.Namespace) -> None:
    # Each engine has a process of its own, which frees all memory. All import what they need while the first one starts.
    pools = [ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) for _ in (None, *args.methods)]
    imports = [pool.submit(_import) for pool in pools]
    plain: dict[int, dict[str, float]] = {}
    for pool, started, method in zip(pools, imports, (None, *args.methods), strict=True):
        started.result()
        with pool, tempfile.TemporaryDirectory() as folder:
            drafts: dict[str, Any] = {}
            if method is not None:
                drafts = {"method": method, "num_speculative_tokens": args.tokens, "synthetic_acceptance_rate": args.rate}
            if method in DRAFTERS:
                drafts["model"] = folder
                given = json.loads((Path(args.model) / "config.json").read_text())
                given.pop("quantization_config", None)  # of the model alone
                (Path(folder) / "config.json").write_text(json.dumps(given | DRAFTERS[method](given)))
            figures = pool.submit(_measure, args, drafts or None, plain).result()
            plain = plain or figures


def _measure(args: argparse.Namespace, drafts: dict[str, Any] | None, plain: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Batch → figures of decodes of `--max-tokens` tokens, the best of the repeats: while all sequences run, and (whole) until the last has
    ended. Prints each batch's row once it is known. plain: the figures without drafts; empty if they are measured now.
    """
    from benchmarks.gpu_timing import environment as device_and_versions
    from benchmarks.gpu_timing import kernels_of
    from compile_and_serve.runtime.engine.client import SyncEngine
    from compile_and_serve.runtime.options import make_engine_config
    from compile_and_serve.serve.cli.bench.offline import run_requests

    began = time.perf_counter()
    config = make_engine_config(
        args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=4096,
        max_num_seqs=max(args.batches),
        enable_prefix_caching=False,
        speculative_config=drafts,
        device=args.device,
    )
    engine = SyncEngine(config)
    start_seconds = time.perf_counter() - began
    rng = random.Random(0)
    results = {}
    for batch in args.batches:
        began = time.perf_counter()
        prompts = [[rng.randrange(engine.info.vocab_size) for _ in range(128)] for _ in range(batch)]
        for _ in range(3):  # steps that ask for graphs, and the idle moments that capture them
            run_requests(engine, prompts, [64] * batch)
            while engine.core._idle(requests_wait=True):  # full graphs alone: the rest is for prompts, which do not count
                pass
        warm_up_seconds = time.perf_counter() - began
        best: dict[str, float] = {}
        whole_rates = []
        for _ in range(args.repeats):
            with DeviceTimes(engine.core.executor, batch, args.tokens) as times:
                traces = run_requests(engine, prompts, [args.max_tokens] * batch)
            trace = max(traces, key=lambda one: one.times[-1])
            start = max(one.times[0] for one in traces)
            end = min(one.times[-1] for one in traces)
            steps = [time for time in trace.times if start <= time <= end]
            gaps = [later - earlier for earlier, later in pairwise(steps)]
            new = sum(one.output_tokens for one in traces) - batch
            num_steps = sum(len(one.times) - 1 for one in traces)  # of single sequences
            whole = new / (max(one.times[-1] for one in traces) - min(one.times[0] for one in traces))
            whole_rates.append(round(whole, 1))
            chunks = [chunk for one in traces for chunk in zip(one.times, one.chunk_tokens, strict=True)]
            rate = sum(count for time, count in chunks if start < time <= end) / (end - start)
            if rate > best.get("tokens_per_second", 0.0):
                best = {
                    "tokens_per_second": round(rate, 1),
                    "step_ms": round(1e3 * statistics.median(gaps), 4),
                    "tokens_per_step": round(new / num_steps, 3),
                    "draft_tokens": round(sum(one.draft_tokens for one in traces) / num_steps, 3),
                } | times.figures(is_drafting=drafts is not None)
        results[batch] = best = best | {"whole_tokens_per_second": max(whole_rates)}
        row: dict[str, Any] = {"benchmark": "speculation gpu", "model": args.model, "batch": batch}
        if drafts is None:
            row["off"] = best
        else:
            on, off = best, plain[batch]
            row |= {
                "method": drafts["method"],
                "draft_tokens": args.tokens,
                "step_ratio": round(on["step_ms"] / off["step_ms"], 3),
                "ratio": round(on["tokens_per_second"] / off["tokens_per_second"], 3),
                "whole_ratio": round(on["whole_tokens_per_second"] / off["whole_tokens_per_second"], 3),
                "off": off,
                "on": on,
            }
            if "model_ms" in on:
                row["verify_ratio"] = round(on["model_ms"] / off["model_ms"], 3)
        row |= {"whole_rates": whole_rates, "start_s": round(start_seconds, 1), "warm_up_s": round(warm_up_seconds, 1)}
        print(json.dumps(row | device_and_versions()), flush=True)
        if args.profile:
            work = {"benchmark": "speculation profile", "drafts": drafts, "batch": batch}
            print(json.dumps(work | kernels_of(lambda: run_requests(engine, prompts, [64] * batch), top=24)), flush=True)
    stats = engine.core.stats()
    replays = {f"replays_{mode}": count for mode, count in stats.graph_replays.items()}
    named = drafts and {name: value for name, value in drafts.items() if name != "model"}  # a temporary folder
    print(json.dumps({"benchmark": "speculation gpu", "drafts": named, "replays": replays}), flush=True)
    engine.shutdown()
    return results


def _import() -> None:
    importlib.import_module("compile_and_serve.runtime.engine.client")


class DeviceTimes:
    """Records device events around the parts of the steps of `batch` decodes that an executor in this process runs inside the `with` block.

    A part that the host launches late includes the host's time to launch it.
    """

    def __init__(self, executor: Any, batch: int, max_drafts: int) -> None:
        self._runner, self._batch, self._max_drafts = executor.worker.runner, batch, max_drafts
        self._parts: dict[str, list[tuple[Any, Any]]] = {"plain": [], "verify": [], "propose": [], "follow": []}
        self._num_proposed = 0  # draft tokens
        self._restore: list[tuple[Any, str]] = []

    def __enter__(self) -> DeviceTimes:
        def step_kind(step: Any) -> str | None:
            if step.num_seqs != self._batch or step.max_query_len > 1 + self._max_drafts:
                return None
            return "plain" if step.max_query_len == 1 else "verify"

        def propose_kind(last_tokens: Any, wanted: Any) -> str | None:
            if len(wanted) != self._batch:
                return None
            self._num_proposed += sum(map(len, wanted.values()))
            return "propose"

        def follow_kind(target: Any) -> str | None:
            return "follow" if step_kind(target.step) == "verify" else None

        runner = self._runner
        for steps in {id(one): one for one in (runner.steps, runner.plain_steps, runner._drafted_steps) if one}.values():
            self._record(steps, "run", step_kind)
        if runner.drafter is not None:
            self._record(runner.drafter, "propose", propose_kind)
            self._record(runner.drafter, "follow", follow_kind)
        return self

    def _record(self, owner: Any, method: str, kind_of: Callable[..., str | None]) -> None:
        work, platform = getattr(owner, method), self._runner.platform

        def recorded(*args: Any, **options: Any) -> Any:
            kind = kind_of(*args)
            begin = platform.record_timed_event()
            result = work(*args, **options)
            if kind is not None:
                self._parts[kind].append((begin, platform.record_timed_event()))
            return result

        setattr(owner, method, recorded)
        self._restore.append((owner, method))

    def __exit__(self, *error: object) -> None:
        for owner, method in self._restore:
            delattr(owner, method)  # uncovers the class's method
        self._runner.platform.synchronize()

    def figures(self, *, is_drafting: bool) -> dict[str, float]:
        """`model_ms`: median, of steps with drafts if is_drafting. `draft_ms`: mean, per draft token of a sequence."""
        ms = {kind: [1e3 * end.seconds_since(begin) for begin, end in spans] for kind, spans in self._parts.items() if spans}
        found = {}
        if model := ms.get("verify" if is_drafting else "plain"):
            found["model_ms"] = round(statistics.median(model), 4)
        if "propose" in ms:
            total = sum(ms["propose"]) + sum(ms["follow"])
            found["draft_ms"] = round(total / (self._num_proposed / self._batch), 4)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    cpu = kinds.add_parser("cpu")
    cpu.add_argument("--model", default="smollm2-135m")
    cpu.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    cpu.add_argument("--tasks", nargs="+", choices=list(tasks()), help="By default all.")
    cpu.add_argument("--repeats", type=int, default=5)
    cpu.add_argument("--threads", type=int, default=2)
    cpu.add_argument("--max-tokens", type=int, default=160)
    cpu.add_argument("--tokens", type=int, help="num_speculative_tokens")
    gpu = kinds.add_parser("gpu")
    gpu.add_argument("model", type=lambda given: str(Path(given)))
    gpu.add_argument("--methods", nargs="+", choices=("ngram", *DRAFTERS), default=["ngram", "eagle3"])
    gpu.add_argument("--tokens", type=int, default=4, help="num_speculative_tokens")
    gpu.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    gpu.add_argument("--rate", type=float, default=0.8, help="synthetic acceptance rate")
    gpu.add_argument("--max-tokens", type=int, default=512)
    gpu.add_argument("--repeats", type=int, default=3)
    gpu.add_argument("--dtype", default="bfloat16")
    gpu.add_argument("--device", default="cuda")
    gpu.add_argument("--profile", action="store_true", help="also prints the kernels of a prefill and decodes of 64 tokens")
    args = parser.parse_args()
    (run_cpu if args.kind == "cpu" else run_gpu)(args)


if __name__ == "__main__":
    main()
