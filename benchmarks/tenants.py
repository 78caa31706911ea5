"""What one API key gets while another attacks the server. Prints JSON lines.

    python -m benchmarks.tenants [--model smollm2-135m] [--attacks flood,grammars] [--seconds 6] [--limit 220] [-- OPTIONS OF serve]

A server of its own is started, with `--slots` batch slots. Key B keeps half of them busy: each of its streams sends the next request when
the last one has ended. `alone`: B alone. `fair`: B beside key A, which does the same. Then B beside each attack of A. A's client runs at
nice 19, in a process of its own, which serves all attacks.

No cold run is compared with. Each load runs once unmeasured, and the server is given --ready-seconds, over all runs, to do what it does
between requests (`to_come` of /ready: CUDA graphs, choices of kernels; nobody waits for `builds`, which take idle cores for minutes). Where
something was left, the row has it as `to_come`. The fair run is measured before the attacks, repeated until two more are no faster
(`steady`; false: after MAX_FAIR_RUNS they still got faster), and again after them. A row is printed once it is known, with the figures
beside the fair run before. `before` and `after` of the last rows are both fair runs, and the last row `uses` the faster: where that is the
one after, each attack has another row, which counts. Attacks that --limit leaves no time for are `left_out`; the hardest come first.
stderr says what was done when, in seconds since the start.

`tok_s`: B's tokens per second. `ttft_p50_ms`, `ttft_p99_ms`: to B's first tokens. `gap_ms`: the median between two parts of a stream, about
a step. `longest_gap_ms`: the longest of them. `statuses`: of B's requests. `attack_statuses`: of A's. `of_alone`: B's tokens per second as
a part of those alone. Beside an attack: `of_fair`, as a part of the fair run's; `ttft_ratio`, of the medians; `more_steps`, how much longer
the longest gap is than the fair run's; and `holds`: of_fair >= 0.8, ttft_ratio <= 2, more_steps <= 3, and each of B's requests got 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import count, pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import cpu_name, environment
from tests.support.server_process import ServerProcess

KEYS = {"a": "key of a", "b": "key of b"}
NEW_TOKENS = 32  # of each of B's requests
MAX_WAITING = 400
MAX_FAIR_RUNS = 5
FAIR_RUNS_AFTER = 2
WARM_SECONDS = 0.4  # of each load, unmeasured
LEAD_SECONDS = 1.0  # of an attack, before B is measured
END_SECONDS = 60.0  # for what an attack left behind, at most
NUM_ADAPTERS = 6
_NUMBERS = count()
_BEGAN = time.monotonic()

Attack = Callable[["Client"], Awaitable[None]]


class Client:
    """One key's client. statuses: of its answers; 0: none came."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {KEYS.get(key, key)}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # verify: without it no certificates are read.
        self.http = httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits, verify=False)
        self.statuses: Counter[int] = Counter()
        self.in_background: list[str] = []  # ids of responses

    async def post(self, path: str, **body: Any) -> None:
        """Send a request and read the answer."""
        try:
            self.statuses[(await self.http.post(path, json=body)).status_code] += 1
        except httpx.TransportError:
            self.statuses[0] += 1

    async def complete(self, prompt: str | list[int] = "Once", **fields: Any) -> None:
        """A completion."""
        await self.post("/v1/completions", **{"prompt": prompt, "ignore_eos": True, "max_tokens": NEW_TOKENS, **fields})

    async def stream(self, num_tokens: int, times: list[list[float]]) -> None:
        """A streamed completion with a prompt that was not seen before; adds when it was sent and when its parts came to `times`."""
        prompt = f"{next(_NUMBERS)} {random.random()}: once upon a time there was"
        body = {"prompt": prompt, "ignore_eos": True, "max_tokens": num_tokens, "stream": True}
        own = [time.monotonic()]
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            self.statuses[response.status_code] += 1
            own += [time.monotonic() async for line in response.aiter_lines() if line.startswith("data: {")]
        times.append(own)

    async def repeat(self, number: int, work: Callable[[], Awaitable[Any]]) -> None:
        """`number` tasks that do the work over and over. A refused client does not wait as long as it was told to."""

        async def again() -> None:
            while True:
                await work()
                await asyncio.sleep(0.01)

        await asyncio.gather(*(again() for _ in range(number)))


def _schema() -> dict[str, Any]:
    """A JSON schema that was not seen before."""
    names = [f"p{next(_NUMBERS)}_{random.random()}" for _ in range(40)]
    properties = {name: {"type": "array", "items": {"enum": [f"{name}{i}" for i in range(20)]}} for name in names}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object", "properties": properties, "required": names}}}


