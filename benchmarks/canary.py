"""Whether the canary (`--verify-state`) cries without a reason: an engine under a mixed load for some time, and what was checked.

    python -m benchmarks.canary MODEL [--seconds 600] [--interval 0.25]

The load has prompts that share prefixes and that do not, greedy and random sampling, cancelled requests, and more tokens than the KV cache
holds, so that requests are preempted and cached blocks are evicted. One JSON line; the exit status is 1 if the canary found something.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.common import cpu_name, environment
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams

CONVERSATIONS = 12  # that later prompts go on from


class Load:
    """Keeps `streams` requests unfinished. rng: all of the load comes from it."""

    def __init__(self, core: EngineCore, streams: int, max_len: int, rng: random.Random) -> None:
        self._core, self._streams, self._max_len, self._rng = core, streams, max_len, rng
        self._vocab_size = core.info.vocab_size
        self._known: list[list[int]] = []  # prompts that others begin with
        self._unfinished: dict[str, int] = {}  # request → step at which it is cancelled; -1: it is not
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """One step of the engine."""
        rng, counts = self._rng, self.counts
        while len(self._unfinished) < self._streams:
            self._add()
        for output in self._core.step().outputs:
            counts["tokens"] += len(output.new_token_ids)
            counts["cached_tokens"] += output.num_cached_tokens
            if output.finish_reason is not None:
                counts[output.finish_reason] += 1
                self._unfinished.pop(output.request_id, None)
        counts["steps"] += 1
        due = [name for name, step in self._unfinished.items() if step == counts["steps"]]
        self._core.abort(due)
        counts["cancelled"] += len(due)
        for name in due:
            del self._unfinished[name]
        if rng.random() < 0.0005:
            self._known.clear()

    def _add(self) -> None:
        rng, number = self._rng, self.counts["requests"]
        prompt: list[int] = []
        if self._known and rng.random() < 0.6:
            prompt = rng.choice(self._known)[: rng.randrange(8, self._max_len // 2)].copy()
        prompt += [rng.randrange(10, self._vocab_size) for _ in range(rng.randrange(1, self._max_len // 4))]
        self._known = [*self._known[-CONVERSATIONS + 1 :], prompt]
        options: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.9, "top_p": 0.9, "seed": number},
            {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2},
            {"temperature": 0.0, "prompt_logprobs": 1},
        ]
        weights = [6, 3, 2, 1]
        params = SamplingParams(max_tokens=rng.randrange(1, self._max_len // 4), ignore_eos=True, **rng.choices(options, weights)[0])
        name = f"request {number}"
        self._core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params))
        self._unfinished[name] = self.counts["steps"] + rng.randrange(1, 60) if rng.random() < 0.15 else -1
        self.counts["requests"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--interval", type=float, default=None, help="seconds between two rounds of the canary")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--num-kv-blocks", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--num-threads", type=int, default=1)
    arguments = parser.parse_args()
    config = make_engine_config(
        arguments.model,
        verify_state=True,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_model_len=arguments.max_model_len,
        num_kv_blocks=arguments.num_kv_blocks,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        enforce_eager=arguments.enforce_eager,
        num_threads=arguments.num_threads,
    )
    core = EngineCore(config)
    assert core.canaries is not None
    [canary] = core.canaries
    if arguments.interval is not None:
        canary.seconds = arguments.interval
    load = Load(core, arguments.streams, arguments.max_model_len, random.Random(0))
    began = time.monotonic()
    while (seconds := time.monotonic() - began) < arguments.seconds:
        load.step()
    stats = core.stats()
    figures = {
        "benchmark": "canary",
        "model": arguments.model.rstrip("/").rsplit("/", 1)[-1],
        "device": core.info.device if core.info.device != "cpu" else cpu_name(),
        "seconds": round(seconds, 1),
        "load": dict(load.counts),
        "preemptions": stats.num_preemptions,
        "blocks": stats.num_total_blocks,
        "blocks_checked": canary.num_checked,
        "blocks_recomputed": stats.canary_recomputed_blocks,
        "tables_checked": canary.num_tables,
        "findings": canary.findings,
        **environment(),
    }
    print(json.dumps(figures))
    core.shutdown()
    sys.exit(1 if canary.findings else 0)


if __name__ == "__main__":
    main()
