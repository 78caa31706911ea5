"""The router's application: each request is computed by one server up to its first token, and continued by another.

Where that cannot be, the request goes to one server as a whole: a server that generates can compute prompts, and the other way around.
What was not answered yet is tried with another server. A stream that has begun and breaks ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from compile_and_serve.serve.disaggregation.events import follow
from compile_and_serve.serve.disaggregation.pool import ServerPool
from compile_and_serve.serve.disaggregation.requests import (
    PARAMS,
    PATHS,
    can_be_split,
    early_request,
    offers_early,
    passed_headers,
    prompt_bytes,
    prompt_request,
)
from compile_and_serve.serve.errors import error_body
from compile_and_serve.serve.http.request_scope import TIMEOUT_HEADER
from compile_and_serve.serve.http.responses import until_disconnect

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_EARLY_TOKENS = 8192  # of a prompt that a server computes in several steps; where tokens are not known, of four bytes
_TRY_ELSEWHERE = frozenset({429, 500, 502, 503})


class _Unanswered(Exception):
    """No server has answered. status, message: of the last one that refused."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class DisaggregatingRouter:
    """prefill, decode: URLs of servers. events: of the prefill servers, in their order: where they publish them; none: not followed."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], *, events: Sequence[str] = (), block_size: int = 16) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self.http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS), limits=limits)
        self.prefill = ServerPool(prefill, self.http, block_size=block_size if events else None)
        self.decode = ServerPool(decode, self.http)
        self.events = list(events)
        self.counts: Counter[str] = Counter()
        self._givers: dict[int, dict[str, Any]] = {}  # what prefill servers that lend blocks early have answered last
        self._early: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """The application's lifespan."""
        tasks = [asyncio.create_task(pool.watch()) for pool in (self.prefill, self.decode)]
        tasks += [asyncio.create_task(follow(self.prefill, index, endpoint)) for index, endpoint in enumerate(self.events)]
        yield
        for task in tasks:
            task.cancel()
        await self.http.aclose()

    async def generate(self, request: Request) -> Response:
        """A chat or a completion."""
        content = await request.body()
        try:
            body = json.loads(content)
        except ValueError:
            body = None  # a server says what is wrong with it
        began = time.monotonic()
        headers = passed_headers(request.headers)
        self.counts["requests"] += 1
        try:
            if not can_be_split(body):
                self.counts["whole_requests"] += 1
                return await self._answer(request, [self.decode, self.prefill], content, headers, prompt=b"", began=began)
            prompt, salt = await self._prompt_of(request.url.path, body, headers), body.get("cache_salt")
            given = await self._compute_prompt(request, body, headers, prompt, salt, began)
            if isinstance(given, Response):
                return given
            if given is None:
                return await self._answer(request, [self.decode, self.prefill], content, headers, prompt=prompt, began=began)
            self.counts["handovers"] += 1
            content_with = json.dumps(body | {PARAMS: given}).encode()
            try:
                return await self._answer(request, [self.decode], content_with, headers, prompt=prompt, began=began)
            except _Unanswered:
                self.counts["taken_back"] += 1
                return await self._answer(request, [self.prefill], content, headers, prompt=prompt, began=began)
        except _Unanswered as error:
            self.counts["unanswered"] += 1
            return JSONResponse(error_body(error.status, error.message), error.status)

    async def _prompt_of(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Sequence[int]:
        """What prefixes are compared by: token ids where the servers' events name them, else bytes of the text."""
        if not self.prefill.knows_tokens:
            return prompt_bytes(body)
        if isinstance(body.get("prompt"), list):
            return body["prompt"] if isinstance(body["prompt"][0], int) else prompt_bytes(body)
        for index, url in enumerate(self.prefill.urls):
            if self.prefill.is_up[index]:
                try:
                    answer = await self.http.post(
                        url + "/tokenize", json=dict(body), headers=_json_headers(headers), timeout=_CONNECT_SECONDS
                    )
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200:
                    tokens: list[int] = answer.json()["tokens"]
                    return tokens
        return prompt_bytes(body)

    async def _compute_prompt(
        self, request: Request, body: Mapping[str, Any], headers: Mapping[str, str], prompt: Sequence[int], salt: str | None, began: float
    ) -> dict[str, Any] | Response | None:
        """`kv_transfer_params` of a server that computed the prompt; what it answers to a wrong request; None if none does it."""
        is_long = len(prompt) > _EARLY_TOKENS * (1 if self.prefill.knows_tokens else 4)
        tried: list[int] = []
        while (chosen := self.prefill.choose(prompt, salt, tried)) is not None:
            index, name = chosen
            tried.append(index)
            giver = self._givers.get(index) if is_long and len(tried) == 1 else None  # one early load a request
            early = "" if giver is None else self._load_early(request.url.path, body, headers, prompt, giver)
            content = json.dumps(prompt_request(body, early)).encode()
            try:
                with _deadline(headers, began) as left:
                    url = self.prefill.urls[index] + request.url.path
                    answer = await until_disconnect(request.receive, self.http.post(url, content=content, headers=_json_headers(left)))
            except httpx.HTTPError as error:
                self.counts["prefill_retries"] += 1
                self._note(self.prefill, index, error)
                continue
            finally:
                self.prefill.finish(name)
            if answer is None:
                return Response(status_code=499)
            if answer.status_code == 200:
                params = answer.json().get(PARAMS)
                if not isinstance(params, dict):
                    message = f"{self.prefill.urls[index]} hands no requests over: start it with --kv-transfer-config."
                    return JSONResponse(error_body(502, message), 502)
                self._givers.pop(index, None)
                if offers_early(params):
                    self._givers[index] = params
                return params
            if answer.status_code not in _TRY_ELSEWHERE:
                return Response(answer.content, answer.status_code, passed_headers(answer.headers))
            self.counts["prefill_retries"] += 1
        self.counts["prefill_unanswered"] += 1
        return None

    def _load_early(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], prompt: Sequence[int], giver: Mapping[str, Any]
    ) -> str:
        """Let the server that will generate load what the prompt's server computes, in a task. → the name of the lease; "": none is up"""
        if (chosen := self.decode.choose(prompt, None, ())) is None:
            return ""
        index, sent = chosen
        name = secrets.token_hex(16)
        content = json.dumps(early_request(body, giver, name)).encode()

        async def load() -> None:
            try:
                await self.http.post(self.decode.urls[index] + path, content=content, headers=_json_headers(headers))
            except httpx.HTTPError as error:
                logger.debug("%s loads nothing early: %s", self.decode.urls[index], error)
            finally:
                self.decode.finish(sent)

        self.counts["early_loads"] += 1
        task = asyncio.create_task(load())
        self._early.add(task)
        task.add_done_callback(self._early.discard)
        return name

    async def _answer(
        self,
        request: Request,
        pools: Sequence[ServerPool],
        content: bytes,
        headers: Mapping[str, str],
        *,
        prompt: Sequence[int],
        began: float,
    ) -> Response:
        """The answer of the first server that gives one. Raises `_Unanswered`."""
        last = _Unanswered(503, "No server that could answer is up: try again later.")
        for pool in pools:
            tried: list[int] = []
            while (chosen := pool.choose(prompt, None, tried)) is not None:
                index, name = chosen
                tried.append(index)
                answer: httpx.Response | None = None
                try:
                    with _deadline(headers, began) as left:
                        sent = self.http.build_request(
                            request.method, pool.urls[index] + _target(request), content=content, headers=_json_headers(left)
                        )
                    answer = await until_disconnect(request.receive, self.http.send(sent, stream=True))
                    if answer is None:
                        pool.finish(name)
                        return Response(status_code=499)
                    if answer.status_code in _TRY_ELSEWHERE:
                        await answer.aread()
                        last = _Unanswered(answer.status_code, _message_of(answer))
                    elif "text/event-stream" in answer.headers.get("content-type", ""):
                        return self._stream(pool, index, name, answer)
                    else:
                        await until_disconnect(request.receive, answer.aread())
                        pool.finish(name)
                        return Response(answer.content, answer.status_code, passed_headers(answer.headers))
                except httpx.HTTPError as error:
                    self._note(pool, index, error)
                    last = _Unanswered(502, f"{pool.urls[index]} did not answer: {type(error).__name__}.")
                pool.finish(name)
                if answer is not None:
                    await answer.aclose()
                self.counts["decode_retries"] += 1
        raise last

    def _stream(self, pool: ServerPool, index: int, name: str, answer: httpx.Response) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in answer.aiter_raw():
                    yield chunk
            except httpx.HTTPError as error:
                self.counts["broken_streams"] += 1
                self._note(pool, index, error)
                body = error_body(502, f"{pool.urls[index]} ended before its answer did: send the request again.")
                yield b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"
            finally:
                pool.finish(name)
                await answer.aclose()

        return StreamingResponse(chunks(), answer.status_code, passed_headers(answer.headers))

    def _note(self, pool: ServerPool, index: int, error: httpx.HTTPError) -> None:
        logger.warning("%s failed on a request: %s %s", pool.urls[index], type(error).__name__, error)
        if isinstance(error, httpx.ConnectError):
            pool.set_down(index)

    async def other(self, request: Request) -> Response:
        """Any other route: a server that generates answers it."""
        content = await request.body()
        try:
            return await self._answer(
                request, [self.decode, self.prefill], content, passed_headers(request.headers), prompt=b"", began=time.monotonic()
            )
        except _Unanswered as error:
            return JSONResponse(error_body(error.status, error.message), error.status)

    async def health(self) -> Response:
        """Whether a server of each kind is up, or one that can do the other's work."""
        found = {kind: dict(zip(pool.urls, pool.is_up, strict=True)) for kind, pool in (("prefill", self.prefill), ("decode", self.decode))}
        return JSONResponse(found, 200 if self.prefill.num_up + self.decode.num_up else 503)

    async def metrics(self) -> Response:
        """In Prometheus' text format."""
        lines = [f"cas:route_{name}_total {count}" for name, count in sorted(self.counts.items())]
        for kind, pool in (("prefill", self.prefill), ("decode", self.decode)):
            for url, is_up, sent in zip(pool.urls, pool.is_up, pool.num_sent, strict=True):
                labels = f'{{kind="{kind}",server="{url}"}}'
                lines += [f"cas:route_server_up{labels} {int(is_up)}", f"cas:route_server_requests_total{labels} {sent}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


@contextmanager
def _deadline(headers: Mapping[str, str], began: float) -> Iterator[dict[str, str]]:
    """The headers with what is left of the client's time. Raises `_Unanswered` if nothing is."""
    left = dict(headers)
    name = next((name for name in left if name.lower() == TIMEOUT_HEADER.lower()), None)
    if name is not None:
        try:
            seconds = float(left[name]) - (time.monotonic() - began)
        except ValueError:
            seconds = 1.0  # a server says what is wrong with it
        else:
            left[name] = f"{seconds:.3f}"
        if seconds <= 0:
            raise _Unanswered(504, f"The request did not end within its limit of {headers[name]:.50} seconds.")
    yield left


def _json_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {**headers, "accept-encoding": "identity"}


def _target(request: Request) -> str:
    return request.url.path + (f"?{request.url.query}" if request.url.query else "")


def _message_of(answer: httpx.Response) -> str:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
    return str(message)


def create_router_app(router: DisaggregatingRouter) -> FastAPI:
    """The application."""
    app = FastAPI(title="compile-and-serve route", lifespan=router.running, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/health", router.health, methods=["GET"])
    app.add_api_route("/metrics", router.metrics, methods=["GET"])
    for path in PATHS:
        app.add_api_route(path, router.generate, methods=["POST"])
    app.add_api_route("/{path:path}", router.other, methods=["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
    return app
