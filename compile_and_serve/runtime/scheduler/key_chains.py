"""Extends the chains of prefix-cache keys of requests, within what a step may hash."""

from __future__ import annotations

import sys

from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys
from compile_and_serve.runtime.scheduler.request import Request

_HASHED_AT_ONCE = 64  # keys that are computed before they are looked up, since most prefixes end early


class KeyChains:
    """tokens_per_key: a chain has a key for each so many tokens. budget: prompt tokens that may be hashed before the scheduler sets it
    again.
    """

    def __init__(self, tokens_per_key: int) -> None:
        self.tokens_per_key = tokens_per_key
        self.budget = sys.maxsize

    def reach(self, request: Request, num_keys: int) -> bool:
        """Extend the request's chain to `num_keys` keys. False once the budget is used up."""
        return len(request.keys) >= num_keys or self._spend(request, num_keys)

    def approach(self, request: Request, num_keys: int) -> bool:
        """Extend the request's chain towards `num_keys` keys, by a few. False once the budget is used up."""
        return self._spend(request, min(num_keys, len(request.keys) + _HASHED_AT_ONCE))

    def _spend(self, request: Request, num_keys: int) -> bool:
        if self.budget <= 0:
            return False
        self.budget -= (num_keys - len(request.keys)) * self.tokens_per_key
        self.extend(request, num_keys)
        return True

    def extend(self, request: Request, num_keys: int) -> None:
        """Extend the request's chain to `num_keys` keys. Sequences of one prompt share the chain until one extends beyond the prompt."""
        size, keys, prompt = self.tokens_per_key, request.keys, request.prompt
        if len(keys) >= num_keys:
            return
        if keys is prompt.keys:
            num_shared = min(num_keys, request.num_prompt_tokens // size)
            if len(keys) < num_shared:
                extend_keys(keys, prompt.root_key, prompt.token_ids, size, num_shared, prompt.contents)
            if num_keys == num_shared:
                return
            keys = request.keys = keys.copy()
        extend_keys(keys, prompt.root_key, request.token_ids, size, num_keys, prompt.contents)
