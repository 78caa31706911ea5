"""What one key's requests cost the engine's host in each step, beside another key's decodes. Prints JSON lines.

    python benchmarks/host_work.py [--cases beams,cancels] [--seconds 4] [--vocab-size 151936] [--against OTHER_CHECKOUT] [--profile beams]

A tiny Llama of random weights on the CPU. Key B decodes in half of the 8 batch slots. `alone`: nobody else. `fair`: A decodes in the other
half. Then A does what is named. A turn is what the engine's process does between two waits for the device: it decodes and handles the
messages that have come, schedules, launches, takes the result and encodes the outputs. `host_us` is a turn's time without what a GPU would
do (the model, sampling, log-probabilities), and `receive`, `schedule`, `launch`, `result`, `update` and `send` are its parts: medians over
the turns, so that a busy machine's pauses do not count. `host_p99_us` has them. `b_tokens`: B's per turn, at most 4. `api_us`: per turn,
what A's requests cost an API process in the search of beams and in writing log-probabilities; `api_p50_us`: at one go.

--against: the other checkout's figures in the same run, in turns; the fastest of each. `ratio`: this checkout's host_us by the other's.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from compile_and_serve.runtime.beam_search import BeamSearch
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import (
    AbortRequests,
    AddRequest,
    EngineRequest,
    RequestOutput,
    Sibling,
    StepOutputs,
    Tenant,
    ToEngine,
    TokenLogprobs,
)
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.serve.protocol.logprobs import LogprobsWriter

SLOTS, MAX_LEN = 8, 8192
PARTS = ("receive", "schedule", "launch", "result", "update", "send")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


class Clock:
    """Seconds by name. `device` is taken from the part that it lies in."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._device = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began, device = time.perf_counter(), self._device
        yield
        self.seconds[name] += time.perf_counter() - began - (self._device - device)  # type: ignore[assignment]

    def on_device(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time is the device's."""

        def run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self._device += time.perf_counter() - began

        return run

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return work(*arguments, **options)

        return run


class Bench:
    """An engine core, and two keys' requests."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
        self.vocab_size = vocab_size
        options = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "device": "cpu", "num_threads": 1}
        self.core = EngineCore(make_engine_config(str(folder), max_num_seqs=SLOTS, num_kv_blocks=8192, block_size=16, **options))
        self.clock = Clock()
        clock, runner = self.clock, self.core.executor.worker.runner  # type: ignore[attr-defined]
        runner._run, runner.sampler.sample = clock.on_device(runner._run), clock.on_device(runner.sampler.sample)
        runner._prompt_results = clock.on_device(runner._prompt_results)
        scheduler, executor = self.core._scheduler, self.core.executor
        scheduler.schedule = clock.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update = clock.timed("update", scheduler.update)  # type: ignore[method-assign]
        executor.launch = clock.timed("launch", executor.launch)  # type: ignore[method-assign]
        executor.result = clock.timed("result", executor.result)  # type: ignore[method-assign]
        self.encoder, self.to_engine = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)
        self.outputs_decoder = msgspec.msgpack.Decoder(StepOutputs)
        self.inbox: deque[bytes] = deque()
        self.numbers, self.random = count(), random.Random(0)
        self.takes: dict[str, Callable[[RequestOutput], None]] = {}
        self.api: list[float] = []

    def send(self, message: ToEngine) -> None:
        self.inbox.append(self.encoder.encode(message))

    def add(self, key: str, prompt: list[int], take: Callable[[RequestOutput], None], *, n: int = 1, **params: Any) -> str:
        names = [f"{key}{next(self.numbers)}" for _ in range(n)]
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
        siblings = [Sibling(name) for name in names[1:]]
        self.takes.update(dict.fromkeys(names, take))
        request = EngineRequest(
            request_id=names[0], prompt_token_ids=prompt, sampling_params=sampling, siblings=siblings, tenant=Tenant(key)
        )
        self.send(AddRequest(request=request))
        return names[0]

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(3, self.vocab_size) for _ in range(length)]

    def on_api(self, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.api.append(time.perf_counter() - began)
        return result

    def turn(self) -> float:
        """→ its host seconds"""
        before = sum(self.clock.seconds.values())
        with self.clock.part("receive"):
            while self.inbox:
                message = self.to_engine.decode(self.inbox.popleft())
                if isinstance(message, AddRequest):
                    self.core.add_request(message.request)
                elif isinstance(message, AbortRequests):
                    self.core.abort(message.request_ids)
        outputs = self.core.step()
        with self.clock.part("send"):
            sent = self.encoder.encode(outputs)
        seconds = sum(self.clock.seconds.values()) - before
        for output in self.outputs_decoder.decode(sent).outputs:
            assert output.error is None, output.error
            if (take := self.takes.get(output.request_id)) is not None:
                take(output)
                if output.finish_reason is not None:
                    self.takes.pop(output.request_id, None)
        return seconds

    def decode(self, key: str) -> None:
        """A stream that never ends: the next request follows the last."""

        def take(output: RequestOutput) -> None:
            self.tokens[key] += len(output.new_token_ids)
            if output.finish_reason is not None:
                start()

        def start() -> None:
            self.add(key, self.prompt(12), take, max_tokens=256)

        start()

    def measure(self, case: str, seconds: float) -> dict[str, Any]:
        self.tokens: Counter[str] = Counter()
        for _ in range(SLOTS // 2):
            self.decode("b")
        if case != "alone":
            CASES[case](self)
        warm = time.monotonic() + seconds / 4
        while time.monotonic() < warm:
            self.turn()
        self.tokens.clear()
        self.api.clear()
        turns, parts, end = list[float](), dict[str, list[float]]((name, []) for name in PARTS), time.monotonic() + seconds
        while time.monotonic() < end:
            self.clock.seconds.clear()
            turns.append(self.turn() * 1e6)
            for name, of_turns in parts.items():
                of_turns.append(self.clock.seconds[name] * 1e6)
        turns.sort()
        row = {
            "host_us": round(statistics.median(turns), 1),
            "host_p99_us": round(turns[int(len(turns) * 0.99)], 1),
            **{name: round(statistics.median(of_turns), 1) for name, of_turns in parts.items()},
            "b_tokens": round(self.tokens["b"] / len(turns), 2),
            "api_us": round(sum(self.api) * 1e6 / len(turns), 1),
            "api_p50_us": round(statistics.median(self.api or [0.0]) * 1e6, 1),
            "turns": len(turns),
        }
        self.takes.clear()
        self.inbox.clear()
        self.core.abort_all()
        return row


def _beams(bench: Bench) -> None:
    def begin() -> None:
        search = BeamSearch(width=64, max_tokens=16, end_ids=[2])
        prompt = bench.prompt(2)

        def advance() -> None:
            beams, entries, left = list(search.alive), dict[int, TokenLogprobs](), Counter(beams=len(search.alive))
            for number, beam in enumerate(beams):

                def take(output: RequestOutput, number: int = number) -> None:
                    assert output.new_logprobs is not None
                    entries[number] = output.new_logprobs[0]
                    left["beams"] -= 1
                    if not left["beams"]:
                        bench.on_api(lambda: search.advance([entries[i] for i in range(len(beams))]))
                        advance() if search.alive else begin()

                bench.add("a", [*prompt, *beam.token_ids], take, max_tokens=1, logprobs=128)

        advance()

    for _ in range(2):
        begin()


def _prompt_logprobs(bench: Bench) -> None:
    writer = LogprobsWriter(None, as_ids=True)

    def begin() -> None:
        entries = []

        def take(output: RequestOutput) -> None:
            entries.extend(output.prompt_logprobs or [])
            if output.finish_reason is not None:
                bench.on_api(lambda: msgspec.json.encode(writer.prompt(entries)))
                begin()

        bench.add("a", bench.prompt(1500), take, max_tokens=4, prompt_logprobs=5)

    for _ in range(4):
        begin()


def _cancels(bench: Bench) -> None:
    def begin() -> None:
        def take(output: RequestOutput) -> None:
            bench.takes.pop(name)
            bench.send(AbortRequests(request_ids=[name]))
            begin()

        name = bench.add("a", bench.prompt(1), take, max_tokens=500)

    for _ in range(32):
        begin()


def _repeat(number: int, length: int, *, n: int = 1, **params: Any) -> Callable[[Bench], None]:
    def start(bench: Bench) -> None:
        def begin() -> None:
            left = Counter(sequences=n)

            def take(output: RequestOutput) -> None:
                if output.finish_reason is not None:
                    left["sequences"] -= 1
                    if not left["sequences"]:
                        begin()

            bench.add("a", bench.prompt(length), take, n=n, **params)

        for _ in range(number):
            begin()

    return start


def _fair(bench: Bench) -> None:
    for _ in range(SLOTS // 2):
        bench.decode("a")


CASES: dict[str, Callable[[Bench], None]] = {
    "fair": _fair,
    "flood": _repeat(400, 1, max_tokens=500),
    "queue": _repeat(25, 1, n=16, max_tokens=64),
    "prompts": _repeat(4, 6000, max_tokens=4),
    "siblings": _repeat(16, 1, n=128, max_tokens=16),
    "beams": _beams,
    "prompt_logprobs": _prompt_logprobs,
    "logprobs": _repeat(32, 1, max_tokens=100, logprobs=20),
    "penalties": _repeat(64, 1, max_tokens=100, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.1),
    "cancels": _cancels,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(("alone", *CASES)), help="names separated by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--vocab-size", type=int, default=32000, help="of the model")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=3, help="of both checkouts, with --against")
    parser.add_argument("--profile", help="a case: print where its time goes")
    arguments = parser.parse_args(argv)
    if arguments.against is not None:
        _compare(arguments)
        return
    names = arguments.cases.split(",")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.vocab_size)
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(bench.measure, arguments.profile, arguments.seconds)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
            return
        for name in names:
            print(json.dumps({"host_work": name, **bench.measure(name, arguments.seconds)}), flush=True)


def _compare(arguments: argparse.Namespace) -> None:
    here = Path(__file__).resolve().parent.parent
    rows: dict[Path, dict[str, list[dict[str, Any]]]] = {here: {}, arguments.against.resolve(): {}}
    for _ in range(arguments.rounds):
        for checkout, found in rows.items():
            command = [sys.executable, __file__, "--cases", arguments.cases, "--seconds", str(arguments.seconds)]
            command += ["--vocab-size", str(arguments.vocab_size)]
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                row = json.loads(line)
                found.setdefault(row["host_work"], []).append(row)
    ours, theirs = rows.values()
    for name, measured in ours.items():
        us, them = (min(part, key=lambda row: float(row["host_us"])) for part in (measured, theirs[name]))
        ratio = round(us["host_us"] / them["host_us"], 3)
        print(json.dumps({**us, "ratio": ratio, "against": {key: them[key] for key in us if key != "host_work"}}), flush=True)


if __name__ == "__main__":
    main()
