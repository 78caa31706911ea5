"""Load on 1, 2 … replicas from the moment that they are ready, without HTTP, and what each replica did. Prints JSON lines.

    python -m benchmarks.replicas MODEL [--replicas 1 2] [--requests 256] [--prompt 512] [--new 128] [--runs 3] [--quantization fp8]

MODEL needs only a config.json: weights are random, prompts too. All requests (`--requests` for each replica) are sent at once, greedy, and
run to their full length. Seconds are those of the client: `latency`, `ttft` (to the first token), `gap_max` (the longest between two
outputs of one request). `tpot_ms`: between two tokens of a request. `scaling`: tokens per second as a multiple of the first row's of the
same run, `nth`. Of each replica: `decode_ms` and `slowest_ms` (between two reports of steps: the median of steps without prompts, and the
longest), `replays` (steps that replayed a full CUDA graph), `host_gap_s` (the device had nothing to do), `preemptions`, and
`pending_work` as
in `/ready`. A replica that is slow as a whole shows in `decode_ms` beside the others', one that stands still in `slowest_ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common import environment
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.replicas import DataParallelClient, make_client
from compile_and_serve.runtime.messages import EngineRequest, StepOutputs
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams

Client = AsyncEngineClient | DataParallelClient
Arrivals = Sequence[tuple[float, StepOutputs]]  # seconds since the load began


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=256, help="for each replica")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--quantization")
    arguments = parser.parse_args(argv)
    first: list[float] = []
    for replicas in arguments.replicas:
        rows = asyncio.run(_measure(arguments, replicas))
        first = first or [row["tok_s"] for row in rows]
        for row, base in zip(rows, first, strict=True):
            row["scaling"] = round(row["tok_s"] / base, 2)
            print(json.dumps(row | environment()), flush=True)


async def _measure(arguments: argparse.Namespace, replicas: int) -> list[dict[str, Any]]:
    config = make_engine_config(
        arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=arguments.device,
        quantization=arguments.quantization,
        data_parallel_size=replicas,
        enable_prefix_caching=False,
    )
    client = make_client(config)
    info = await client.start()
    rng = random.Random(0)
    count = arguments.requests * replicas
    rows = []
    try:
        outputs = client.outputs()
        for nth in range(1, arguments.runs + 1):
            requests = [
                EngineRequest(
                    request_id=f"{nth}-{index}",
                    prompt_token_ids=[rng.randrange(info.vocab_size) for _ in range(arguments.prompt)],
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=arguments.new, ignore_eos=True),
                )
                for index in range(count)
            ]
            arrivals = await _load(client, outputs, requests)
            row = {"replicas": replicas, "nth": nth, "requests": count, "device": info.device}
            row |= of_requests(arrivals, prompt=arguments.prompt, new=arguments.new)
            row["by_replica"] = [of_replica(arrivals, replica) for replica in range(replicas)]
            rows.append({"model": arguments.model, "quant": arguments.quantization, **row})
    finally:
        await client.shutdown(drain=False)
    return rows


async def _load(client: Client, outputs: Any, requests: Sequence[EngineRequest]) -> Arrivals:
    started = time.perf_counter()

    async def send() -> None:
        for request in requests:
            await client.add_request(request)

    sending, left, arrivals = asyncio.create_task(send()), len(requests), []
    while left:
        step = await anext(outputs)
        arrivals.append((time.perf_counter() - started, step))
        for output in step.outputs:
            if output.error is not None:
                raise RuntimeError(f"Request {output.request_id} failed: {output.error}")
            left -= output.finish_reason is not None
    await sending
    return arrivals


def of_requests(arrivals: Arrivals, *, prompt: int, new: int) -> dict[str, Any]:
    """What the requests' client saw. prompt, new: tokens of each request."""
    times: dict[str, list[float]] = {}
    for at, step in arrivals:
        for output in step.outputs:
            times.setdefault(output.request_id, []).append(at)
    latency = [of_one[-1] for of_one in times.values()]
    tpot = [(of_one[-1] - of_one[0]) / max(1, new - 1) * 1e3 for of_one in times.values()]
    return {
        "tok_s": round(len(times) * (prompt + new) / arrivals[-1][0], 1),
        "latency_s": _percentiles(latency),
        "ttft_s": _percentiles([of_one[0] for of_one in times.values()]),
        "tpot_ms": _percentiles(tpot),
        "gap_max_s": round(max((after - before for of_one in times.values() for before, after in pairwise(of_one)), default=0.0), 3),
    }


def of_replica(arrivals: Arrivals, replica: int) -> dict[str, Any]:
    """What one replica did, from the stats that its steps sent. Counters are since its start, except for the times."""
    steps = [(at, step) for at, step in arrivals if step.replica == replica and step.stats and step.stats.step_tokens]
    if not steps:
        return {"requests": 0}
    seconds = [(after - before, step) for (before, _), (after, step) in pairwise(steps)]
    decodes = [one for one, step in seconds if step.stats and step.stats.step_tokens == len(step.outputs)]
    stats = steps[-1][1].stats
    assert stats is not None
    return {
        "requests": sum(output.finish_reason is not None for _, step in steps for output in step.outputs),
        "last_token_s": round(steps[-1][0], 3),
        "steps": len(steps),
        "decode_ms": round(statistics.median(decodes) * 1e3, 3) if decodes else None,
        "slowest_ms": round(max((one for one, _ in seconds), default=0.0) * 1e3, 1),
        "replays": stats.graph_replays.get("full", 0),
        "host_gap_s": round(stats.host_gap_seconds, 3),
        "preemptions": stats.num_preemptions,
        "to_come": stats.pending_work,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for name, share in (("p50", 0.5), ("p99", 0.99))}


if __name__ == "__main__":
    main()
