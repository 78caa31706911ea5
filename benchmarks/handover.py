"""What it costs to hand a request over to another engine, what that brings, and what happens when one side is killed. Prints JSON lines.

    python -m benchmarks.handover one MODEL [--prompt 4000] [--runs 10]
    python -m benchmarks.handover load MODEL [--rate 7] [--prompt 4000] [--new 200] [--seconds 30]
    python -m benchmarks.handover rates MODEL [--ratios 4000:200,1000:200,1000:1000] [--seconds 15]
    python -m benchmarks.handover gpu MODEL                    # one, then load
    python -m benchmarks.handover kills MODEL [--kills 200] [--victims givers|takers|both] [--streams 8] [flags of serve …]

MODEL needs only a config.json for all but `kills`, which starts servers: weights and prompts are random. Two engines run on devices 0 and 1
(`--device cpu`: both on the CPU), without HTTP. All requests are greedy and run to their full length.

`one`: a request at a time. `prompt_ms`: until the first engine has answered. `second_ms`: from then on until the other engine gave the
second token. `decode_ms`: of a later token. `handover_ms`: second_ms - decode_ms, what the handover adds beyond the prompt's own time.
`transfer_ms`: of it, from the order to fetch blocks until they were there. `limit_ms`: of handover_ms on GPUs.
`load`: `pair` against `mixed`, two replicas that do both. Arrivals are a Poisson process. `gap_ms`: between two tokens of a request.
`gap_ratio`, `tok_s_ratio`: of the pair to the mixed replicas.
`rates`: for each ratio of prompt to output tokens, the highest rate at which p99 of the time to the first token stays below
`--ttft-limit` seconds and p99 of the gaps below `--gap-limit` ms.
`kills`: two servers behind `route`; one is killed (-9, while answers are on their way) and started again. Every request must end: as it
should, or with an error. Then blocks and leases of both must be free. `stuck`: requests that did not end. The exit status is 1 if anything
was not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from benchmarks.common import environment
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.replicas import DataParallelClient, make_client
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, RequestOutput
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams

GIVE = {"do_remote_decode": True, "do_remote_prefill": False}
LIMIT_MS = 15.0
_PATIENCE = 60.0  # seconds after which a request is stuck
_START_SECONDS = 240.0

Client = AsyncEngineClient | DataParallelClient


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("one", "load", "rates", "gpu", "kills"))
    parser.add_argument("model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--connector", default="auto", help="kv_connector of both engines")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens")
    parser.add_argument("--new", type=int, default=200, help="tokens")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=7.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load")
    parser.add_argument("--ratios", default="4000:200,1000:200,1000:1000")
    parser.add_argument("--ttft-limit", type=float, default=2.0, help="seconds")
    parser.add_argument("--gap-limit", type=float, default=60.0, help="milliseconds")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--victims", default="both", choices=("givers", "takers", "both"))
    parser.add_argument("--streams", type=int, default=8)
    arguments, flags = parser.parse_known_args(argv)
    if arguments.what == "kills":
        raise SystemExit(not _kills(arguments, flags))
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    asyncio.run(_measure(arguments))


async def _measure(arguments: argparse.Namespace) -> None:
    what = arguments.what
    pair_rows: dict[str, dict[str, Any]] = {}
    async with _pair(arguments) as pair:
        if what in ("one", "gpu"):
            _say(arguments, await _one(pair, arguments))
        if what in ("load", "gpu"):
            pair_rows["load"] = await _load(pair, arguments, arguments.rate, arguments.prompt, arguments.new)
        if what == "rates":
            for ratio in arguments.ratios.split(","):
                pair_rows[ratio] = await _highest_rate(pair, arguments, *map(int, ratio.split(":")))
    if not pair_rows:
        return
    async with _mixed(arguments) as mixed:
        for name, row in pair_rows.items():
            if name == "load":
                other = await _load(mixed, arguments, arguments.rate, arguments.prompt, arguments.new)
                ratios = {
                    "gap_ratio": round(row["gap_ms"]["p99"] / other["gap_ms"]["p99"], 3),
                    "tok_s_ratio": round(row["tok_s"] / other["tok_s"], 3),
                }
                _say(arguments, {"what": "load", "pair": row, "mixed": other, **ratios})
            else:
                other = await _highest_rate(mixed, arguments, *map(int, name.split(":")))
                _say(arguments, {"what": "rates", "ratio": name, "pair": row, "mixed": other})


def _say(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    print(json.dumps({"benchmark": "handover", "model": arguments.model, **row, **environment()}), flush=True)


@dataclass(slots=True)
class _Seen:
    """What a request's client saw: the times of its tokens, its last output."""

    times: list[float] = field(default_factory=list)
    last: RequestOutput | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class _Engine:
    """An engine's client, and who waits for its requests. failures: sentences of requests that failed."""

    def __init__(self, client: Client) -> None:
        self.client, self.seen = client, dict[str, _Seen]()
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
                seen.last = output
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

    async def stop(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self.client.shutdown(drain=False)


class _Pair:
    """Two engines, of which one computes prompts."""

    def __init__(self, giver: _Engine, taker: _Engine) -> None:
        self.giver, self.taker, self.vocab_size = giver, taker, 0

    async def run(self, request: EngineRequest) -> tuple[_Seen, float]:
        """What the other engine gave, and when the first one had answered."""
        first = await self.giver.run(msgspec.structs.replace(request, kv_transfer=dict(GIVE)))
        assert first.last is not None
        answered = time.perf_counter()
        return await self.taker.run(msgspec.structs.replace(request, kv_transfer=first.last.kv_transfer)), answered


class _Mixed:
    """Two replicas that do both."""

    def __init__(self, engine: _Engine) -> None:
        self.engine, self.vocab_size = engine, 0

    async def run(self, request: EngineRequest) -> tuple[_Seen, float]:
        return await self.engine.run(request), time.perf_counter()


def _config(arguments: argparse.Namespace, **options: Any) -> Any:
    ratios = arguments.ratios if arguments.what == "rates" else f"{arguments.prompt}:{max(arguments.new, 32)}"
    longest = max(sum(map(int, ratio.split(":"))) for ratio in ratios.split(",")) + 64
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
async def _pair(arguments: argparse.Namespace) -> AsyncIterator[_Pair]:
    engines = []
    for index, role in enumerate(("kv_producer", "kv_consumer")):
        config = _config(arguments, kv_transfer_config={"kv_role": role, "kv_connector": arguments.connector})
        if arguments.device != "cpu":
            config = replace(config, parallel=replace(config.parallel, device_index=index))
        engines.append(_Engine(make_client(config)))
    pair = _Pair(*engines)
    try:
        for engine in engines:
            pair.vocab_size = await engine.start()
        yield pair
    finally:
        for engine in engines:
            await engine.stop()


@asynccontextmanager
async def _mixed(arguments: argparse.Namespace) -> AsyncIterator[_Mixed]:
    mixed = _Mixed(_Engine(make_client(_config(arguments, data_parallel_size=2))))
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


async def _one(pair: _Pair, arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    rows: list[dict[str, float]] = []
    for number in range(arguments.runs + 2):  # two to warm up
        request = _request(rng, f"one {number}", pair.vocab_size, arguments.prompt, 32)
        began = time.perf_counter()
        seen, answered = await pair.run(request)
        gaps = sorted(after - before for before, after in pairwise(seen.times[8:]))
        decode = gaps[len(gaps) // 2]
        second = seen.times[1] - answered
        rows.append({"prompt_ms": answered - began, "second_ms": second, "decode_ms": decode, "handover_ms": second - decode})
    kept = rows[2:]
    row: dict[str, Any] = {"what": "one", "prompt": arguments.prompt, "runs": len(kept)}
    for name in rows[0]:
        values = sorted(one[name] * 1e3 for one in kept)
        row[name] = {"p50": round(values[len(values) // 2], 2), "max": round(values[-1], 2)}
    stats = pair.taker.stats
    if stats is not None:
        row["transfer_ms"] = round(stats.kv_tiers.get("handover_seconds_p50", 0.0) * 1e3, 2)
        row["failures"] = stats.kv_tiers.get("handover_failures")
    return row | {"limit_ms": LIMIT_MS}


async def _load(engines: _Pair | _Mixed, arguments: argparse.Namespace, rate: float, prompt: int, new: int) -> dict[str, Any]:
    rng = random.Random(1)
    await asyncio.gather(*(engines.run(_request(rng, f"warm {number}", engines.vocab_size, prompt, 16)) for number in range(4)))
    began = time.perf_counter()
    running: list[asyncio.Task[tuple[_Seen, float, float]]] = []
    at = 0.0

    async def one(request: EngineRequest) -> tuple[_Seen, float, float]:
        sent = time.perf_counter()
        seen, answered = await engines.run(request)
        return seen, sent, answered

    while at < arguments.seconds:
        request = _request(rng, f"load {len(running)}", engines.vocab_size, prompt, new)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        running.append(asyncio.create_task(one(request)))
        at += rng.expovariate(rate)
    found = await asyncio.gather(*running)
    seconds = time.perf_counter() - began
    gaps = [(after - before) * 1e3 for seen, _, _ in found for before, after in pairwise(seen.times)]
    row = {
        "rate": rate,
        "requests": len(found),
        "seconds": round(seconds, 2),
        "tok_s": round(sum(len(seen.times) for seen, _, _ in found) / seconds, 1),
        "gap_ms": _percentiles(gaps),
        "ttft_s": _percentiles([seen.times[0] - sent for seen, sent, _ in found]),
    }
    if isinstance(engines, _Pair) and engines.taker.stats is not None:
        row["handover"] = {
            name: value for name, value in engines.taker.stats.kv_tiers.items() if "taken" in name or "fail" in name or "_p" in name
        }
    return row


async def _highest_rate(engines: _Pair | _Mixed, arguments: argparse.Namespace, prompt: int, new: int) -> dict[str, Any]:
    """By doubling, then by halving the distance twice."""
    low, high, best = 0.0, arguments.rate, dict[str, Any]()
    is_bounded = False
    for _ in range(6):
        rate = (low + high) / 2 if is_bounded else high
        row = await _load(engines, arguments, rate, prompt, new)
        if row["ttft_s"]["p99"] <= arguments.ttft_limit and row["gap_ms"]["p99"] <= arguments.gap_limit:
            low, best = rate, row
            high = high if is_bounded else 2 * high
        else:
            high, is_bounded = rate, True
        if is_bounded and high - low <= 0.15 * high:
            break
    return best or {"rate": 0.0}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for name, share in (("p50", 0.5), ("p99", 0.99))}


class _Server:
    """A server or a router as a user starts it, on a port that stays the same when it is started again."""

    def __init__(self, port: int, *arguments: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "compile_and_serve.serve.cli", *arguments, "--port", str(port)]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, start_new_session=True)

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{' '.join(self._command)} did not start")

    def kill(self) -> None:
        """-9, with its engine."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=30).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"cas:{name}"))


def _kills(arguments: argparse.Namespace, flags: Sequence[str]) -> bool:
    transfer = {"kv_connector": "socket", "kv_connector_extra_config": {"lease_seconds": 3, "load_seconds": 2}}
    options = ["serve", arguments.model, "--served-model-name", "m", "--device", "cpu" if arguments.device == "cpu" else "auto", *flags]
    options += ["--kv-transfer-config", json.dumps(transfer), *(["--enforce-eager"] if arguments.eager else [])]
    first, second, third = _free_ports(3)
    giver, taker = _Server(first, *options), _Server(second, *options)
    servers = [giver, taker]
    try:
        for one in servers:
            one.wait()
        route = _Server(third, "route", "--prefill", giver.url, "--decode", taker.url)
        servers.append(route)
        route.wait()
        bodies = [_body(number) for number in range(arguments.streams)]
        expected = asyncio.run(_answers(taker.url, bodies))
        began = time.monotonic()
        asyncio.run(_answers(route.url, bodies))
        duration = time.monotonic() - began
        rng, rows = random.Random(0), []
        for number in range(arguments.kills):
            which = number % 2 if arguments.victims == "both" else arguments.victims == "takers"
            victim, other = (taker, giver) if which else (giver, taker)
            ends = asyncio.run(_with_kill(route.url, bodies, expected, victim, rng.random() * duration))
            victim.start()
            victim.wait()
            _wait_until_up(route.url)
            row = {"kill": number, "victim": "taker" if which else "giver", **ends, "is_free": _is_free(other) and _is_free(victim)}
            row["is_well"] = row["is_free"] and not ends.get("stuck") and not ends.get("wrong")
            rows.append(row)
            print(json.dumps(row), flush=True)
    finally:
        for one in servers:
            one.kill()
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: row.get(name, 0) for name in ("as_expected", "errors", "wrong", "stuck")})
    is_well = all(row["is_well"] for row in rows)
    _say(arguments, {"what": "kills", "victims": arguments.victims, "kills": len(rows), "is_well": is_well, **total})
    return is_well


def _body(number: int) -> dict[str, Any]:
    text = f"{number} " + "once upon a time " * (1 + number * 3 % 11)
    return {"prompt": text, "max_tokens": 96, "temperature": 0.0, "ignore_eos": True, "stream": number % 2 == 1}


async def _answers(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts; "stuck", or "error: " and why."""
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE) as http:
        return list(await asyncio.gather(*(_answer(http, body) for body in bodies)))


async def _answer(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    try:
        if not body["stream"]:
            answer = await http.post("/v1/completions", json=body)
            found = answer.json()
            return str(found["choices"][0]["text"]) if answer.status_code == 200 else f"error: {found['error']['message']}"
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            content = await answer.aread()
    except httpx.TimeoutException:
        return "stuck"
    except httpx.HTTPError as error:
        return f"stuck: the router itself failed: {error}"
    texts, has_ended = [], False
    for line in content.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return f"error: {event['error']['message']}"
            texts.append(event["choices"][0]["text"] if event.get("choices") else "")
        has_ended |= line == b"data: [DONE]"
    if answer.status_code != 200:
        return f"error: {content[:200]!r}"
    return "".join(texts) if has_ended else "wrong: the stream has no end"


async def _with_kill(url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[str], victim: _Server, after: float) -> dict[str, int]:
    answering = asyncio.create_task(_answers(url, bodies))
    await asyncio.sleep(after)
    victim.kill()
    ends: Counter[str] = Counter()
    for found, wanted in zip(await answering, expected, strict=True):
        kind = "as_expected" if found == wanted else "errors" if found.startswith("error: ") else "wrong"
        ends["stuck" if found.startswith("stuck") else kind] += 1
    return dict(ends)


def _is_free(server: _Server) -> bool:
    """Whether no request and no lease holds blocks, soon."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if server.metric("kv_cache_usage_perc") == 0 and server.metric("kv_handover_leases{") == 0:
            return True
        time.sleep(0.1)
    return False


def _wait_until_up(route: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = httpx.get(route + "/health", timeout=10).json()
        if all(is_up for kind in found.values() for is_up in kind.values()):
            return
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    import socket

    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    main()
