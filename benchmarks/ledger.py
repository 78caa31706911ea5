"""What the ledger of requests costs: decode throughput of one engine with and without it, and with the canary, in turns.

    python benchmarks/ledger.py MODEL [--streams 64] [--tokens 128] [--turns 5]

One JSON line: tokens/s of each (the median of the turns), and the ratios to the engine without. An engine is built once for each of the
three; turns alternate between them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "off": {"request_ledger": False},
    "ledger": {"request_ledger": True},
    "canary": {"request_ledger": True, "verify_state": True},
}


def tokens_per_second(core: EngineCore, streams: int, tokens: int, turn: int) -> float:
    """Of `streams` requests that all decode, from the first step after the last prompt on."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(streams):
        prompt = [(turn * 7919 + number * 131 + place * 17) % (core.info.vocab_size - 20) + 10 for place in range(32)]
        core.add_request(EngineRequest(request_id=f"{turn} {number}", prompt_token_ids=prompt, sampling_params=params))
    began: float | None = None
    first, count = set[str](), 0
    while core.has_work():
        outputs = core.step().outputs
        if began is not None:
            count += sum(len(output.new_token_ids) for output in outputs)
        first |= {output.request_id for output in outputs}
        if began is None and len(first) == streams:
            began = time.perf_counter()
    assert began is not None
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--num-kv-blocks", type=int, default=None)
    arguments = parser.parse_args()
    common: dict[str, Any] = {
        "max_num_seqs": arguments.streams,
        "max_model_len": 32 + arguments.tokens,
        "dtype": arguments.dtype,
        "load_format": arguments.load_format,
        "num_kv_blocks": arguments.num_kv_blocks or arguments.streams * (-(-(32 + arguments.tokens) // 16) + 2),
    }
    cores = {name: EngineCore(make_engine_config(arguments.model, **common, **options)) for name, options in KINDS.items()}
    for core in cores.values():
        while core.idle():
            pass
        tokens_per_second(core, arguments.streams, 16, 1000)
    gc.freeze()
    speeds: dict[str, list[float]] = {name: [] for name in cores}
    for turn in range(arguments.turns):
        for name, core in list(cores.items())[:: 1 if turn % 2 else -1]:
            speeds[name].append(tokens_per_second(core, arguments.streams, arguments.tokens, turn))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    figures = {
        "benchmark": "ledger",
        "model": arguments.model,
        "streams": arguments.streams,
        "device": cores["off"].info.device,
        "torch": torch.__version__,
        "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
        "ratio": {name: round(value / medians["off"], 4) for name, value in medians.items()},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
