"""What it costs to hand a request over to another engine, what that brings, and what happens when one side is killed. Prints JSON lines.

    python -m benchmarks.handover one MODEL [--prompt 4000] [--runs 10] [--early]
    python -m benchmarks.handover load MODEL [--loads 4000:200:7,1000:200:16] [--seconds 30] [--burst 0]
    python -m benchmarks.handover rates MODEL [--ratios 4000:200,1000:200,1000:1000] [--seconds 15]
    python -m benchmarks.handover gpu MODEL                    # one, then load
    python -m benchmarks.handover kills MODEL [--kills 200] [--victims givers|takers|both] [--streams 8] [flags of serve …]
    python -m benchmarks.handover kills-under-load MODEL [--seconds 300] [--streams 8] [flags of serve …]

MODEL needs only a config.json for all but `kills…`, which starts servers: weights and prompts are random. Two engines run on devices 0
and 1 (`--device cpu`: both on the CPU), without HTTP. `--layouts 1+3,2+2`: 1 engine that computes prompts and 3 that go on, then 2 and 2,
instead of 1 and 1. All requests are greedy and run to their full length.

`one`: a request at a time, once the engines have captured and measured what they do while they serve, or after `--settle` seconds: until
then a request waits for such work. `prompt_ms`: until the first engine has answered. `second_ms`: from then on until the other engine gave
the second token. `decode_ms`: of a later token. `handover_ms`: second_ms - decode_ms, what the handover adds beyond the prompt's own time.
Parts of second_ms: `first_ms`: until the other engine sent the first token back, so had taken the request in. `load_ms`: from the order to
fetch blocks until the request could go on. `queue_ms`: that it waited else. `step_ms`: the step of the second token. `limit_ms`: of
handover_ms on GPUs. `to_come`: what the other engine had still to capture. `replays`: its graphs.
`load`: each layout, then `mixed`: as many replicas that do both. `--loads`: prompt tokens, output tokens, requests per second of a Poisson
process. `gap_ms`: between two tokens of a request. `gap_ratio`, `tok_s_ratio`: to the mixed replicas. `burst`: after each load, `--burst`
requests with as many tokens all at once. `handover`: since the engines started.
`rates`: for each ratio of prompt to output tokens, the highest rate at which p99 of the time to the first token stays below
`--ttft-limit` seconds and p99 of the gaps below `--gap-limit` ms, and first tokens do not wait longer and longer (`growth`). `--rate` is
doubled, then the distance is halved. Give it loads that are longer than a request: `--seconds 30`.
`kills`: two servers behind `route`; one is killed (-9, while answers are on their way) and started again. Every request must end: as it
should, or with an error. Then blocks and leases of both must be free. `stuck`: requests that did not end. The exit status is 1 if anything
was not so. `kills-under-load`: requests come all the time, and either side is killed some seconds after both were up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.common import environment
from benchmarks.handover_kills import kills, kills_under_load
from compile_and_serve.runtime.connector.handover.params import OWN, early_params
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.replicas import DataParallelClient, make_client
from compile_and_serve.runtime.ledger.records import RequestLedger
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, RequestOutput
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams

GIVE = {"do_remote_decode": True, "do_remote_prefill": False}
LIMIT_MS = 15.0
MOST_GROWTH = 2.0  # of the median time to the first token, from the first third of a load to its last: beyond that, requests pile up

Client = AsyncEngineClient | DataParallelClient


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("one", "load", "rates", "gpu", "kills", "kills-under-load"))
    parser.add_argument("model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--connector", default="auto", help="kv_connector of all engines")
    parser.add_argument(
        "--layouts", type=_numbers("+", int, int), default="1+1", help="engines that compute prompts + engines that go on, …"
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of `one`")
    parser.add_argument("--early", action="store_true", help="fetch blocks of prompts that take several steps while they are computed")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--settle", type=float, default=60.0, help="seconds to wait, at most, for what engines capture while they serve")
    parser.add_argument(
        "--loads", type=_numbers(":", int, int, float), default="4000:200:7", help="prompt tokens:output tokens:requests per second, …"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--burst", type=int, default=0, help="requests at once after each load")
    parser.add_argument("--rate", type=float, default=7.0, help="of `rates`, to begin with")
    parser.add_argument("--ratios", type=_numbers(":", int, int), default="4000:200,1000:200,1000:1000")
    parser.add_argument("--ttft-limit", type=float, default=2.0, help="seconds")
    parser.add_argument("--gap-limit", type=float, default=60.0, help="milliseconds")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--victims", default="both", choices=("givers", "takers", "both"))
    parser.add_argument("--streams", type=int, default=8)
    arguments, flags = parser.parse_known_args(argv)
    if arguments.what.startswith("kills"):
        if arguments.layouts != [(1, 1)]:
            parser.error("kills have one giver and one taker")
        row = (kills if arguments.what == "kills" else kills_under_load)(arguments, flags)
        _say(arguments, row)
        raise SystemExit(not row["is_well"])
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if len({sum(layout) for layout in arguments.layouts}) > 1:
        parser.error("all layouts need the same number of engines")
    asyncio.run(_measure(arguments))


def _numbers(separator: str, *kinds: Callable[[str], Any]) -> Callable[[str], list[tuple[Any, ...]]]:
    """Reads comma-separated groups of numbers of these kinds. Raises `ValueError` if a group has others, or more or fewer."""

    def numbers(text: str) -> list[tuple[Any, ...]]:
        groups = [group.split(separator) for group in text.split(",")]
        return [tuple(kind(number) for kind, number in zip(kinds, group, strict=True)) for group in groups]

    return numbers


async def _measure(arguments: argparse.Namespace) -> None:
    rows: dict[tuple[str, str], dict[str, Any]] = {}  # by layout and load, without mixed ones
    for layout in arguments.layouts:
        name = "+".join(map(str, layout))
        async with _apart(arguments, *layout) as apart:
            if arguments.what in ("one", "gpu"):
                _say(arguments, {"engines": name, **await _one(apart, arguments)})
            if arguments.what != "one":
                async for load, row in _under_load(apart, arguments):
                    rows[name, load] = row
                    _say(arguments, {"what": arguments.what, "engines": name, "load": load, **row})
    if not rows:
        return
    async with _mixed(arguments) as mixed:
        async for load, row in _under_load(mixed, arguments):
            ratios = {}
            for layout, of_load in rows if arguments.what != "rates" else ():
                if of_load == load:
                    apart_row = rows[layout, load]
                    ratios[layout] = {
                        "gap_ratio": round(apart_row["gap_ms"]["p99"] / row["gap_ms"]["p99"], 3),
                        "tok_s_ratio": round(apart_row["tok_s"] / row["tok_s"], 3),
                    }
                    if arguments.burst:
                        ratios[layout]["burst_tok_s_ratio"] = round(apart_row["burst"]["tok_s"] / row["burst"]["tok_s"], 3)
            _say(arguments, {"what": arguments.what, "engines": "mixed", "load": load, **row} | ({"ratios": ratios} if ratios else {}))


async def _under_load(engines: _Apart | _Mixed, arguments: argparse.Namespace) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Each load's name and row."""
    if arguments.what == "rates":
        for prompt, new in arguments.ratios:
            yield f"{prompt}:{new}", await _highest_rate(engines, arguments, prompt, new)
        return
    for prompt, new, rate in arguments.loads:
        row = await _load(engines, arguments, rate, prompt, new)
        if arguments.burst:
            row["burst"] = await _burst(engines, arguments.burst, prompt, new, rate)
        yield f"{prompt}:{new}:{rate:g}", row


