"""`AsyncEngine` with clients that read slowly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.serve.engine.engine import Generation
from tests.serve.conftest import ANSWER, Server, StartServer, eventually
from tests.support.fake_engine import says


async def submitted(server: Server, name: str = "slow", **params: Any) -> Generation:
    engine = server.app.state.context.engine
    prompt, prepared = engine.inputs.prepare([5, 6], SamplingParams(temperature=0, **params))
    return await engine.submit(name, [prompt], [prepared])


async def test_unread_deltas_are_merged_into_one_per_completion(server: Server) -> None:
    generation = await submitted(server, n=3, max_tokens=100)
    await eventually(lambda: server.engine.steps > 0 and server.engine.num_running == 0)
    deltas = await anext(generation)
    assert sorted(delta.index for delta in deltas) == [0, 1, 2]
    assert [delta.text for delta in deltas] == [ANSWER] * 3
    assert {delta.finish_reason for delta in deltas} == {"stop"}
    assert [delta async for delta in generation] == []


async def test_deltas_that_were_read_do_not_change(start_server: StartServer, tokenizer: Any) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False))
    generation = await submitted(server, max_tokens=50, ignore_eos=True)
    parts: list[str] = []
    read = []
    async for deltas in generation:
        parts += [delta.text for delta in deltas]
        read += deltas
        wanted = server.engine.steps + 3
        await eventually(lambda wanted=wanted: server.engine.steps >= wanted or server.engine.num_running == 0)  # type: ignore[misc]
    assert len(read) < 50
    assert [delta.text for delta in read] == parts
    assert sum(len(delta.token_ids) for delta in read) == 50
    assert "".join(parts).startswith(ANSWER)


async def test_unread_text_comes_before_the_error(start_server: StartServer, tokenizer: Any) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"pause": 0.001})
    context = server.app.state.context
    generation = await submitted(server, max_tokens=200, ignore_eos=True)
    await eventually(lambda: server.engine.steps > 30)
    server.engine.die("The engine process was ended by signal 9.")
    await eventually(lambda: context.engine.dead_reason is not None)
    text, error = await anext(generation)
    assert text.text.startswith(ANSWER)
    assert (text.error, text.finish_reason) == (None, None)
    assert error.error == "The engine process was ended by signal 9."


async def test_aborts_reach_the_engine_before_new_requests(start_server: StartServer, tokenizer: Any) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"max_in_flight": 1, "pause": 0.001})
    for _ in range(3):
        generation = await submitted(server, max_tokens=200, ignore_eos=True)
        await anext(generation)
        generation.close()
    last = await submitted(server, max_tokens=2)
    deltas = [delta async for some in last for delta in some]
    assert [delta.error for delta in deltas if delta.error] == []
    assert len(server.engine.aborted) == 3


async def test_an_abort_during_the_wait_for_another_comes_first_too(
    start_server: StartServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start_server(script=says(tokenizer, ANSWER, end=False), engine={"max_in_flight": 2, "pause": 0.001})
    first, second = [await submitted(server, name, ignore_eos=True, max_tokens=200) for name in ("first", "second")]
    sent: list[str] = []
    gates = [asyncio.Event(), asyncio.Event()]
    closed, abort, add = iter(gates), server.engine.abort, server.engine.add_request

    async def slow_abort(ids: list[str]) -> None:
        await next(closed).wait()
        sent.append("abort")
        await abort(ids)

    async def noted_add(request: Any) -> None:
        sent.append("add")
        await add(request)

    monkeypatch.setattr(server.engine, "abort", slow_abort)
    monkeypatch.setattr(server.engine, "add_request", noted_add)
    first.close()
    submitting = asyncio.create_task(submitted(server, "third", max_tokens=1))
    await asyncio.sleep(0.01)
    second.close()
    for gate in gates:
        gate.set()
        await asyncio.sleep(0.01)
    await submitting
    assert sent == ["abort", "abort", "add"]
