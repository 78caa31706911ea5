"""What the tiers of the KV cache gain: a prefix that comes back from the host or from disk, beside computing it; conversations in turns.

    python -m benchmarks.kv_tiers MODEL [--work host,disk,conversations,unused,beside] [--prefix 16000] [--kv-cache-memory 20GiB]
                                  [--host 40] [--folder DIR] [--load-format dummy] [--out FILE]

host: the time to the first token of a prompt of `--prefix` tokens that is new, and again after others have pushed it out of the device's
    cache into the host's memory.
disk: the same in a second engine, which finds what the first has left in `--folder`, with the files' pages dropped from memory.
conversations: `--conversations` of 6 turns, 1 050 new tokens in and 200 out each, all at once, turn by turn; with the host tier and
    without.
unused: decode steps of 64 sequences with the host tier, which nothing is stored in, and without, in turns.
beside: decode steps of 64 sequences while the host tier stores blocks all the time, while it loads blocks, and while it does neither, in
    turns. `moved_bytes` is what was moved during the steps, at `gb_s`. Blocks that are loaded are held, so that no sequence has them.
    Of a decode step, on average: `connector_ms`: the host's time for the tier's worker side, and the longest; `wait_ms`: the host waits
    for the device (near 0: steps wait for the host); `device_ms`: the device runs the model and samples; `read_back_ms`: it hands the
    tokens to the host; `gap_ms`: from there to the next step's model, with the inputs that are copied.

Prints one JSON line for each. Prompts are random token ids; every request is greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import environment

WORKS = ("host", "disk", "conversations", "unused", "beside")
TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 1050, 200
DECODES, DECODE_TOKENS = 64, 128
TURNS_BESIDE = 3
TIMED_STEPS = 100


class Engine:
    """An LLM and its prompts. tiers: options of the tiers."""

    def __init__(self, args: argparse.Namespace, **tiers: Any) -> None:
        from compile_and_serve import LLM, SamplingParams

        self._params = SamplingParams
        self._rng = random.Random(os.getpid())  # other prompts in each process
        cache = {} if args.kv_cache_memory is None else {"kv_cache_memory_bytes": args.kv_cache_memory}
        options = {"skip_tokenizer_init": True, "max_model_len": args.max_model_len, "load_format": args.load_format, "device": args.device}
        self.llm = LLM(args.model, **options, **cache, **tiers)
        self.device = self.llm.info.device
        vocab = self.llm.info.vocab_size
        self._vocab = vocab
        for _ in range(3):  # graphs and kernels of prompts
            self.run([self.prompt(min(args.prefix, 4096))], 4)
        while self.llm.core.idle():
            pass

    def prompt(self, length: int, seed: int | None = None) -> list[int]:
        rng = self._rng if seed is None else random.Random(seed)
        return [rng.randrange(self._vocab) for _ in range(length)]

    def run(self, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[Any]]:
        """Seconds and results."""
        begin = time.perf_counter()
        params = self._params(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        results = self.llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return time.perf_counter() - begin, results

    def tiers(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in self.llm.core.stats().kv_tiers.items()}


def measure_host(args: argparse.Namespace) -> dict[str, Any]:
    engine = Engine(args, kv_offloading_size=args.host)
    tokens = engine.llm.info.num_kv_blocks * engine.llm.info.block_size
    prompt = engine.prompt(args.prefix)
    computed, _ = engine.run([prompt], 1)
    others = []
    for _ in range(3):
        others += [engine.run([engine.prompt(args.prefix)], 1)[0] for _ in range(-(-2 * tokens // args.prefix))]
        loaded, [result] = engine.run([prompt], 1)
    row = {"computed_s": round(min([computed, *others]), 4), "loaded_s": round(loaded, 4), "cached_tokens": result.num_cached_tokens}
    row |= {"ratio": round(loaded / min([computed, *others]), 3), "cache_tokens": tokens, "tiers": engine.tiers(), "device": engine.device}
    engine.llm.shutdown()
    return row


def measure_disk(args: argparse.Namespace) -> dict[str, Any]:
    """Two processes: this function runs in each, and the first leaves its prompt's blocks in the folder."""
    if args.part is None:
        rows = []
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for part in ("first", "second"):
                command = [sys.executable, "-m", "benchmarks.kv_tiers", *sys.argv[1:], "--work", "disk", "--part", part, "--folder", folder]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                rows.append(json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1]))
                size = drop_from_memory(Path(folder))
        first, second = rows
        loaded = second["seconds"][0]
        computed = min(first["seconds"] + second["seconds"][1:])
        row = {"computed_s": computed, "loaded_s": loaded, "ratio": round(loaded / computed, 3), "file_bytes": size}
        return row | {"cached_tokens": second["cached_tokens"], "tiers": second["tiers"], "device": second["device"]}
    engine = Engine(args, kv_offload_dir=args.folder, kv_offloading_size=args.host)
    seconds, cached = [], 0
    for number in range(3):
        taken, [result] = engine.run([engine.prompt(args.prefix, seed=1 if number == 0 else None)], 1)
        seconds.append(round(taken, 4))
        cached = cached or result.num_cached_tokens
    row = {"seconds": seconds, "cached_tokens": cached, "tiers": engine.tiers(), "device": engine.device}
    engine.llm.shutdown()
    return row


