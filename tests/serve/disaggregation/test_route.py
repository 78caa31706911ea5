"""`route`: what it sends where, and what it does when a server refuses, dies or is slow. The servers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from compile_and_serve.runtime.kv_events.wire import DEVICE, BlockStored
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys, root_key
from compile_and_serve.serve.disaggregation.app import DisaggregatingRouter, create_router_app
from compile_and_serve.serve.disaggregation.pool import ServerPool

GIVEN: dict[str, Any] = {"do_remote_prefill": True, "remote_engine_id": "p", "cas": {"lease": "secret"}}
URLS = ("http://p0", "http://p1", "http://d0", "http://d1")


class Scripted:
    """A server. status: of its answers. Bodies that came are in `bodies`."""

    def __init__(self, name: str) -> None:
        self.name, self.status, self.breaks, self.gone = name, 200, False, False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.delay = 0.0
        self.given = GIVEN
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.answer, methods=["GET", "POST"])

    async def answer(self, request: Request) -> Response:
        if request.method == "GET":
            return JSONResponse({"server": self.name})
        self.bodies.append(body := await request.json())
        self.headers.append(dict(request.headers))
        if request.url.path == "/tokenize":
            return JSONResponse({"tokens": list(range(40))})
        await asyncio.sleep(self.delay)
        if self.status != 200:
            return JSONResponse({"error": {"message": f"{self.name} says no"}}, self.status)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return JSONResponse({"choices": [], "kv_transfer_params": self.given})
        if not body.get("stream"):
            return JSONResponse({"from": self.name})

        async def events() -> AsyncIterator[bytes]:
            yield b'data: {"n": 1}\n\n'
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


class _Transport(httpx.ASGITransport):
    def __init__(self, server: Scripted) -> None:
        super().__init__(server.app)
        self._server = server

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._server.gone:
            raise httpx.ConnectError("refused")
        if self._server.breaks:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Breaking())
        return await super().handle_async_request(request)


class _Breaking(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'data: {"n": 1}\n\n'
        raise httpx.ReadError("gone")


@asynccontextmanager
async def routed(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Scripted], DisaggregatingRouter]]:
    servers = {url[-2:]: Scripted(url[-2:]) for url in URLS}
    router = DisaggregatingRouter(URLS[:2], URLS[2:], **options)
    http = httpx.AsyncClient(mounts={url: _Transport(servers[url[-2:]]) for url in URLS})
    router.http = router.prefill._http = router.decode._http = http
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_router_app(router)), base_url="http://router") as client:
        yield client, servers, router


async def post(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "Once upon a time", **fields})


async def test_one_server_computes_the_prompt_and_another_continues() -> None:
    async with routed() as (client, servers, router):
        answer = await client.post(
            "/v1/completions",
            json={"prompt": "Hi", "stream": True, "stream_options": {}},
            headers={"X-Request-Timeout": "9", "Authorization": "Bearer k"},
        )
        assert answer.text == 'data: {"n": 1}\n\ndata: [DONE]\n\n'
        [asked] = servers["p0"].bodies
        assert asked["stream"] is False
        assert "stream_options" not in asked
        assert asked["kv_transfer_params"]["do_remote_decode"] is True
        [continued] = servers["d0"].bodies
        assert continued["kv_transfer_params"] == GIVEN
        assert continued["stream"] is True
        assert 0 < float(servers["d0"].headers[0]["x-request-timeout"]) < 9
        assert servers["d0"].headers[0]["authorization"] == "Bearer k"
        assert (await client.get("/v1/models")).json()["server"] in ("d0", "d1")
        assert router.counts == {"requests": 1, "handovers": 1}
        assert 'cas:route_server_requests_total{kind="prefill",server="http://p0"} 1' in (await client.get("/metrics")).text


async def test_a_long_prompt_is_loaded_while_it_is_computed() -> None:
    async with routed() as (client, servers, router):
        servers["p0"].given = GIVEN | {"remote_port": 5, "cas": GIVEN["cas"] | {"offers_early": True}}
        await post(client, prompt="Hi " * 20_000)  # nothing is known of p0
        await post(client, prompt="Hi " * 20_000 + "!", stream=True)
        await post(client, prompt="Hi " * 100)
        assert [body["kv_transfer_params"].get("cas") is None for body in servers["p0"].bodies] == [True, False, True]
        name = servers["p0"].bodies[1]["kv_transfer_params"]["cas"]["early"]
        [loads] = [body for body in servers["d0"].bodies if body["kv_transfer_params"]["cas"].get("early")]
        assert loads["stream"] is False
        assert loads["prompt"].endswith("!")
        params = loads["kv_transfer_params"]
        assert (params["remote_port"], params["cas"]["lease"], params["cas"]["early"]) == (5, name, name)
        assert router.counts == {"requests": 3, "handovers": 3, "early_loads": 1}


@pytest.mark.parametrize(
    "case, expected, counts",
    [
        ("p0 gone", "d0", {"prefill_retries": 1, "handovers": 1}),
        ("p0 full", "d0", {"prefill_retries": 1, "handovers": 1}),
        ("no prefill", "d0", {"prefill_retries": 2, "prefill_unanswered": 1}),
        ("d0 full", "d1", {"handovers": 1, "decode_retries": 1}),
        ("no decode", "p1", {"handovers": 1, "decode_retries": 2, "taken_back": 1}),
        ("nobody", "", {"prefill_retries": 2, "prefill_unanswered": 1, "decode_retries": 4, "unanswered": 1}),
    ],
)
async def test_what_one_server_does_not_do_another_does(case: str, expected: str, counts: dict[str, int]) -> None:
    async with routed() as (client, servers, router):
        servers["p0"].gone = case == "p0 gone"
        for name, one in servers.items():
            full = {"p0 full": "p0", "no prefill": "p0 p1", "d0 full": "d0", "no decode": "d0 d1", "nobody": "p0 p1 d0 d1"}.get(case, "")
            one.status = 503 if name in full.split() else 200
        answer = await post(client)
        if expected:
            assert answer.json() == {"from": expected}
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["message"].endswith("says no")
        assert router.counts == {"requests": 1, **counts}
        whole = servers["d0" if case == "no prefill" else "p1"].bodies
        if case in ("no prefill", "no decode"):
            assert "kv_transfer_params" not in whole[-1]


async def test_wrong_requests_are_answered_once() -> None:
    async with routed() as (client, servers, _router):
        servers["p0"].status = 400
        answer = await post(client)
        assert (answer.status_code, answer.json()) == (400, {"error": {"message": "p0 says no"}})
        assert not any(servers[name].bodies for name in ("p1", "d0", "d1"))


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"use_beam_search": True}, {"prompt_logprobs": 1}])
async def test_what_cannot_be_split_goes_to_one_server(fields: dict[str, Any]) -> None:
    async with routed() as (client, servers, _router):
        assert (await post(client, **fields)).json() == {"from": "d0"}
        assert not servers["p0"].bodies


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    async with routed() as (client, servers, router):
        servers["d0"].breaks = True
        lines = (await post(client, stream=True)).text.split("\n\n")
        assert lines[0] == 'data: {"n": 1}'
        assert json.loads(lines[1].removeprefix("data: "))["error"]["message"].startswith("http://d0 ended before its answer did")
        assert lines[2] == "data: [DONE]"
        assert router.counts["broken_streams"] == 1


async def test_time_is_up_between_two_servers() -> None:
    async with routed() as (client, servers, _router):
        servers["p0"].delay = 0.05
        answer = await client.post("/v1/completions", json={"prompt": "Hi"}, headers={"X-Request-Timeout": "0.03"})
        assert answer.status_code == 504
        assert not servers["d0"].bodies


async def test_equal_beginnings_go_to_the_same_server() -> None:
    async with routed() as (client, servers, _router):
        for text in ("a" * 500, "b" * 500, "a" * 500 + "c", "b" * 500 + "d", "a" * 500 + "e"):
            await post(client, prompt=text)
        starts = [{body["prompt"][0] for body in servers[name].bodies} for name in ("p0", "p1")]
        assert starts == [{"a"}, {"b"}]


async def test_events_say_which_server_has_a_prefix() -> None:
    async with routed(events=["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], block_size=4) as (client, servers, router):
        keys: list[bytes] = []
        extend_keys(keys, root_key(None), list(range(40)), 4, 10)
        stored = BlockStored(
            block_hashes=keys, parent_block_hash=None, token_ids=[], block_size=4, lora_id=None, medium=DEVICE, lora_name=None, group_idx=0
        )
        router.prefill.observe_events(1, [stored])
        await post(client)
        assert [body["prompt"] for body in servers["p1"].bodies] == ["Once upon a time"]


async def test_servers_with_blocks_of_another_size_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    stored = BlockStored(
        block_hashes=[b"1"], parent_block_hash=None, token_ids=[], block_size=64, lora_id=None, medium=DEVICE, lora_name=None, group_idx=0
    )
    async with httpx.AsyncClient() as http:
        pool = ServerPool(["http://p0", "http://p1"], http, block_size=16)
        for event in (msgspec.structs.replace(stored, group_idx=1), msgspec.structs.replace(stored, block_size=16), stored, stored):
            pool.observe_events(1, [event])
    assert [record.getMessage() for record in caplog.records] == [
        "http://p1 has blocks of 64 tokens, not 16: what it has cached is not found. Start `route` with --block-size 64."
    ]


async def test_servers_that_do_not_answer_get_nothing_until_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.serve.disaggregation.pool.HEALTH_SECONDS", 0.01)
    async with routed() as (client, servers, router):
        watch = asyncio.create_task(router.prefill.watch())

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                await asyncio.sleep(0.01)

        servers["p0"].gone = True
        await asyncio.wait_for(until(lambda: router.prefill.is_up == [False, True]), 5)
        await post(client)
        assert not servers["p0"].bodies
        assert (await client.get("/health")).json()["prefill"] == {"http://p0": False, "http://p1": True}
        servers["p0"].gone = False
        await asyncio.wait_for(until(lambda: router.prefill.is_up == [True, True]), 5)
        watch.cancel()
