"""Sleep and wake-up of one engine: memory freed, seconds, and whether the tokens stay equal. Prints a JSON line for each level.

    python -m benchmarks.sleep MODEL [--rounds 3] [--device auto] [--dtype auto]

`freed_gib`: device memory (on the CPU, memory of the process) that sleep gives back. `awake_gib`: what the engine held before.
`sleep_s`, `wake_s`: medians. `equal`: whether greedy tokens of 8 prompts are those from before the first sleep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.common import environment
from compile_and_serve import LLM, SamplingParams
from compile_and_serve.custom_ops.platform import platform_of, resolve_device
from compile_and_serve.custom_ops.platforms.protocol import Platform

GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3, help="sleeps of each level")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    platform = platform_of(resolve_device(arguments.device, None))
    began = time.perf_counter()
    with LLM(arguments.model, device=arguments.device, dtype=arguments.dtype) as llm:
        start_s = time.perf_counter() - began
        before = _tokens(llm)
        for level in (1, 2):
            sleeps, wakes, freed, equal = [], [], [], True
            awake = _held(platform)
            for _ in range(arguments.rounds):
                sleeps.append(_seconds(lambda level=level: llm.sleep(level)))
                freed.append(awake - _held(platform))
                wakes.append(_seconds(llm.wake_up))
                equal = equal and _tokens(llm) == before
            line = {
                "sleep": level,
                "model": arguments.model,
                "device": platform.name,
                "awake_gib": round(awake / GIB, 2),
                "freed_gib": round(min(freed) / GIB, 2),
                "sleep_s": round(statistics.median(sleeps), 3),
                "wake_s": round(statistics.median(wakes), 3),
                "start_s": round(start_s, 1),
                "equal": equal,
                **environment(),
            }
            print(json.dumps(line), flush=True)


def _tokens(llm: LLM) -> list[list[int]]:
    prompts: list[Any] = [{"prompt_token_ids": list(range(10 + i, 74 + i))} for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def _held(platform: Platform) -> int:
    """Bytes that this process holds."""
    if platform.shares_host_memory:
        return platform.used_bytes()
    memory = platform.memory()
    return memory.total - memory.free


def _seconds(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
