"""The scheduler's time for one step, in microseconds: `schedule()` and `update()`, for decodes and for admissions.

    python -m benchmarks.scheduler [--num-seqs 256] [--steps 1024]

Prints one JSON line per case. Decodes stand at all offsets within a block, so that each step needs num_seqs / block_size new
blocks, as in a server that has run for a while.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time

from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
VOCAB = 50_000


def make_requests(count: int, prompt_len: int, max_tokens: int, *, spread: int = 0) -> list[EngineRequest]:
    """Requests with prompts of prompt_len random tokens, plus up to `spread` more."""
    rng = random.Random(0)
    return [
        EngineRequest(
            request_id=f"request-{index}",
            prompt_token_ids=[rng.randrange(1, VOCAB) for _ in range(prompt_len + index % (spread + 1))],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            eos_token_ids=[0],
        )
        for index in range(count)
    ]


def sample(step: SchedulerOutput, prompts_left: dict[str, int]) -> ModelRunnerOutput:
    """A runner's output: token 1 for each request whose prompt is complete. prompts_left: prompt tokens still to compute."""
    tokens: dict[str, list[int]] = {}
    for request_id, count in step.num_scheduled_tokens.items():
        left = prompts_left.get(request_id, 0)
        prompts_left[request_id] = left = max(0, left - count)
        if left == 0:
            tokens[request_id] = [1]
    return ModelRunnerOutput(step=step.step, sampled_token_ids=tokens, logprobs={}, prompt_logprobs={}, errors={})


def percentiles(seconds: list[float]) -> dict[str, float]:
    micros = sorted(value * 1e6 for value in seconds)
    return {"p50": round(statistics.median(micros), 1), "p90": round(micros[len(micros) * 9 // 10], 1), "max": round(micros[-1], 1)}


def bench_decode(num_seqs: int, num_steps: int) -> dict[str, object]:
    """A full batch of decodes without admissions or ends."""
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    blocks_per_seq = (64 + num_steps) // BLOCK_SIZE + 4
    scheduler = Scheduler(
        config, CacheConfig(block_size=BLOCK_SIZE), num_blocks=blocks_per_seq * num_seqs, max_model_len=blocks_per_seq * BLOCK_SIZE
    )
    requests = make_requests(num_seqs, 16, num_steps + 32, spread=BLOCK_SIZE - 1)
    prompts_left = {request.request_id: len(request.prompt_token_ids) for request in requests}
    for request in requests:
        scheduler.add_request(request)
    schedule_s: list[float] = []
    update_s: list[float] = []
    gc.collect()
    while len(schedule_s) < num_steps:
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None
        result = sample(step, prompts_left)
        sampled = time.perf_counter()
        scheduler.update(step, result)
        if step.total_num_scheduled_tokens == num_seqs == len(step.num_scheduled_tokens):
            schedule_s.append(scheduled - start)
            update_s.append(time.perf_counter() - sampled)
    return {"case": "decode", "num_seqs": num_seqs, "schedule_us": percentiles(schedule_s), "update_us": percentiles(update_s)}


def bench_admission(prompt_len: int, num_requests: int) -> dict[str, object]:
    """Prompts that arrive one by one at an empty scheduler: first uncached, then with a cached prefix."""
    blocks = (prompt_len // BLOCK_SIZE + 2) * num_requests
    config = SchedulerConfig(max_num_batched_tokens=prompt_len)
    scheduler = Scheduler(config, CacheConfig(block_size=BLOCK_SIZE), num_blocks=blocks, max_model_len=prompt_len + 16)
    times: dict[str, list[float]] = {
        "add_cold": [],
        "schedule_cold": [],
        "update_cold": [],
        "add_hit": [],
        "schedule_hit": [],
        "update_hit": [],
    }
    for kind in ("cold", "hit"):
        for request in make_requests(num_requests, prompt_len, 1):
            start = time.perf_counter()
            scheduler.add_request(request)
            added = time.perf_counter()
            step = scheduler.schedule()
            scheduled = time.perf_counter()
            assert step is not None
            result = sample(step, {})
            sampled = time.perf_counter()
            [output] = scheduler.update(step, result)
            times[f"update_{kind}"].append(time.perf_counter() - sampled)
            times[f"add_{kind}"].append(added - start)
            times[f"schedule_{kind}"].append(scheduled - added)
            assert (output.num_cached_tokens > 0) == (kind == "hit")
    return {"case": "admission", "prompt_len": prompt_len} | {f"{name}_us": percentiles(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1024)
    options = parser.parse_args()
    about = {"benchmark": "scheduler", "python": platform.python_version(), "machine": platform.processor() or platform.machine()}
    for num_seqs in sorted({1, 16, options.num_seqs}):
        print(json.dumps(about | bench_decode(num_seqs, options.steps)), flush=True)
    for prompt_len in (512, 8192):
        print(json.dumps(about | bench_admission(prompt_len, 32)), flush=True)


if __name__ == "__main__":
    main()