def _say(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": "handover", "model": arguments.model, **row, **environment()}), flush=True)


@dataclass(slots=True)
class _Seen:
    """What a request's client saw: the times of its tokens, its last output, how the engine spent its time."""

    times: list[float] = field(default_factory=list)
    last: RequestOutput | None = None
    ledger: RequestLedger | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class _Engine:
    """An engine's client, and who waits for its requests. num_chosen: requests that it has, or will have."""

    def __init__(self, client: Client) -> None:
        self.client, self.seen, self.num_chosen = client, dict[str, _Seen](), 0
        self.stats: EngineStats | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """→ the vocabulary's size"""
        info = await self.client.start()
        self._reading = asyncio.create_task(self._read())
        return info.vocab_size

    async def _read(self) -> None:
        async for step in self.client.outputs():
            now = time.perf_counter()
            self.stats = step.stats or self.stats
            for output in step.outputs:
                seen = self.seen.get(output.request_id)
                if seen is None:
                    continue
                seen.times += [now] * len(output.new_token_ids)
                seen.last, seen.ledger = output, output.ledger or seen.ledger
                if output.finish_reason is not None:
                    seen.ended.set()

    async def run(self, request: EngineRequest) -> _Seen:
        """Until it has ended. Raises `RuntimeError` if it failed."""
        seen = self.seen[request.request_id] = _Seen()
        await self.client.add_request(request)
        await seen.ended.wait()
        del self.seen[request.request_id]
        assert seen.last is not None
        if seen.last.error is not None:
            raise RuntimeError(f"Request {request.request_id} failed: {seen.last.error}")
        return seen

    async def settle(self, seconds: float) -> None:
        """Wait until nothing is left that it captures or measures while it serves. It must have run a request."""
        end = time.perf_counter() + seconds
        while self._has_pending_work and time.perf_counter() < end:
            await asyncio.sleep(0.1)

    @property
    def _has_pending_work(self) -> bool:
        if isinstance(self.client, DataParallelClient):
            return any(replica.stats.pending_work for replica in self.client.replicas)
        return self.stats is not None and bool(self.stats.pending_work)

    async def forget(self) -> None:
        """End all requests, without an output."""
        await self.client.abort(list(self.seen))
        self.seen.clear()

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self.client.shutdown(drain=False)


@contextmanager
def _chosen(engines: Sequence[_Engine]) -> Iterator[_Engine]:
    """The engine with the fewest requests, which has one more meanwhile."""
    engine = min(engines, key=lambda one: one.num_chosen)
    engine.num_chosen += 1
    try:
        yield engine
    finally:
        engine.num_chosen -= 1


class _Apart:
    """Engines that compute prompts, the givers, and others that go on, the takers."""

    def __init__(self, givers: Sequence[_Engine], takers: Sequence[_Engine], *, is_early: bool) -> None:
        self.givers, self.takers, self.is_early, self.vocab_size = givers, takers, is_early, 0
        self._given: dict[_Engine, dict[str, Any] | None] = {}  # by each giver, last
        self.engines = *givers, *takers

    async def run(self, request: EngineRequest) -> tuple[_Seen, float]:
        """What the other engine gave, and when the first one had answered."""
        with ExitStack() as chosen:
            taker = chosen.enter_context(_chosen(self.takers)) if self.is_early else None
            with _chosen(self.givers) as giver:
                given = self._given.get(giver)
                early = request.request_id + " early" if given is not None and taker is not None else ""
                loads: list[Awaitable[_Seen]] = []
                if early and taker is not None:
                    params = early_params(given or {}, early)
                    loads = [taker.run(msgspec.structs.replace(request, request_id=early, kv_transfer=params))]
                give = msgspec.structs.replace(request, kv_transfer=GIVE | {OWN: {"early": early}})
                first, *_ = await asyncio.gather(giver.run(give), *loads)
            assert first.last is not None
            self._given[giver] = first.last.kv_transfer
            answered = time.perf_counter()
            taker = taker or chosen.enter_context(_chosen(self.takers))
            return await taker.run(msgspec.structs.replace(request, kv_transfer=first.last.kv_transfer)), answered

    def seen(self) -> dict[str, _Seen]:
        """Of the requests that takers have."""
        return {name: seen for taker in self.takers for name, seen in taker.seen.items()}


class _Mixed:
    """As many replicas that do both."""

    def __init__(self, engine: _Engine) -> None:
        self.engine, self.vocab_size = engine, 0
        self.engines = (engine,)

    async def run(self, request: EngineRequest) -> tuple[_Seen, float]:
        return await self.engine.run(request), time.perf_counter()

    def seen(self) -> dict[str, _Seen]:
        return self.engine.seen


def _config(arguments: argparse.Namespace, **options: Any) -> Any:
    ratios = arguments.ratios if arguments.what == "rates" else [load[:2] for load in arguments.loads]
    longest = max(*map(sum, ratios), arguments.prompt + 32) + 64
    return make_engine_config(
        arguments.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        device=arguments.device,
        enforce_eager=arguments.eager,
        max_model_len=longest,
        **options,
    )


@asynccontextmanager
async def _apart(arguments: argparse.Namespace, num_givers: int, num_takers: int) -> AsyncIterator[_Apart]:
    roles = ["kv_producer"] * num_givers + ["kv_consumer"] * num_takers
    engines = []
    for index, role in enumerate(roles):
        config = _config(arguments, kv_transfer_config={"kv_role": role, "kv_connector": arguments.connector})
        if arguments.device != "cpu":
            config = replace(config, parallel=replace(config.parallel, device_index=index))
        engines.append(_Engine(make_client(config)))
    apart = _Apart(engines[:num_givers], engines[num_givers:], is_early=arguments.early)
    try:
        apart.vocab_size = await engines[0].start()  # alone: what it compiles, the others load
        await asyncio.gather(*(engine.start() for engine in engines[1:]))
        yield apart
    finally:
        for engine in engines:
            await engine.stop()


@asynccontextmanager
async def _mixed(arguments: argparse.Namespace) -> AsyncIterator[_Mixed]:
    mixed = _Mixed(_Engine(make_client(_config(arguments, data_parallel_size=sum(arguments.layouts[0])))))
    try:
        mixed.vocab_size = await mixed.engine.start()
        yield mixed
    finally:
        await mixed.engine.stop()


def _request(rng: random.Random, name: str, vocab_size: int, prompt: int, new: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[rng.randrange(vocab_size) for _ in range(prompt)],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True),
    )


