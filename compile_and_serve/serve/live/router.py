"""`/requests`: a page of the requests that wait and run, and of the steps below them. It asks for its data with the admin key."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi.responses import HTMLResponse

from compile_and_serve.serve.context import Context
from compile_and_serve.serve.http.responses import json_response
from compile_and_serve.serve.ledger.book import LedgerBook
from compile_and_serve.serve.ledger.record import RequestRecord
from compile_and_serve.serve.ledger.sentences import WAITS
from compile_and_serve.serve.look import links, look_style, security_policy, theme_script

STATIC = Path(__file__).parent / "static"
MAX_STEPS = 2000  # of one answer

router = APIRouter(tags=["Admin"])


@router.get("/requests", response_class=HTMLResponse, include_in_schema=False)
async def page(context: Context) -> HTMLResponse:
    """The page, without data."""
    settings = context.settings
    text = (
        _static("index.html")
        .replace("{{model}}", html.escape(settings.served_model_names[0]))
        .replace("{{links}}", links(settings, "requests"))
        .replace("{{needs-key}}", "true" if settings.api_keys or settings.admin_keys else "false")
        .replace("{{stages}}", html.escape(msgspec.json.encode(WAITS).decode()))
        .replace("{{style}}", _style())
        .replace("{{theme}}", theme_script())
        .replace("{{script}}", _static("requests.js"))
    )
    policy = security_policy(scripts=(theme_script(), _static("requests.js")), style=_style())
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


@router.get("/requests/data", summary="Requests in flight, and those that ended last")
async def data(context: Context, since: Annotated[float, Query()] = 0.0) -> Response:
    """Ledgers of this API process's requests, and the engine's steps. since: seconds since the epoch; what ended before is left out."""
    engine = context.engine
    book = engine.book
    stats = list(context.metrics.last_stats.values())
    waiting: dict[str, int] = {}
    for one in stats:
        for reason, count in one.waiting_for.items():
            waiting[reason] = waiting.get(reason, 0) + count
    steps = [(replica, step) for replica, step in book.steps if step.began + step.seconds > since]
    answer: dict[str, Any] = {
        "now": time.time(),
        "live": [_request(book, record, waiting) for record in list(book.live.values()) if record.sequences or record.stages],
        "ended": [_request(book, record) for record in book.ended if record.wall + record.ended - record.began > since],
        "steps": [[replica, *_plain(step)] for replica, step in steps[-MAX_STEPS:]],
        "engine": {
            "running": sum(one.num_running for one in stats),
            "waiting": sum(one.num_waiting for one in stats),
            "kv_usage": sum(one.kv_cache_usage for one in stats) / max(1, len(stats)),
            "blocks": sum(one.num_total_blocks for one in stats),
            "waiting_for": {reason: [count, WAITS[reason]] for reason, count in waiting.items()},
        },
    }
    return json_response(answer)


def _request(book: LedgerBook, record: RequestRecord, waiting_for: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """waiting_for: reason → requests of the engine."""
    sequences = record.sequences
    if record.ended:
        state = "failed" if record.status >= 400 or any(one.error for one in sequences) else "ended"
    elif not sequences:
        state = "preparing"
    else:
        state = "decoding" if any(one.new_tokens for one in sequences) else "waiting"
    answer = {"path": record.path, "tenant": record.tenant, "state": state, "status": record.status, **book.summary(record)}
    if state == "waiting":  # the engine says why with the first token
        answer["why"] += "".join(f" Of those that wait there, {count} {WAITS[reason]}." for reason, count in waiting_for.items())
    return answer


def _plain(step: Any) -> list[Any]:
    return [getattr(step, name) for name in step.__struct_fields__]


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return look_style() + _static("style.css")
