"""`BodyWork`: runs the work on requests' bodies where it does not hold up streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeVar

from fastapi import Request

from compile_and_serve.runtime.structured.checker import MAX_PROCESSES, grammar_checker
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.template_pool import MAX_PROCESSES as MAX_RENDERING
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.engine.engine import AsyncEngine
from compile_and_serve.serve.ledger.record import stage
from compile_and_serve.serve.tenants.turns import FairTurns

T = TypeVar("T")

# Smaller bodies are prepared on the event loop: checking and tokenizing them takes about a millisecond.
_INLINE_BYTES = 4096
_MAX_LARGE_BODIES = 4  # prepared at the same time; each may take up to about 100 MB
# Of larger ones, one at a time: each holds the GIL for tens of milliseconds at a time, and the event loop would wait for all of them.
_HUGE_BYTES = 1 << 20


class BodyWork:
    """engine: refuses large bodies while it accepts no request. templates: has the threads that render. Each API key gets its turns."""

    def __init__(self, engine: AsyncEngine, templates: TemplatePool, tokenizer: Tokenizer | None) -> None:
        self._engine, self._templates, self._tokenizer = engine, templates, tokenizer
        self._grammar_threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="grammar")
        self._grammars, self._rendering = FairTurns(MAX_PROCESSES), FairTurns(MAX_RENDERING)
        self._large_bodies, self._huge_bodies = FairTurns(_MAX_LARGE_BODIES), FairTurns(1)

    async def run(self, request: Request, work: Callable[[], T], *, renders: bool = False, is_large: bool = False) -> T:
        """The result of `work`, which turns the request's body into the engine's input. renders: it renders a chat template.

        is_large: the work may be large although the body is small. Work that renders, and large work, runs in a thread, so that
        streams continue meanwhile. Large work is refused at once if the server accepts no request now.
        """
        num_bytes = len(await request.body())
        with stage("tokenize"):
            return await self._run(work, num_bytes, renders=renders, is_large=is_large or num_bytes > _INLINE_BYTES)

    async def _run(self, work: Callable[[], T], num_bytes: int, *, renders: bool, is_large: bool) -> T:
        if not is_large and not renders:
            return work()
        async with AsyncExitStack() as turns:
            if is_large:
                self._engine.check_accepts(())
                if num_bytes > _HUGE_BYTES:
                    await turns.enter_async_context(self._huge_bodies.turn())
                await turns.enter_async_context(self._large_bodies.turn())
            if renders:
                await turns.enter_async_context(self._rendering.turn())
            return await asyncio.get_running_loop().run_in_executor(self._templates.executor if renders else None, work)

    async def check_structure(self, structured: StructuredOutputsParams | None) -> None:
        """Check a form of structured output, which may take two seconds, in a thread of its own: neither the event loop nor the
        rendering of other conversations waits. `InputProcessor.prepare` then finds the result, and raises it if it is an error.
        """
        if structured is None or self._tokenizer is None:
            return
        checker, special = grammar_checker(), self._tokenizer.special_texts
        if not checker.knows(structured, special):
            with stage("grammar_check"):
                async with self._grammars.turn():
                    await asyncio.get_running_loop().run_in_executor(self._grammar_threads, checker.check_ahead, structured, special)
        if checker.refuses(structured, special):
            self._engine.metrics.observe_refused_structure()
