"""`ServerContext`: settings, engine and tokenizer for the routers. One object per server, stored in the application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from compile_and_serve import __version__
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.parsers.selection import Parsers
from compile_and_serve.runtime.pooling import check_generates, check_task
from compile_and_serve.runtime.pooling_params import PoolingInfo, PoolingTask
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.structured.checker import MAX_PROCESSES, grammar_checker
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.runtime.tool_prompt import show_tools
from compile_and_serve.runtime.tool_use import ToolUse, tool_use
from compile_and_serve.serve.adapters import ServedAdapters
from compile_and_serve.serve.engine import AsyncEngine
from compile_and_serve.serve.errors import ApiError, user_errors
from compile_and_serve.serve.metrics import Metrics
from compile_and_serve.serve.middleware import tenant_of
from compile_and_serve.serve.protocol.chat import ChatFields
from compile_and_serve.serve.protocol.chunks import Usage
from compile_and_serve.serve.response_store import ResponseStore
from compile_and_serve.serve.settings import ServerSettings
from compile_and_serve.serve.siblings import Siblings

T = TypeVar("T")

# Smaller bodies are prepared on the event loop: checking and tokenizing them takes about a millisecond.
_INLINE_BYTES = 4096
_MAX_LARGE_BODIES = 4  # prepared at the same time; each may take up to about 100 MB


@dataclass(kw_only=True, slots=True)
class ServerContext:
    """The state of one server."""

    settings: ServerSettings
    engine: AsyncEngine
    inputs: InputProcessor
    metrics: Metrics
    templates: TemplatePool
    parsers: Parsers
    adapters: ServedAdapters
    stored_responses: ResponseStore | None = None
    siblings: Siblings | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    grammar_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="grammar"))
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_LARGE_BODIES))

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.inputs.tokenizer

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of every answer."""
        return f"cas-{__version__}-{self.inputs.info.dtype.removeprefix('torch.')}"

    def check_model(self, name: str | None) -> tuple[str, LoRARequest | None]:
        """The model name for the answer, and its adapter. Raises a 404 for a model that is not served."""
        names = self.settings.served_model_names
        adapter = self.adapters.get(name)
        if name and adapter is None and name not in names:
            raise ApiError(404, f"The model '{name:.200}' does not exist: this server has {', '.join(names)}.", "model")
        return name or names[0], adapter

    def check_task(self, task: PoolingTask) -> PoolingInfo:
        """What the engine pools. Raises `UnsupportedTaskError`, which becomes a 501."""
        return check_task(task, self.engine.client.info)

    def check_generates(self) -> None:
        """Raise `UnsupportedTaskError`, which becomes a 501, if the model generates no text."""
        check_generates(self.engine.client.info)

    def check_priority(self, priority: int | None) -> None:
        """Raise a 400 for a priority that would have no effect."""
        if priority and not self.settings.priorities:
            raise ApiError(
                400,
                f"priority is {priority}, but requests run in the order of arrival: leave it out, or start the server with "
                "--scheduling-policy priority.",
                "priority",
            )

    def cache_salt(self, given: str | None, request: Request) -> str | None:
        """The salt of a request's prefix cache: the client's, and with several API keys also the key's digest."""
        tenant = tenant_of(request)
        if tenant is None or len(self.settings.api_keys) < 2:
            return given
        return f"{tenant}:{given or ''}"

    def usage(self, prompt_tokens: int) -> Usage:
        """The token counts of a request that begins."""
        return Usage(prompt_tokens=prompt_tokens, with_details=self.settings.prompt_tokens_details)

    def request_id(self, prefix: str, wanted: str | None, request: Request) -> str:
        """A request's public id: from the body, else the one of `RequestMiddleware`, which logs it."""
        return f"{prefix}-{wanted or request.scope['state']['request_id']}"

    def tool_use(self, body: ChatFields, *, only_prompt: bool = False) -> ToolUse:
        """How the answer may use the request's tools. only_prompt: there is no answer. Raises a 400."""
        parallel = body.parallel_tool_calls is not False
        with user_errors():
            return tool_use(body.tools, body.tool_choice, self.parsers, parallel=parallel, only_shown=only_prompt)

    def render(self, body: ChatFields, use: ToolUse) -> str:
        """The text of a conversation with its tools. Raises a 400."""
        messages, tools = show_tools(body.messages, use, self.parsers)
        with user_errors():
            tokenizer = self.inputs.require_tokenizer("a conversation")
            return self.templates.render(
                tokenizer, messages, template=self.settings.chat_template, tools=tools or None, **body.template_options()
            )

    def encode(self, text: str, params: SamplingParams, *, add_special_tokens: bool, names: Mapping[str, str] | None = None) -> list[int]:
        """Token ids of a prompt. Raises a 400 for a prompt that cannot fit. names: see `user_errors`."""
        with user_errors(names):
            return self.inputs.encode(
                text,
                add_special_tokens=add_special_tokens,
                truncate=params.truncate_prompt_tokens,
                truncation_side=params.truncation_side,
                max_tokens=params.max_tokens,
            )

    async def prepare(self, request: Request, work: Callable[[], T], *, renders: bool = False, is_large: bool = False) -> T:
        """The result of `work`, which turns the request's body into the engine's input. renders: it calls `templates`.

        is_large: the work may be large although the body is small. Work that renders, and large work, runs in a thread, so that
        streams continue meanwhile. Large work is refused at once if the server accepts no request now.
        """
        executor = self.templates.executor if renders else None
        if is_large or len(await request.body()) > _INLINE_BYTES:
            self.engine.check_accepts(())
            async with self.large_bodies:
                return await asyncio.get_running_loop().run_in_executor(executor, work)
        return await asyncio.get_running_loop().run_in_executor(executor, work) if renders else work()

    async def check_structure(self, structured: StructuredOutputsParams | None) -> None:
        """Check a form of structured output, which may take two seconds, in a thread of its own: neither the event loop nor the
        rendering of other conversations waits. `InputProcessor.prepare` then finds the result, and raises it if it is an error.
        """
        if structured is None or self.tokenizer is None:
            return
        checker, special = grammar_checker(), self.tokenizer.special_texts
        if not checker.knows(structured, special):
            await asyncio.get_running_loop().run_in_executor(self.grammar_threads, checker.check_ahead, structured, special)


def get_context(request: Request) -> ServerContext:
    """The application's context, as a FastAPI dependency."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


Context = Annotated[ServerContext, Depends(get_context)]
