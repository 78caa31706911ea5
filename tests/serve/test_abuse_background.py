"""Responses in the background are bounded for each API key, whatever one key does, and its owner and the admin can end them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.fake_engine import says

LIMIT = 3
KEYS: dict[str, Any] = {
    "api_keys": ("a", "b"),
    "admin_keys": ("admin",),
    "response_store_bytes": 1 << 20,
    "max_background_responses": LIMIT,
}


async def send(server: Server, key: str | None, **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return await server.http.post("/v1/responses", json={"input": "Hi", "background": True, **fields}, headers=headers)


async def cancel(server: Server, key: str, response_id: str) -> httpx.Response:
    return await server.http.post(f"/v1/responses/{response_id}/cancel", headers={"Authorization": f"Bearer {key}"})


@pytest.fixture
async def endless(start_server: StartServer, tokenizer: Tokenizer) -> Server:
    server: Server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005}, **KEYS)
    return server


async def test_a_flood_of_one_key_is_refused_and_the_others_go_on(endless: Server) -> None:
    answers = await asyncio.gather(*(send(endless, "a", ignore_eos=True) for _ in range(50)))
    accepted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(accepted) == LIMIT
    assert {answer.status_code for answer in refused} == {429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    error = refused[0].json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", 429, "background")
    assert (await send(endless, "b", ignore_eos=True)).status_code == 200
    assert (await send(endless, "a", background=False, max_output_tokens=4)).status_code == 200  # only the background is bounded
    assert endless.app.state.context.engine.num_in_flight == LIMIT + 1

    ended = accepted[0].json()["id"]
    assert (await cancel(endless, "a", ended)).json()["status"] == "cancelled"
    assert (await send(endless, "a", ignore_eos=True)).status_code == 200
    assert (await send(endless, "a", ignore_eos=True)).status_code == 429


@pytest.mark.parametrize(
    "fields", [{"model": "absent"}, {"temperature": -1}, {"store": False}, {"input": "x " * 100_000}, {"stream": True}]
)
async def test_requests_that_are_refused_take_no_place(endless: Server, fields: dict[str, Any]) -> None:
    for _ in range(2 * LIMIT):
        assert (await send(endless, "a", **fields)).status_code in (400, 404)
    assert [(await send(endless, "a", ignore_eos=True)).status_code for _ in range(LIMIT + 1)] == [200] * LIMIT + [429]


async def test_places_are_free_again_after_the_end(start_server: StartServer) -> None:
    server = await start_server(**KEYS)
    for _ in range(3 * LIMIT):
        response = await send(server, "a")
        assert response.status_code == 200
        await eventually(lambda: not server.app.state.context.stored_responses.tasks)


async def test_the_admin_ends_what_others_began_and_does_not_read_it(endless: Server) -> None:
    response_id = (await send(endless, "a", ignore_eos=True)).json()["id"]
    assert (await cancel(endless, "b", response_id)).status_code == 404
    assert endless.app.state.context.engine.num_in_flight == 1
    answer = await cancel(endless, "admin", response_id)
    assert answer.json() == {"id": response_id, "object": "response", "status": "cancelled"}
    assert endless.app.state.context.engine.num_in_flight == 0
    headers = {"Authorization": "Bearer admin"}
    assert (await endless.http.get(f"/v1/responses/{response_id}", headers=headers)).status_code == 404
    own = await endless.http.get(f"/v1/responses/{response_id}", headers={"Authorization": "Bearer a"})
    assert own.json()["status"] == "cancelled"
    assert (await cancel(endless, "admin", "resp-none")).status_code == 404


async def test_without_keys_all_share_one_limit(start_server: StartServer, tokenizer: Tokenizer) -> None:
    settings = {"response_store_bytes": 1 << 20, "max_background_responses": LIMIT}
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.005}, **settings)
    answers = await asyncio.gather(*(send(server, None, ignore_eos=True) for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * LIMIT + [429] * 7
