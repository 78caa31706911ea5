"""Why a request found less of its prompt in the prefix cache than it could have: compared with the prompts seen last.

A request is compared only with those of its own API key, cache salt and adapter, so nobody learns of a text that is not theirs. Of other
salts nothing is looked up. Of other adapters it is said that the prompt was the same, where key and salt are.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from compile_and_serve.runtime.ledger.records import Miss
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.kv_groups import Prefix
from compile_and_serve.runtime.scheduler.request import Prompt, Request

SEEN_PROMPTS = 64
SHOWN_TOKENS = 8  # of each of two prompts, from where they differ
_COMPARED_AT_ONCE = 256  # tokens


@dataclass(slots=True)
class _Seen:
    """A prompt. owner: its API key and salt. root: of its chain of keys, which names the adapter too. token_ids: grow with its answer."""

    request_id: str
    owner: tuple[str, str | None]
    root: bytes
    lora_name: str | None
    keys: list[bytes]
    token_ids: list[int]
    num_prompt_tokens: int


class PrefixMisses:
    """Holds the prompts seen last."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._seen: deque[_Seen] = deque(maxlen=SEEN_PROMPTS)
        self._last: Prompt | None = None

    def explain(self, request: Request, prefix: Prefix) -> Miss | None:
        """Why `prefix` is shorter than it could be, when the request is admitted for the first time; None: it is not."""
        manager, found = self._manager, prefix.num_tokens
        if not manager.enable_prefix_caching:
            return Miss("prefix", "off")
        if request.reads_all_tokens:
            return Miss("prefix", "reads_all")
        longest = manager.longest_prefix(request)
        if longest == 0:
            return Miss("prefix", "short")
        if found >= longest:
            return None
        return Miss("prefix", "not_loaded") if request.was_refused_load else self._compare(request, prefix, longest)

    def remember(self, request: Request) -> None:
        """Compare later requests with this one. Call it after `_start`, from when on `token_ids` is the request's own list."""
        prompt = request.prompt
        if prompt is not self._last:  # siblings have the same
            self._last = prompt
            owner = request.share.account.tenant.name, prompt.cache_salt
            self._seen.appendleft(
                _Seen(
                    request.request_id, owner, prompt.root_key, prompt.lora_name, prompt.keys, request.token_ids, request.num_prompt_tokens
                )
            )

    def _compare(self, request: Request, prefix: Prefix, longest: int) -> Miss:
        manager, prompt, found = self._manager, request.prompt, prefix.num_tokens
        owner = request.share.account.tenant.name, prompt.cache_salt
        best: _Seen | None = None
        best_common = -1
        of_adapter = 0
        for seen in self._seen:
            if seen.owner != owner:
                continue
            if seen.root == prompt.root_key:
                common = self._num_common(request, seen)
                if common > best_common:
                    best, best_common = seen, common
            elif seen.lora_name != prompt.lora_name and prompt.contents is None:
                of_adapter = max(of_adapter, _num_equal(request.token_ids, seen.token_ids, 0))
        shared = min(best_common, longest) // manager.alignment * manager.alignment
        if of_adapter >= manager.alignment and of_adapter > max(best_common, found):
            return Miss("prefix", "adapter")
        if best is not None and shared > found:
            evicted = manager.pool.evicted.get(prefix.missing_key or b"")
            if evicted is None and prefix.num_page_tokens > found:
                return Miss("prefix", "snapshot", other=best.request_id, position=found)
            seconds = 0.0 if evicted is None else time.monotonic() - evicted
            return Miss("prefix", "evicted", other=best.request_id, position=found, seconds=seconds)
        if best is not None and best_common > 0:
            mine = list(islice(request.token_ids, best_common, best_common + SHOWN_TOKENS))
            theirs = best.token_ids[best_common : best_common + SHOWN_TOKENS]
            return Miss("prefix", "differs", other=best.request_id, position=best_common, mine=mine, theirs=theirs)
        return Miss("prefix", "first" if prompt.cache_salt is None else "salt")

    def _num_common(self, request: Request, seen: _Seen) -> int:
        """Leading tokens that both have, media and all, as far as the chains of keys tell it; behind them by their tokens."""
        mine, theirs = request.keys, seen.keys
        low, high = 0, min(len(mine), len(theirs))
        while low < high:  # a key names all tokens before it
            middle = (low + high + 1) // 2
            if mine[middle - 1] == theirs[middle - 1]:
                low = middle
            else:
                high = middle - 1
        start = low * self._manager.chains.tokens_per_key
        if request.prompt.contents is not None:
            return start  # the tokens do not tell which image they stand for
        return _num_equal(request.token_ids, seen.token_ids, start)


def _num_equal(one: list[int], other: list[int], start: int) -> int:
    """Leading tokens that two lists share, if they share the first `start`."""
    end = min(len(one), len(other))
    while start < end and one[start : start + _COMPARED_AT_ONCE] == other[start : start + _COMPARED_AT_ONCE]:
        start = min(end, start + _COMPARED_AT_ONCE)
    while start < end and one[start] == other[start]:
        start += 1
    return start
