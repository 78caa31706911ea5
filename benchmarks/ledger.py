"""What the ledger of requests costs: decode throughput of one engine with and without it, and with the canary, in turns.

    python -m benchmarks.ledger MODEL [--streams 64] [--tokens 128] [--turns 5]

One JSON line: tokens/s of each (the median of the turns), and the ratios to the engine without: the medians over the turns, with their
quartiles. An engine is built once for each of the three; turns alternate between them. On a CPU, ratios are also those of the processor
time, which other programs on the machine disturb less, and of its least in any turn, which they disturb least.

    python -m benchmarks.ledger --parts [--streams 64]

What the ledger adds to a decode step, alone, in microseconds of processor time: the engine's sums and their message, and what the server
notes of each sequence.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.common import cpu_name, environment
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.ledger.records import StepRan, StepTotals
from compile_and_serve.runtime.messages import EngineRequest, EngineStats
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.block_pool import BlockPool
from compile_and_serve.runtime.scheduler.step_ledger import StepLedger
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, step_without_tokens
from compile_and_serve.runtime.text.output_processor import CompletionDelta
from compile_and_serve.serve.ledger.record import SequenceRecord

KINDS: dict[str, dict[str, Any]] = {
    "off": {"request_ledger": False},
    "ledger": {"request_ledger": True},
    "canary": {"request_ledger": True, "verify_state": True},
}


def decode(core: EngineCore, streams: int, tokens: int, turn: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, for a token of `streams` requests that all decode: from the first step after the last prompt
    on.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(streams):
        prompt = [(turn * 7919 + number * 131 + place * 17) % (core.info.vocab_size - 20) + 10 for place in range(32)]
        core.add_request(EngineRequest(request_id=f"{turn} {number}", prompt_token_ids=prompt, sampling_params=params))
    began: tuple[float, float] | None = None
    first, count = set[str](), 0
    while core.has_work():
        outputs = core.step().outputs
        if began is not None:
            count += sum(len(output.new_token_ids) for output in outputs)
        first |= {output.request_id for output in outputs}
        if began is None and len(first) == streams:
            began = time.perf_counter(), time.process_time()
    assert began is not None
    return (time.perf_counter() - began[0]) / count, (time.process_time() - began[1]) / count


def ratios(off: Sequence[float], others: Sequence[float]) -> list[float]:
    """Quartiles of how much faster a turn was than the turn beside it without a ledger."""
    return [round(one, 4) for one in statistics.quantiles([a / b for a, b in zip(off, others, strict=True)], n=4)]


def parts(streams: int, rounds: int = 2000) -> dict[str, float]:
    """Microseconds for a step of so many decodes: of the engine, of the message (encoded and decoded), of the server."""
    scheduled = step_without_tokens(0, None)
    scheduled.num_scheduled_tokens = {f"request-{number}": 1 for number in range(streams)}
    scheduled.total_num_scheduled_tokens = scheduled.num_decodes = streams
    result = ModelRunnerOutput(step=0, sampled_token_ids={}, logprobs={}, prompt_logprobs={}, errors={}, ran=StepRan("full", "", 0))
    ledger, stats, pool = StepLedger(weight_bytes=1 << 30, page_bytes=1 << 20), EngineStats(), BlockPool(1000)
    plain = msgspec.msgpack.encode(stats)
    records = [SequenceRecord(32, 0.0, first_token=1.0) for _ in range(streams)]
    delta, source = CompletionDelta(index=0, text="", token_ids=[1]), _Source()

    def measured(work: Callable[[], object]) -> float:
        times = []
        for _ in range(rounds):
            began = time.thread_time()
            work()
            times.append(time.thread_time() - began)
        return statistics.median(times) * 1e6

    def message(encoded: bytes, one: EngineStats) -> None:
        msgspec.msgpack.encode(one)
        msgspec.msgpack.decode(encoded, type=EngineStats)

    def engine() -> None:
        ledger.add(scheduled, result, 0.01, [pool])
        ledger.add_to(stats, {"prefix.first": 64})

    def server() -> None:
        for one in records:
            one.take(delta, source)

    found = {"engine": measured(engine)}
    told = msgspec.msgpack.encode(stats)
    found["message"] = measured(lambda: message(told, stats)) - measured(lambda: message(plain, EngineStats()))
    found["server"] = measured(server)
    return {name: round(value, 1) for name, value in found.items()}


class _Source:
    """See `StepSource`."""

    now, step_totals, output_seconds = 0.0, StepTotals(), 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--num-kv-blocks", type=int, default=None)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--num-threads", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.parts:
        figures: dict[str, Any] = {"benchmark": "ledger parts", "streams": arguments.streams, "device": cpu_name()}
        print(json.dumps(figures | {"microseconds_per_step": parts(arguments.streams), **environment()}))
        return
    if arguments.model is None:
        parser.error("name a model, or --parts")
    common: dict[str, Any] = {
        "max_num_seqs": arguments.streams,
        "max_model_len": 32 + arguments.tokens,
        "dtype": arguments.dtype,
        "load_format": arguments.load_format,
        "enforce_eager": arguments.enforce_eager,
        "num_threads": arguments.num_threads,
        "num_kv_blocks": arguments.num_kv_blocks or arguments.streams * (-(-(32 + arguments.tokens) // 16) + 2),
    }
    cores = {name: EngineCore(make_engine_config(arguments.model, **common, **options)) for name, options in KINDS.items()}
    for core in cores.values():
        while core.idle():
            pass
        decode(core, arguments.streams, 16, 1000)
    gc.freeze()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cores}
    for turn in range(arguments.turns):
        for name, core in list(cores.items())[:: 1 if turn % 2 else -1]:
            times[name].append(decode(core, arguments.streams, arguments.tokens, turn))
    wall, cpu = ({name: [one[which] for one in found] for name, found in times.items()} for which in (0, 1))
    device = cores["off"].info.device
    figures = {
        "benchmark": "ledger",
        "model": arguments.model.rstrip("/").rsplit("/", 1)[-1],
        "streams": arguments.streams,
        "turns": arguments.turns,
        "device": cpu_name() if device == "cpu" else device,
        "tokens_per_second": {name: round(1 / statistics.median(values), 1) for name, values in wall.items()},
        "ratio": {name: ratios(wall["off"], wall[name]) for name in ("ledger", "canary")},
    }
    if device == "cpu":
        figures["cpu_ratio"] = {name: ratios(cpu["off"], cpu[name]) for name in ("ledger", "canary")}
        figures["least_cpu_ratio"] = {name: round(min(cpu["off"]) / min(cpu[name]), 4) for name in ("ledger", "canary")}
    figures |= environment()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
