"""Refusals wait where there are many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compile_and_serve.serve.http import refusals
from compile_and_serve.serve.http.refusals import RefusalMiddleware


def asked(
    statuses: list[int], monkeypatch: pytest.MonkeyPatch, *, method: str = "POST", tenants: list[str | None] | None = None
) -> list[int]:
    """Numbers of the requests that had to wait; all come at once."""
    waited: list[int] = []

    async def run() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": scope["status"], "headers": []})

        async def wait(seconds: float) -> None:
            waited.append(current[0])

        monkeypatch.setattr(refusals.asyncio, "sleep", wait)
        middleware, current, sent = RefusalMiddleware(app), [0], list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        for number, status in enumerate(statuses):
            current[0] = number
            tenant = None if tenants is None else tenants[number]
            state = {} if tenant is None else {"tenant": tenant}
            scope = {"type": "http", "method": method, "status": status, "state": state, "client": ("10.0.0.1", 1)}
            await middleware(scope, None, send)  # type: ignore[arg-type]
        assert [message["status"] for message in sent] == statuses

    asyncio.run(run())
    return waited


@pytest.mark.parametrize("status", [401, 403, 429, 503])
def test_the_first_refusals_do_not_wait_and_later_ones_do(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked([status] * 30, monkeypatch)[0] == 20


def test_what_succeeds_does_not_wait_nor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked([200] * 50 + [400] * 50 + [401], monkeypatch) == []


def test_a_probe_that_hears_503_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked([503] * 50, monkeypatch, method="GET") == []
    assert asked([401] * 30, monkeypatch, method="GET")


def test_each_key_has_its_own_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = asked([429] * 60, monkeypatch, tenants=["a"] * 40 + ["b"] * 20)
    assert min(waited) == 20
    assert max(waited) < 40


def test_as_many_as_are_allowed_a_second_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now[0])
    refused = refusals._Refused(0.0)
    for _ in range(100):
        now[0] += 1 / refusals.FREE_PER_SECOND
        assert not refused.has_to_wait(now[0])
    while not refused.has_to_wait(now[0]):
        pass
    now[0] += 0.5
    assert not refused.has_to_wait(now[0])