def drop_from_memory(folder: Path) -> int:
    """Let the system forget the files' pages; → their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


def measure_conversations(args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, tiers in (("without", {}), ("with", {"kv_offloading_size": args.host})):
        engine = Engine(args, **tiers)
        texts = [engine.prompt(TURN_TOKENS, seed=number) for number in range(args.conversations)]
        total = 0
        begin = time.perf_counter()
        for turn in range(TURNS):
            _, results = engine.run(texts, ANSWER_TOKENS)
            total += sum(len(text) + ANSWER_TOKENS for text in texts)
            rest = [engine.prompt(TURN_TOKENS, seed=1000 * turn + number) for number in range(args.conversations)]
            texts = [text + list(one.outputs[0].token_ids) + new for text, one, new in zip(texts, results, rest, strict=True)]
        row[f"{name}_s"] = round(time.perf_counter() - begin, 2)
        row[f"{name}_tok_s"] = round(total / row[f"{name}_s"], 1)
        row |= {"tiers": engine.tiers(), "device": engine.device}
        engine.llm.shutdown()
    return row | {"ratio": round(row["with_tok_s"] / row["without_tok_s"], 3)}


def measure_unused(args: argparse.Namespace) -> dict[str, Any]:
    steps: dict[str, float] = {}
    device = ""
    for name, tiers in (("without", {}), ("with", {"kv_offloading_size": args.host})):
        engine = Engine(args, **tiers)
        prompts = [engine.prompt(128) for _ in range(DECODES)]
        for _ in range(2):
            engine.run(prompts, DECODE_TOKENS)
        one = min(engine.run(prompts, 1)[0] for _ in range(3))
        many = min(engine.run(prompts, 1 + DECODE_TOKENS)[0] for _ in range(3))
        steps[name], device = (many - one) / DECODE_TOKENS, engine.device
        engine.llm.shutdown()
    row: dict[str, Any] = {f"{name}_step_ms": round(1e3 * seconds, 4) for name, seconds in steps.items()}
    return row | {"ratio": round(steps["without"] / steps["with"], 4), "device": device}


class TimedWait:
    """An event of the device; what the host waits for it is noted."""

    def __init__(self, event: Any, waited: list[float]) -> None:
        self._event, self._waited = event, waited

    def synchronize(self) -> None:
        begin = time.perf_counter()
        self._event.synchronize()
        self._waited.append(time.perf_counter() - begin)


class StepTimes:
    """Notes where the time of a worker's steps goes. connector: seconds of the host, a step."""

    def __init__(self, worker: Any) -> None:
        runner = self._runner = worker.runner
        self._mark = worker.platform.record_timed_event
        self.connector: list[float] = []
        self._waited: list[float] = []
        self._steps: list[tuple[Any, Any, Any]] = []  # before the model, behind it, behind what reads its tokens back
        self._compute, self._pending = runner._compute, runner._pending
        runner._compute, runner._pending = self._computed, self._read
        self._computing: tuple[Any, Any] | None = None

    def take(self) -> dict[str, float]:
        """In ms, of the last steps, which are decodes, since the last call. The device is done with them."""
        steps, connector, waited = self._steps[-TIMED_STEPS:], self.connector[-TIMED_STEPS:], self._waited[-TIMED_STEPS:]
        self._steps, self.connector, self._waited = [], [], []
        return {
            "connector_ms": _mean_ms(connector),
            "connector_max_ms": round(1e3 * max(connector, default=0.0), 4),
            "wait_ms": _mean_ms(waited),
            "device_ms": _mean_ms([behind.seconds_since(before) for before, behind, _ in steps]),
            "read_back_ms": _mean_ms([read.seconds_since(behind) for _, behind, read in steps]),
            "gap_ms": _mean_ms([one[0].seconds_since(last[2]) for last, one in pairwise(steps)]),
        }

    def _computed(self, *args: Any, **options: Any) -> Any:
        before = self._mark()
        result = self._compute(*args, **options)
        self._computing = before, self._mark()
        return result

    def _read(self, *args: Any, **options: Any) -> Any:
        pending = self._pending(*args, **options)
        if self._computing is not None:
            self._steps.append((*self._computing, self._mark()))
            self._computing = None
        if pending._event is not None:
            pending._event = TimedWait(pending._event, self._waited)
        return pending