def _numbers(length: int) -> list[int]:
    return [random.randrange(100, 20_000) for _ in range(length)]


async def _identical(client: Client, slots: int) -> None:
    await client.repeat(slots // 2, lambda: client.stream(NEW_TOKENS, []))


async def _cancel(client: Client) -> None:
    async with client.http.stream("POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 500, "stream": True}) as response:
        client.statuses[response.status_code] += 1
        async for _ in response.aiter_bytes():
            break


async def _unauthorized(client: Client) -> None:
    answer = await client.http.post("/v1/completions", json={"prompt": "Once"}, headers={"Authorization": "Bearer wrong"})
    client.statuses[answer.status_code] += 1


async def _metrics(client: Client) -> None:
    client.statuses[(await client.http.get("/metrics")).status_code] += 1


def _chat(client: Client) -> Awaitable[None]:
    messages = [{"role": "user", "content": "Hi"}]
    return client.post("/v1/chat/completions", messages=messages, response_format=_schema(), max_tokens=NEW_TOKENS)


async def _background(client: Client) -> None:
    answer = await client.http.post("/v1/responses", json={"input": "Hi", "background": True, "max_output_tokens": 500})
    client.statuses[answer.status_code] += 1
    if answer.status_code == 200:
        client.in_background.append(answer.json()["id"])


ATTACKS: dict[str, Attack] = {  # the hardest first
    "beams": lambda a: a.repeat(2, lambda: a.complete(n=64, use_beam_search=True, ignore_eos=False, max_tokens=16)),
    "prompt_logprobs": lambda a: a.repeat(4, lambda: a.complete(_numbers(1500), max_tokens=4, prompt_logprobs=5)),
    "cancels": lambda a: a.repeat(32, lambda: _cancel(a)),
    "queue": lambda a: a.repeat(64, lambda: a.complete(n=16, max_tokens=64)),
    "flood": lambda a: a.repeat(400, lambda: a.complete(max_tokens=500)),
    "background": lambda a: a.repeat(32, lambda: _background(a)),
    "prompts": lambda a: a.repeat(4, lambda: a.complete(_numbers(6000), max_tokens=4)),
    "siblings": lambda a: a.repeat(16, lambda: a.complete(n=128, max_tokens=16)),
    "grammars": lambda a: a.repeat(64, lambda: _chat(a)),
    "penalties": lambda a: a.repeat(
        64, lambda: a.complete(max_tokens=100, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.1, temperature=0.7)
    ),
    "logprobs": lambda a: a.repeat(32, lambda: a.complete(max_tokens=100, logprobs=20)),
    "adapters": lambda a: a.repeat(32, lambda: a.complete(model=f"adapter-{random.randrange(NUM_ADAPTERS)}")),
    "unauthorized": lambda a: a.repeat(32, lambda: _unauthorized(a)),
    "metrics": lambda a: a.repeat(32, lambda: _metrics(a)),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names separated by commas")
    parser.add_argument("--seconds", type=float, default=6.0, help="for which B is measured beside each")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--ready-seconds", type=float, default=45.0, help="for what the server does between requests, over all runs")
    parser.add_argument("--limit", type=float, help="seconds since the start after which no further attack begins")
    parser.add_argument("options", nargs="*", help="of serve, after --")
    arguments = parser.parse_args(argv)
    names = arguments.attacks.split(",")
    if unknown := [name for name in names if name not in ATTACKS]:
        parser.error(f"unknown attacks {', '.join(unknown)}: known are {', '.join(ATTACKS)}.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.yaml"
        file.write_text("".join(f"- {{key: '{key}', name: {name}}}\n" for name, key in KEYS.items()))
        options = ["--port", "0", "--tenants", str(file), "--max-num-seqs", str(arguments.slots), "--max-waiting", str(MAX_WAITING)]
        options += ["--response-store", "64MiB", "--throughput-log", "0", "--no-access-log"]
        if "adapters" in names:
            options += ["--enable-lora", "--max-loras", "2"]
            for number in range(NUM_ADAPTERS):
                path = Path(folder) / f"adapter-{number}"
                _write_adapter(path, arguments.model)
                options += ["--lora-modules", f"{path.name}={path}"]
            _say("the adapters are written")
        _say("the server starts")
        server = ServerProcess(arguments.model, *options, *arguments.options, on_line=_Starting())
        try:
            _measure_all(Bench(server.url, arguments), names, arguments)
        finally:
            server.stop()
            _say("the server has ended")


class _Starting:
    """Says on stderr what a server writes until it serves."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self, line: str) -> None:
        if not self._is_over:
            _say(line.strip()[:160])
        self._is_over |= "Serving" in line


def _say(what: str) -> None:
    print(f"{time.monotonic() - _BEGAN:.1f} s: {what}", file=sys.stderr, flush=True)


def _measure_all(bench: Bench, names: Sequence[str], arguments: argparse.Namespace) -> None:
    where = {"model": arguments.model, "slots": arguments.slots, "cpu": cpu_name(), **environment()}
    run = bench.run
    for name in ("fair", *names):
        run(name, WARM_SECONDS, 0.0)
    alone = run(None)
    print(json.dumps({"tenants": "alone", **alone, **where}), flush=True)
    before = _fastest_fair(run)
    print(json.dumps({"tenants": "fair", "of_alone": round(_speed(before) / _speed(alone), 2), **before, **where}), flush=True)
    rows, left_out = dict[str, dict[str, Any]](), list[str]()
    for name in names:
        if bench.is_late:
            left_out.append(name)
            continue
        rows[name] = run(name)
        print(json.dumps({"tenants": name, **_beside_fair(rows[name], before, alone), **where}), flush=True)
    after = max((run("fair") for _ in range(FAIR_RUNS_AFTER)), key=_speed)
    uses = "after" if _speed(after) > _speed(before) else "before"
    if uses == "after":
        for name, row in rows.items():
            print(json.dumps({"tenants": name, "uses": uses, **_beside_fair(row, after, alone), **where}), flush=True)
    fair = after if uses == "after" else before
    counts = {name: _beside_fair(row, fair, alone)["holds"] for name, row in rows.items()}
    last = {"uses": uses, "before": before, "after": after, "holds": counts, "left_out": left_out}
    print(json.dumps({"tenants": "fair", **last, **where}), flush=True)
    bench.close()


def _beside_fair(row: dict[str, Any], fair: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """An attack's row, with its figures beside those of the fair run and of B alone."""
    of_fair, ttft_ratio = round(_speed(row) / _speed(fair), 2), round(row["ttft_p50_ms"] / fair["ttft_p50_ms"], 2)
    more_steps = round((row["longest_gap_ms"] - fair["longest_gap_ms"]) / fair["gap_ms"], 1)
    return row | {
        "of_alone": round(_speed(row) / _speed(alone), 2),
        "of_fair": of_fair,
        "ttft_ratio": ttft_ratio,
        "more_steps": more_steps,
        "holds": of_fair >= 0.8 and ttft_ratio <= 2 and more_steps <= 3 and set(row["statuses"]) == {200},
    }


def _speed(row: dict[str, Any]) -> float:
    return float(row["tok_s"])


def _fastest_fair(run: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The fair run, repeated until two more are no faster: the first loads of a start meet sizes that are not captured or compiled yet."""
    best, slower = run("fair"), 0
    for _ in range(MAX_FAIR_RUNS):
        again = run("fair")
        slower = 0 if _speed(again) > 1.03 * _speed(best) else slower + 1
        best = max(best, again, key=_speed)
        if slower == 2:
            break
    return best | {"steady": slower == 2}


class Bench:
    """A server, and the clients of both keys."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self._url, self._slots, self._seconds = url, arguments.slots, arguments.seconds
        self._limit = math.inf if arguments.limit is None else arguments.limit
        self._ready_seconds = arguments.ready_seconds  # that are left
        self._attacker = Attacker(url, arguments.slots)
        self._probe = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEYS['b']}"}, timeout=60, verify=False)

    @property
    def is_late(self) -> bool:
        """Whether no further attack may begin: it takes some seconds more than B is measured, and so do the fair runs after it."""
        num_runs = 1 + FAIR_RUNS_AFTER
        return time.monotonic() - _BEGAN + num_runs * (self._seconds + LEAD_SECONDS + 0.5) > self._limit

    def run(self, name: str | None, seconds: float | None = None, lead: float = LEAD_SECONDS) -> dict[str, Any]:
        """B beside an attack of A; None: alone. seconds: for which B is measured. lead: seconds from the attack's beginning to B's."""
        began = time.monotonic()
        to_come = self._wait_until_idle()
        waited = time.monotonic() - began
        victim = _victim(self._url, self._slots // 2, self._seconds if seconds is None else seconds)
        row = asyncio.run(victim) if name is None else self._beside(name, victim, lead)
        if to_come:
            row["to_come"] = to_come
        took = time.monotonic() - began - waited
        what = f"{name or 'alone'}{'' if seconds is None else ', unmeasured'}"
        _say(f"{what}: {row['tok_s']} tok/s; waited {waited:.1f} s, took {took:.1f} s{f', to come: {to_come}' if to_come else ''}")
        return row

    def close(self) -> None:
        self._attacker.close()
        self._probe.close()

    def _beside(self, name: str, victim: Coroutine[Any, Any, dict[str, Any]], lead: float) -> dict[str, Any]:
        self._attacker.begin(name)
        time.sleep(lead)
        try:
            row = asyncio.run(victim)
        finally:
            statuses = self._attacker.end()
        return row | {"attack_statuses": statuses}

    def _wait_until_idle(self) -> dict[str, int]:
        """Let the server end what an attack left behind (background responses), and do what it does between requests. → what is left"""
        began = said = time.monotonic()
        while True:
            load = self._probe.get("/load").json()["server_load"]
            to_come = self._probe.get("/ready").json().get("to_come", {})
            is_waited_for = self._ready_seconds > 0 and any(count for kind, count in to_come.items() if kind != "builds")
            now = time.monotonic()
            if not load and not is_waited_for:
                return to_come
            if load and now - began > END_SECONDS:
                raise SystemExit(f"After {now - began:.0f} seconds the server still has {load} sequences.")
            if now - said > 5:
                said = now
                _say(f"{load} sequences, to come: {to_come or 'nothing'}")
            time.sleep(0.05)
            if is_waited_for:
                self._ready_seconds -= time.monotonic() - now


class Attacker:
    """Key A's client, in a process of its own."""

    def __init__(self, url: str, slots: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._begun, self._stop = context.Event(), context.Event()
        self._names, self._statuses = context.SimpleQueue(), context.SimpleQueue()
        events = (self._begun, self._stop, self._names, self._statuses)
        self._process = context.Process(target=_attack, args=(url, slots, *events), daemon=True)
        self._process.start()

    def begin(self, name: str) -> None:
        self._names.put(name)
        if not self._begun.wait(120):
            raise SystemExit(f"The attack {name} did not begin.")

    def end(self) -> dict[int, int]:
        """Ends the attack and its connections; → statuses of A's requests: how many."""
        self._stop.set()
        while not self._statuses.empty() or self._process.is_alive():
            if not self._statuses.empty():
                return self._statuses.get()
            time.sleep(0.01)
        raise SystemExit("The attack's process has failed.")

    def close(self) -> None:
        self._names.put(None)
        self._process.join()


def _attack(url: str, slots: int, begun: Event, stop: Event, names: Any, statuses: Any) -> None:
    os.nice(19)

    async def run(name: str) -> dict[int, int]:
        client = Client(url, "a")
        work = _identical(client, slots) if name == "fair" else ATTACKS[name](client)
        task = asyncio.ensure_future(work)
        begun.set()
        while not stop.is_set() and not task.done():
            await asyncio.sleep(0.05)
        if task.done():
            task.result()  # raises its error
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        statuses = dict(client.statuses)
        for response in client.in_background:  # nobody waits for what is left of them
            await client.http.post(f"/v1/responses/{response}/cancel")
        await client.http.aclose()
        return statuses

    while (name := names.get()) is not None:
        found = asyncio.run(run(name))
        begun.clear()
        stop.clear()
        statuses.put(found)


async def _victim(url: str, streams: int, seconds: float) -> dict[str, Any]:
    client, times = Client(url, "b"), list[list[float]]()
    end = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            await client.stream(NEW_TOKENS, times)

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(streams)))
    elapsed = time.monotonic() - began
    await client.http.aclose()
    whole = [own for own in times if len(own) > 2]
    first = sorted((own[1] - own[0]) * 1e3 for own in whole) or [0.0]  # none was answered
    gaps = [(after - before) * 1e3 for own in whole for before, after in pairwise(own[1:])] or [0.0]
    return {
        "tok_s": round(len(whole) * NEW_TOKENS / elapsed, 1),
        "requests": len(whole),
        "ttft_p50_ms": round(statistics.median(first), 1),
        "ttft_p99_ms": round(first[int(len(first) * 0.99)], 1),
        "gap_ms": round(statistics.median(gaps), 2),
        "longest_gap_ms": round(max(gaps), 1),
        "statuses": dict(client.statuses),
    }


def _write_adapter(folder: Path, model: str) -> None:
    import torch
    from safetensors.torch import save_file

    from compile_and_serve.runtime.weights.checkpoint import read_config
    from compile_and_serve.runtime.weights.resolve import resolve_model

    config = read_config(resolve_model(model))
    hidden, rank = config["hidden_size"], 8
    heads = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, heads) * 0.01
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"], "base_model_name_or_path": model}
    (folder / "adapter_config.json").write_text(json.dumps(options))


if __name__ == "__main__":
    main()