async def _one(pair: _Apart, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    rows: list[dict[str, float]] = []
    for number in range(arguments.runs + 2):  # two to warm up
        request = _request(rng, f"one {number}", pair.vocab_size, arguments.prompt, 32)
        if number == 1:
            await _settle(pair, arguments)
        began = time.perf_counter()
        seen, answered = await pair.run(request)
        gaps = sorted(after - before for before, after in pairwise(seen.times[8:]))
        decode = gaps[len(gaps) // 2]
        second = seen.times[1] - answered
        row = {"prompt_ms": answered - began, "second_ms": second, "decode_ms": decode, "handover_ms": second - decode}
        row["first_ms"] = seen.times[0] - answered
        if (ledger := seen.ledger) is not None:
            queued = sum(ledger.queue.values())
            row |= {"load_ms": ledger.preparing.get("kv_load", 0.0), "queue_ms": queued, "step_ms": ledger.prefill}
        rows.append(row)
    kept = rows[2:]
    found: dict[str, Any] = {"what": "one", "prompt": arguments.prompt, "early": arguments.early, "runs": len(kept)}
    for name in rows[0]:
        values = sorted(one[name] * 1e3 for one in kept)
        found[name] = {"p50": round(values[len(values) // 2], 2), "max": round(values[-1], 2)}
    stats = pair.takers[0].stats
    if stats is not None:
        found["failures"] = stats.kv_tiers.get("handover_failures")
        found |= {"to_come": stats.pending_work, "replays": stats.graph_replays}
    return found | {"limit_ms": LIMIT_MS}


async def _settle(engines: _Apart | _Mixed, arguments: argparse.Namespace) -> None:
    await asyncio.gather(*(engine.settle(arguments.settle) for engine in engines.engines))


async def _load(
    engines: _Apart | _Mixed, arguments: argparse.Namespace, rate: float, prompt: int, new: int, *, may_stop: bool = False
) -> dict[str, Any]:
    """may_stop: as soon as all requests have been sent, if the limits cannot be met any more; the row says `is_beyond` alone."""
    rng = random.Random(f"{rate} {prompt} {new}")  # no prefix of a load before
    num_warm = 2 * sum(arguments.layouts[0])
    await asyncio.gather(*(engines.run(_request(rng, f"warm {number}", engines.vocab_size, prompt, 16)) for number in range(num_warm)))
    await _settle(engines, arguments)
    began = time.perf_counter()
    running: list[asyncio.Task[tuple[_Seen, float]]] = []
    sent_at: dict[str, float] = {}
    ended: dict[str, _Seen] = {}
    at = 0.0

    async def one(request: EngineRequest) -> tuple[_Seen, float]:
        ended[request.request_id], _ = await engines.run(request)
        return ended[request.request_id], sent_at[request.request_id]

    while at < arguments.seconds:
        request = _request(rng, f"load {len(running)}", engines.vocab_size, prompt, new)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        sent_at[request.request_id] = time.perf_counter()
        running.append(asyncio.create_task(one(request)))
        at += rng.expovariate(rate)
    for task in running:
        if task.done():
            task.result()  # raises if the request failed
    if may_stop and _is_beyond(arguments, new, sent_at, engines.seen() | ended):
        for task in running:
            task.cancel()
        await asyncio.gather(*(engine.forget() for engine in engines.engines))
        return {"rate": rate, "is_beyond": True}
    found = await asyncio.gather(*running)
    seconds = time.perf_counter() - began
    gaps = [(after - before) * 1e3 for seen, _ in found for before, after in pairwise(seen.times)]
    firsts = [seen.times[0] - sent for seen, sent in found]
    third = max(1, len(firsts) // 3)
    row = {
        "rate": rate,
        "requests": len(found),
        "seconds": round(seconds, 2),
        "tok_s": round(sum(len(seen.times) for seen, _ in found) / seconds, 1),
        "gap_ms": _percentiles(gaps),
        "ttft_s": _percentiles(firsts),
        "growth": round(statistics.median(firsts[-third:]) / statistics.median(firsts[:third]), 2),
    }
    if isinstance(engines, _Apart):
        tiers = [taker.stats.kv_tiers for taker in engines.takers if taker.stats is not None]
        names = [name for name in next(iter(tiers), {}) if "taken" in name or "fail" in name or "_p" in name]
        row["handover"] = {name: (max if "_p" in name else sum)(one.get(name, 0.0) for one in tiers) for name in names}
    return row


async def _burst(engines: _Apart | _Mixed, count: int, prompt: int, new: int, rate: float) -> dict[str, Any]:
    rng = random.Random(f"burst {prompt} {new} {rate}")  # no prefix of a burst before
    requests = [_request(rng, f"burst {number}", engines.vocab_size, prompt, new) for number in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*(engines.run(request) for request in requests))
    seconds = time.perf_counter() - began
    return {"requests": count, "seconds": round(seconds, 2), "tok_s": round(count * new / seconds, 1)}


def _is_beyond(arguments: argparse.Namespace, new: int, sent_at: dict[str, float], seen: dict[str, _Seen]) -> bool:
    """Whether p99 of all first tokens, or of all gaps, must exceed its limit. seen: of requests that were sent, as far as it goes."""
    now = time.perf_counter()
    firsts = [(seen[name].times if name in seen and seen[name].times else [now])[0] - began for name, began in sent_at.items()]
    num_late = sum(first > arguments.ttft_limit for first in firsts)
    num_long = sum((after - before) * 1e3 > arguments.gap_limit for one in seen.values() for before, after in pairwise(one.times))
    return 100 * num_late > len(firsts) or 100 * num_long > len(firsts) * (new - 1)


async def _highest_rate(engines: _Apart | _Mixed, arguments: argparse.Namespace, prompt: int, new: int) -> dict[str, Any]:
    """By doubling, then by halving what is between, in six loads at most. `is_bounded`: a higher rate was beyond the limits."""
    low, high, best = 0.0, arguments.rate, dict[str, Any]()
    is_bounded = False
    for _ in range(6):
        rate = (low + high) / 2 if is_bounded else high
        row = await _load(engines, arguments, rate, prompt, new, may_stop=True)
        if _holds(arguments, row):
            low, best = rate, row
            high = high if is_bounded else 2 * high
        else:
            high, is_bounded = rate, True
        if is_bounded and high - low <= 0.15 * high:
            break
    return (best or {"rate": 0.0}) | {"is_bounded": is_bounded}


def _holds(arguments: argparse.Namespace, row: dict[str, Any]) -> bool:
    """Whether the limits are kept, and would be if the load went on."""
    if "is_beyond" in row or row["growth"] > MOST_GROWTH:
        return False
    return bool(row["ttft_s"]["p99"] <= arguments.ttft_limit and row["gap_ms"]["p99"] <= arguments.gap_limit)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for name, share in (("p50", 0.5), ("p99", 0.99))}


if __name__ == "__main__":
    main()