def _mean_ms(seconds: list[float]) -> float:
    return round(1e3 * statistics.fmean(seconds), 4) if seconds else 0.0


class Mover:
    """Keeps the host tier's worker side of an engine in this process busy: it gets transfers of blocks after each step, so that
    `in_flight` blocks are always on their way.
    """

    def __init__(self, engine: Engine, *, blocks: int, in_flight: int) -> None:
        """blocks: of a transfer."""
        core: Any = engine.llm.core
        scheduler, worker = core._scheduler, core.executor.worker
        self._copies, self._sync = worker._connector, worker.platform.synchronize
        self._blocks, self._most = blocks, -(-in_flight // blocks)
        self._held = scheduler.manager.allocate_pinned(blocks * self._most)
        self.block_bytes = self._copies._page_bytes
        self._kind: str | None = None
        self._times = StepTimes(worker)
        self._own: set[int] = set()
        self._next, self.moved_blocks, self.in_flight_steps, self.steps = -1, 0, 0, 0
        self._poll, self._copies.poll = self._copies.poll, self._poll_and_start

    def during(self, kind: str | None, work: Callable[[], float]) -> tuple[float, int, dict[str, float]]:
        """What work returns, the bytes that were moved meanwhile, and the times of a step. kind: "stores", "loads" or None."""
        self._kind, self.moved_blocks, self.steps, self.in_flight_steps = kind, 0, 0, 0
        self._start()
        self._times.take()
        taken = work()
        moved, self._kind = self.moved_blocks, None
        self._sync()
        times = self._times.take()
        while self._own:
            self._poll_and_start()
        self._sync()
        return taken, moved * self.block_bytes, times

    def _poll_and_start(self) -> Any:
        begin = time.perf_counter()
        ended = self._do_poll_and_start()
        self._times.connector.append(time.perf_counter() - begin)
        return ended

    def _do_poll_and_start(self) -> Any:
        ended = self._poll()
        own = [one for one in ended.finished if one in self._own]
        failed = [reason for one, reason in ended.failed.items() if one in self._own]
        assert not failed, failed
        ended.finished = [one for one in ended.finished if one not in self._own]
        self._own -= set(own)
        self.moved_blocks += self._blocks * len(own)
        self.steps, self.in_flight_steps = self.steps + 1, self.in_flight_steps + bool(self._own)
        self._start()
        return ended

    def _start(self) -> None:
        from compile_and_serve.runtime.connector.messages import BlockTransfer, StepTransfers
        from compile_and_serve.runtime.connector.tiers.orders import TierOrders

        transfers = []
        while self._kind is not None and len(self._own) < self._most:
            place = -self._next % self._most * self._blocks  # its blocks on the device, and its pages on the host
            orders = TierOrders(list(range(place, place + self._blocks)), [False] * self._blocks if self._kind == "loads" else [])
            keys = [b"%d" % number for number in range(self._blocks)]
            ids = self._held[place : place + self._blocks]
            meta = msgspec.msgpack.encode(orders)
            transfers.append(BlockTransfer(transfer_id=self._next, group=0, keys=keys, block_ids=ids, meta=meta))
            self._own.add(self._next)
            self._next -= 1
        if transfers:
            self._copies.start(StepTransfers(loads=transfers) if self._kind == "loads" else StepTransfers(stores=transfers))


def measure_beside(args: argparse.Namespace) -> dict[str, Any]:
    engine = Engine(args, kv_offloading_size=args.host)
    prompts = [engine.prompt(128) for _ in range(DECODES)]
    mover = Mover(engine, blocks=args.transfer_blocks, in_flight=args.in_flight)
    kinds = (None, "stores", "loads")
    for kind in kinds:  # graphs of decodes
        mover.during(kind, lambda: engine.run(prompts, DECODE_TOKENS)[0])
    while engine.llm.core.idle():
        pass
    one: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    many: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    moved: dict[str | None, int] = dict.fromkeys(kinds, 0)
    busy: dict[str | None, float] = {}
    times: dict[str | None, dict[str, float]] = {}
    for _ in range(TURNS_BESIDE):
        for kind in kinds:
            one[kind].append(mover.during(kind, lambda: engine.run(prompts, 1)[0])[0])
            seconds, num_bytes, times[kind] = mover.during(kind, lambda: engine.run(prompts, 1 + DECODE_TOKENS)[0])
            many[kind].append(seconds)
            moved[kind] += num_bytes
            busy[kind] = mover.in_flight_steps / max(1, mover.steps)
    steps = {kind: (min(many[kind]) - min(one[kind])) / DECODE_TOKENS for kind in kinds}
    row: dict[str, Any] = {"alone_step_ms": round(1e3 * steps[None], 4), "block_bytes": mover.block_bytes}
    row |= {"transfer_blocks": args.transfer_blocks, "in_flight_blocks": args.in_flight}
    for kind in kinds:
        row |= {f"{kind or 'alone'}_{name}": value for name, value in times[kind].items()}
    for kind in kinds[1:]:
        row |= {f"{kind}_step_ms": round(1e3 * steps[kind], 4), f"{kind}_ratio": round(steps[kind] / steps[None], 4)}
        row |= {f"{kind}_moved_bytes": moved[kind], f"{kind}_gb_s": round(moved[kind] / sum(many[kind]) / 1e9, 2)}
        row |= {f"{kind}_busy_share": round(busy[kind], 3), f"{kind}_runs_s": [round(taken, 4) for taken in many[kind]]}
    row |= {"alone_runs_s": [round(taken, 4) for taken in many[None]], "device": engine.device}
    engine.llm.shutdown()
    return row


MEASURED = {
    "host": measure_host,
    "disk": measure_disk,
    "conversations": measure_conversations,
    "unused": measure_unused,
    "beside": measure_beside,
}


def main() -> None:
    from compile_and_serve.option_fields import parse_size

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", type=lambda text: text.split(","), default=list(WORKS))
    parser.add_argument("--prefix", type=int, default=16000, help="tokens of the prompt")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--host", type=float, default=40.0, help="GiB of the host tier")
    parser.add_argument("--kv-cache-memory", type=parse_size, help="of the device")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--folder", type=Path, help="where the disk's files lie for the time of a run; by default the system's")
    parser.add_argument("--transfer-blocks", type=int, default=32, help="beside: blocks of a transfer")
    parser.add_argument("--in-flight", type=int, default=256, help="beside: blocks that are on their way at a time")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    args = parser.parse_args()
    for work in args.work:
        row = {"work": work, "model": Path(args.model).name, "prefix": args.prefix, **MEASURED[work](args), **environment()}
        line = json.dumps(row)
        print(line, flush=True)
        if args.out is not None and args.part is None:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
