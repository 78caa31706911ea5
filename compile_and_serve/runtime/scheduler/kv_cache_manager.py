"""Blocks of requests: allocation, the prefix cache, and what is freed when.

Block content is named by a chain: hash(b) = SHA-256(hash(b-1) ‖ tokens of b as int64), hash(-1) = SHA-256(cache
salt). A strong hash, because a collision would show one tenant the keys and values of another; two salts never share
a block.

Freed blocks may be handed out at once, also while a step that writes to them is in flight: steps run in the order in
which they were scheduled, so that write is done before the next owner's first step, and cached (full, computed)
blocks are never written again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from compile_and_serve.runtime.scheduler.block_pool import BlockPool
from compile_and_serve.runtime.scheduler.request import Request


class KVCacheManager:
    """Gives requests their blocks and keeps the prefix cache. `prefix_queries` and `prefix_hits` count prompt tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}.")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def max_tokens(self) -> int:
        """Tokens that one sequence can have when it is alone."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Part of the blocks that requests hold, 0–1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def hash_prompt(self, request: Request, cache_salt: str | None) -> None:
        """Hash the prompt's full blocks when the request arrives: no step should have work that grows with a prompt."""
        if self.enable_prefix_caching:
            request.root_hash = root_hash(cache_salt)
            self._hash_blocks(request, request.num_prompt_tokens // self.block_size)

    def try_admit(self, request: Request, *, reserve: int) -> bool:
        """Give a request blocks for all of its tokens, cached ones first; False if that leaves fewer than `reserve`
        free.

        Sets block_ids and num_computed_tokens (the cached tokens; at least the last token is left to compute, its
        logits are needed). Requests that want prompt logprobs do not read the cache: it has no logits.
        """
        assert not request.block_ids, request.request_id
        pool = self.pool
        num_tokens = len(request.token_ids)
        cached_ids = self._find_prefix(request)
        num_new = -(-num_tokens // self.block_size) - len(cached_ids)
        num_revived = sum(map(pool.is_free, cached_ids))
        if num_new + num_revived + reserve > pool.num_free:
            return False
        pool.share(cached_ids)  # first: what is shared cannot be handed out by the line below
        request.block_ids = cached_ids + pool.allocate(num_new)
        num_cached_tokens = len(cached_ids) * self.block_size
        request.num_computed_tokens = num_cached_tokens
        request.num_cached_blocks = len(cached_ids)
        request.next_cache_len = num_cached_tokens + self.block_size
        if request.num_preemptions == 0 and self.enable_prefix_caching and not request.wants_prompt_logprobs:
            self.prefix_queries += request.num_prompt_tokens
            self.prefix_hits += num_cached_tokens
            request.num_cached_tokens = num_cached_tokens
        return True

    def append_block(self, request: Request) -> int | None:
        """Give a decoding request one block more; its id, or None when no block is free."""
        if self.pool.num_free == 0:
            return None
        [block_id] = self.pool.allocate(1)
        request.block_ids.append(block_id)
        return block_id

    def cache_computed(self, request: Request, num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens findable; steps that are over have computed them.

        Need not be called while num_computed < request.next_cache_len.
        """
        num_full = num_computed // self.block_size
        if self.enable_prefix_caching:
            self._hash_blocks(request, num_full)
            for index in range(request.num_cached_blocks, num_full):
                self.pool.cache(request.block_ids[index], request.block_hashes[index])
        request.num_cached_blocks = max(request.num_cached_blocks, num_full)
        request.next_cache_len = (request.num_cached_blocks + 1) * self.block_size

    def free(self, request: Request) -> None:
        """Take all blocks of the request, the last ones first: a tail is of no use without what is before it."""
        self.pool.free(reversed(request.block_ids))
        request.block_ids = []
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> bool:
        """Forget the cached content; False, and nothing done, while a request holds blocks."""
        return self.pool.forget_cached()

    def _find_prefix(self, request: Request) -> list[int]:
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        max_blocks = (len(request.token_ids) - 1) // self.block_size
        self._hash_blocks(request, max_blocks)
        block_ids = []
        for block_hash in request.block_hashes[:max_blocks]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Hash the leading blocks that are not hashed yet."""
        hashes = request.block_hashes
        size, start = self.block_size, len(hashes)
        if start < num_blocks:
            parent = hashes[-1] if hashes else request.root_hash
            hashes += hash_blocks(parent, request.token_ids[start * size : num_blocks * size], size)


def root_hash(cache_salt: str | None) -> bytes:
    """What the chain of a sequence's block hashes begins with."""
    salt = b"none" if cache_salt is None else b"salt" + cache_salt.encode()
    return sha256(salt).digest()


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The chain's next hashes, one a full block. parent: hash of what comes before `token_ids`."""
    data = array("q", token_ids).tobytes()
    stride = block_size * 8
    hashes = []
    for offset in range(0, len(data) - stride + 1, stride):
        parent = sha256(parent + data[offset : offset + stride]).digest()
        hashes.append(parent)
    return hashes
