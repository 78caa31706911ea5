"""`ServerContext`: the parts of one server, from which its routers take what they use. It is stored in the application."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.serve.chat_prompts import ChatPrompts
from compile_and_serve.serve.engine.adapters import ServedAdapters
from compile_and_serve.serve.engine.body_work import BodyWork
from compile_and_serve.serve.engine.engine import AsyncEngine
from compile_and_serve.serve.engine.media_work import MediaWork
from compile_and_serve.serve.observe.metrics import Metrics
from compile_and_serve.serve.observe.rendered import RenderedMetrics
from compile_and_serve.serve.processes.siblings import Siblings
from compile_and_serve.serve.response_store import ResponseStore
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.tenants.rate_limits import RateLimits
from compile_and_serve.serve.transcription.work import TranscriptionWork


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerContext:
    """fingerprint: `system_fingerprint` of every answer. started: seconds since the epoch."""

    settings: ServerSettings
    engine: AsyncEngine
    inputs: InputProcessor
    metrics: Metrics
    rendered_metrics: RenderedMetrics
    parsers: Parsers
    adapters: ServedAdapters
    prompts: ChatPrompts
    bodies: BodyWork
    media: MediaWork
    transcriptions: TranscriptionWork
    fingerprint: str
    stored_responses: ResponseStore | None = None
    siblings: Siblings | None = None
    rates: RateLimits
    started: int = field(default_factory=lambda: int(time.time()))


def get_context(request: Request) -> ServerContext:
    """The application's context, as a FastAPI dependency."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


Context = Annotated[ServerContext, Depends(get_context)]
