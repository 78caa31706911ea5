"""Requests and tokens a minute of API keys: HTTP 429 with `Retry-After`, and the `x-ratelimit-*` headers of OpenAI.

A key's requests and tokens refill steadily, and a minute's worth may come at once. Output tokens are known only when they are there, so a
request may begin as long as any token is left, and what it uses beyond that is waited for by the next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from compile_and_serve.serve.tenant_options import TenantOptions

_MINUTE = 60.0


class RateState(msgspec.Struct, array_like=True):
    """What is left of a key's requests or tokens. reset_seconds: until all of them are back. wait_seconds: until one is; 0 if there is."""

    limit: int
    remaining: int
    reset_seconds: float
    wait_seconds: float


class RateAnswer(msgspec.Struct, array_like=True):
    """Whether a request may begin, and what is left. None: there is no such limit."""

    is_allowed: bool
    requests: RateState | None
    tokens: RateState | None

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a refused request may begin."""
        return max(1, math.ceil(max(state.wait_seconds for state in (self.requests, self.tokens) if state is not None)))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that say it."""
        found = []
        for what, state in (("requests", self.requests), ("tokens", self.tokens)):
            if state is not None:
                values = {"limit": str(state.limit), "remaining": str(state.remaining), "reset": f"{state.reset_seconds:.3f}s"}
                found += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()]
        return found


class RateLimits(Protocol):
    """Where the rates of keys are counted. With several API processes that is one place for all of them."""

    async def begin(self, name: str) -> RateAnswer:
        """Count a request of a key, unless it is refused. Raises `ConnectionError` if the place cannot be reached."""
        ...

    async def use(self, name: str, num_tokens: int) -> None:
        """Count tokens that a key has used."""
        ...


class _Bucket:
    """Refills by `limit` a minute, up to `limit`. May be overdrawn."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._then = now

    def refill(self, now: float) -> None:
        self.level = min(self.limit, self.level + (now - self._then) * self.limit / _MINUTE)
        self._then = now

    def state(self) -> RateState:
        per_second = self.limit / _MINUTE
        missing = max(0.0, 1.0 - self.level)
        return RateState(self.limit, max(0, math.floor(self.level)), (self.limit - self.level) / per_second, missing / per_second)


class LocalRateLimits:
    """Counts here. clock: in seconds."""

    def __init__(self, tenants: Sequence[TenantOptions], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        self._requests = {one.name: _Bucket(one.requests_per_minute, now) for one in tenants if one.requests_per_minute is not None}
        self._tokens = {one.name: _Bucket(one.tokens_per_minute, now) for one in tenants if one.tokens_per_minute is not None}

    async def begin(self, name: str) -> RateAnswer:
        """Count a request of a key, unless it is refused."""
        requests, tokens = self._requests.get(name), self._tokens.get(name)
        buckets = [bucket for bucket in (requests, tokens) if bucket is not None]
        for bucket in buckets:
            bucket.refill(self._clock())
        is_allowed = all(bucket.level >= 1.0 for bucket in buckets)
        if is_allowed and requests is not None:
            requests.level -= 1.0
        states = [None if bucket is None else bucket.state() for bucket in (requests, tokens)]
        if is_allowed:
            for state in states:
                if state is not None:
                    state.wait_seconds = 0.0
        return RateAnswer(is_allowed, *states)

    async def use(self, name: str, num_tokens: int) -> None:
        """Count tokens that a key has used."""
        if (bucket := self._tokens.get(name)) is not None:
            bucket.refill(self._clock())
            bucket.level -= num_tokens


class SharedRateLimits:
    """Counts in another process. ask: calls a function there: its name and arguments → its answer."""

    def __init__(self, ask: Callable[..., Awaitable[object]]) -> None:
        self._ask = ask

    async def begin(self, name: str) -> RateAnswer:
        """Count a request of a key, unless it is refused. Raises `OSError` if the process is being started again."""
        return msgspec.convert(await self._ask("begin_request", name), RateAnswer)

    async def use(self, name: str, num_tokens: int) -> None:
        """Count tokens that a key has used. If the process is being started again, it begins with full buckets in any case."""
        try:
            await self._ask("use_tokens", name, num_tokens)
        except OSError:
            return
