"""/metrics is rendered at most once a second, however many read it."""

from __future__ import annotations

import asyncio

import pytest

from compile_and_serve.serve.observe.rendered import MAX_READS, RenderedMetrics
from tests.serve.conftest import StartServer


async def test_readers_share_a_rendering(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.serve.observe.rendered.MAX_AGE_SECONDS", 1.0)
    server = await start_server()
    metrics, num_rendered = server.app.state.context.metrics, 0
    render = metrics.render

    def count() -> bytes:
        nonlocal num_rendered
        num_rendered += 1
        return bytes(render())

    monkeypatch.setattr(metrics, "render", count)
    answers = await asyncio.gather(*(server.http.get("/metrics") for _ in range(MAX_READS)))
    assert {answer.status_code for answer in answers} == {200}
    assert num_rendered == 1
    assert len({answer.content for answer in answers}) == 1
    await server.chat()
    await asyncio.sleep(1.1)
    assert 'finished_reason="stop"' in (await server.http.get("/metrics")).text
    assert num_rendered == 2


async def test_an_error_is_not_kept() -> None:
    answers = iter([OSError("one API process is gone"), b"text"])

    async def render() -> bytes:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    metrics = RenderedMetrics(render)
    with pytest.raises(OSError, match="gone"):
        await metrics.text()
    assert await metrics.text() == b"text"


async def test_many_readers_wait_for_the_next_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.serve.observe.rendered.MAX_AGE_SECONDS", 0.1)
    num_rendered = 0

    async def render() -> bytes:
        nonlocal num_rendered
        num_rendered += 1
        return b"%d" % num_rendered

    metrics = RenderedMetrics(render)
    texts = await asyncio.gather(*(metrics.text() for _ in range(MAX_READS + 5)))
    assert texts == [b"1"] * MAX_READS + [b"2"] * 5
