"""Two servers behind `route`, as a user starts them: answers as from one server, and nothing leaks when a side is killed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.connector.handover.params import OWN, early_params
from tests.support.processes import wait_until
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.slow

OPTIONS = ("--port", "0", "--dtype", "float32", "--device", "cpu", "--enforce-eager", "--max-model-len", "512", "--num-threads", "1")
TRANSFER = '{{"kv_role": "{}", "kv_connector_extra_config": {{"lease_seconds": 3, "load_seconds": 2}}}}'


class Pair:
    """A server for prompts, a server for answers, and their router."""

    def __init__(self, model: Path) -> None:
        self.model = str(model)
        self.giver, self.taker = self.start("kv_both"), self.start("kv_both")
        for one in (self.giver, self.taker):
            one.url = one._wait_for_url()
        self.route = ServerProcess("--port", "0", "--prefill", self.giver.url, "--decode", self.taker.url, command="route")

    def start(self, role: str, *more: str) -> ServerProcess:
        return ServerProcess(
            self.model, "--served-model-name", "tiny", *OPTIONS, "--kv-transfer-config", TRANSFER.format(role), *more, wait=False
        )

    def stop(self) -> None:
        for one in (self.route, self.giver, self.taker):
            one.process.kill()
            one.wait()


@pytest.fixture(scope="module")
def pair(tiny_llama_dir: Path) -> Iterator[Pair]:
    pair = Pair(tiny_llama_dir)
    yield pair
    pair.stop()


def metric(url: str, name: str, *, without_events: float | None = None) -> float:
    """without_events: the value of a counter that has no line before its first event."""
    found = re.search(rf"^cas:{name}(?:{{.*}})? (\S+)$", httpx.get(url + "/metrics", timeout=60).text, re.MULTILINE)
    if found is None and without_events is not None:
        return without_events
    assert found is not None, name
    return float(found[1])


def bodies(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of different lengths, streamed or not, greedy and seeded, chats and completions."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        text = f"{number} " + "once upon a time there was " * (1 + number % 9)
        body: dict[str, Any] = {"max_tokens": 12 + number % 7, "temperature": 0.0, "ignore_eos": True}
        if number % 5 == 4:
            body |= {"temperature": 0.9, "seed": number}
        if number % 2:
            found.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            found.append(("/v1/completions", body | {"prompt": text}))
    return found


async def answers(url: str, wanted: list[tuple[str, dict[str, Any]]]) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def one(path: str, body: dict[str, Any]) -> str:
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            [choice] = answer.json()["choices"]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])

        return list(await asyncio.gather(*(one(path, body) for path, body in wanted)))


def check_nothing_is_held(pair: Pair) -> None:
    end = time.monotonic() + 20
    while True:
        usage = [metric(one.url, "kv_cache_usage_perc") for one in (pair.giver, pair.taker)]
        leases = [metric(one.url, "kv_handover_leases") for one in (pair.giver, pair.taker)]
        if usage == [0, 0] and leases == [0, 0]:
            return
        assert time.monotonic() < end, (usage, leases)
        time.sleep(0.1)


@pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.exhaustive)])
async def test_answers_are_as_from_one_server(pair: Pair, count: int) -> None:
    wanted = bodies(count)
    before = metric(pair.route.url, "route_handovers_total", without_events=0.0)
    assert await answers(pair.route.url, wanted) == await answers(pair.taker.url, wanted)
    assert metric(pair.route.url, "route_handovers_total") - before == count
    assert metric(pair.taker.url, "kv_handover_failures") == 0
    assert metric(pair.taker.url, "kv_handover_taken_requests") > 0
    check_nothing_is_held(pair)


async def test_a_request_that_only_loads_ends_at_once_without_an_answer(pair: Pair) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "once upon a time " * 30, "max_tokens": 8, "temperature": 0.0, "seed": 1}
    give = {"do_remote_decode": True}
    async with httpx.AsyncClient(timeout=60) as http:

        async def post(server: ServerProcess, params: dict[str, Any] | None, prompt: str) -> dict[str, Any]:
            answer = await http.post(server.url + "/v1/completions", json=body | {"prompt": prompt, "kv_transfer_params": params})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        text = body["prompt"]
        first = (await post(pair.giver, give, text + "one"))["kv_transfer_params"]
        await post(pair.taker, first, text + "one")
        loads, given = await asyncio.gather(
            post(pair.taker, early_params(first, "a name"), "two " + text),
            post(pair.giver, give | {OWN: {"early": "a name"}}, "two " + text),
        )
        assert (loads["choices"][0]["text"], loads["choices"][0]["finish_reason"]) == ("", "length")
        found = await post(pair.taker, given["kv_transfer_params"], "two " + text)
        assert found["choices"] == (await post(pair.giver, None, "two " + text))["choices"]
    wait_until(lambda: metric(pair.taker.url, "kv_handover_early_requests") == 1, 10)
    check_nothing_is_held(pair)
