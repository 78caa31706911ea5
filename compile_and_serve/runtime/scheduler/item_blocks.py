"""`ItemBlocks`: the pages of what an encoder made of a request's items, which its tokens read by cross-attention.

They do not depend on the request's tokens. So their keys name the item's content alone, any prefix of tokens has them, and a request that
resumes finds its own again, or has them encoded again if they were evicted meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import sha256

from compile_and_serve.custom_ops.step_data import MediaItem
from compile_and_serve.runtime.scheduler.block_pool import COMPUTED, BlockPool
from compile_and_serve.runtime.scheduler.key_chains import KeyChains
from compile_and_serve.runtime.scheduler.kv_groups import GroupBlocks, Prefix
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo


class ItemBlocks(GroupBlocks):
    """Each item is one entry of the pool's cache. A request holds its items' pages until it ends or is preempted.

    unencoded: by request, the items whose pages it got, and which the step that begins it must encode.
    """

    def __init__(self, index: int, info: StateGroupInfo, pool: BlockPool, chains: KeyChains) -> None:
        super().__init__(index, info, pool, chains)
        self._max_pages = info.max_items_pages
        self.unencoded: dict[str, list[tuple[MediaItem, list[int]]]] = {}

    def prefix_keys(self, request: Request, num_tokens: int) -> Sequence[bytes]:
        return []

    def publish(self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        raise AssertionError("what an encoder made is not loaded from outside")

    def num_blocks(self, num_tokens: int) -> int:
        return self._max_pages

    def find(self, request: Request, num_tokens: int, prefix: Prefix, unready_step: int | None) -> int | None:
        return num_tokens

    def num_ready(self, num_tokens: int, prefix: Prefix, step: int) -> int:
        return num_tokens

    def num_new(self, request: Request, prefix: Prefix) -> int:
        count = 0
        for item in items_of(request):
            first = self._pool.cached.get(self._key(request, item))
            count += self.num_pages(item) if first is None else sum(block.is_free for block in (first, *first.followers))
        return count

    def num_unencoded(self, request: Request) -> int:
        """Rows of the items of a request that are not there."""
        return sum(item.length for item in items_of(request) if self._key(request, item) not in self._pool.cached)

    def admit(self, request: Request, prefix: Prefix) -> None:
        block_ids: list[int] = []
        for item in items_of(request):
            key = self._key(request, item)
            first = self._pool.cached.get(key)
            if first is not None:
                entry = (first, *first.followers)
                self._pool.share(entry)
                block_ids += [block.block_id for block in entry]
                continue
            pages = self._pool.allocate(self.num_pages(item))
            self._pool.cache_together(pages, key, COMPUTED, worth=item.length / len(pages) / self.block_size)
            self.unencoded.setdefault(request.request_id, []).append((item, pages))
            block_ids += pages
        request.num_cached_blocks.append(0)
        request.num_freed_blocks.append(0)
        request.block_ids.append(block_ids)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        return 0

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        return []

    def num_held(self, request: Request) -> int:
        return sys.maxsize

    def cache(self, request: Request, num_computed: int, step: int) -> int:
        return sys.maxsize

    def uncache(self, request: Request, start: int, end: int, step: int) -> set[bytes]:
        if start == 0:  # the step that failed may have encoded them
            for item in items_of(request):
                key = self._key(request, item)
                if key in self._pool.cached:
                    self._pool.uncache(key)
        return set()

    def free(self, request: Request, last_step: int | None) -> None:
        self.unencoded.pop(request.request_id, None)
        self._pool.free(request.block_ids[self.index])

    def num_pages(self, item: MediaItem) -> int:
        """That an item's rows take."""
        return -(-item.length // self.block_size)

    def check_size(self, items: Sequence[MediaItem]) -> None:
        """Raise `ValueError` with one sentence for more than a request may have."""
        if sum(self.num_pages(item) for item in items) > self._max_pages:
            raise ValueError(
                f"The request's media have {sum(item.length for item in items)} rows, but this model reads "
                f"{self._max_pages * self.block_size} at most: give fewer or smaller ones."
            )

    def _key(self, request: Request, item: MediaItem) -> bytes:
        """Requests of different salts share nothing."""
        return sha256(request.prompt.salt + item.key).digest() + self._suffix


def items_of(request: Request) -> list[MediaItem]:
    """The items beside a request's prompt, in order."""
    contents = request.prompt.contents
    return [] if contents is None else [item for item in contents.media if item.is_beside]
