"""`EventRecorder`: notes what becomes findable in the prefix cache and what is forgotten, until the step's batch is taken."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from compile_and_serve.runtime.kv_events.wire import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from compile_and_serve.runtime.scheduler.prefix_keys import contents_of_block, root_key
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo

if TYPE_CHECKING:
    from compile_and_serve.runtime.scheduler.request import Request

_HASH_BYTES = 32  # of a key; behind it stands the number of its group
_PLAIN_ROOT = root_key(None)


class EventRecorder:
    """groups: of the engine, by number."""

    def __init__(self, groups: Sequence[StateGroupInfo]) -> None:
        self._groups = groups
        self._events: list[Event] = []

    def stored(self, group: int, request: Request, number: int, *, block_size: int, keys_per_block: int) -> None:
        """Block `number` of a request, of `block_size` tokens and as many keys of its chain, becomes findable on the device."""
        keys, begin, end = request.keys, number * block_size, (number + 1) * block_size
        parent = keys[number * keys_per_block - 1] if number else None
        block_hash = keys[(number + 1) * keys_per_block - 1]
        extra = _extra_keys(request, begin, end)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.group_idx == group and last.block_hashes[-1] == parent and last.medium == DEVICE:
            assert last.extra_keys is not None
            last.block_hashes.append(block_hash)
            last.token_ids += request.token_ids[begin:end]
            last.extra_keys.append(extra)
            return
        info = self._groups[group]
        kind = "mamba" if info.kind == "slot" else "full_attention" if info.window is None else "sliding_window"
        self._events.append(
            BlockStored(
                block_hashes=[block_hash],
                parent_block_hash=parent,
                token_ids=request.token_ids[begin:end],
                block_size=block_size,
                lora_id=request.adapter,
                medium=DEVICE,
                lora_name=request.prompt.lora_name,
                extra_keys=[extra],
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=info.window,
            )
        )

    def stored_elsewhere(self, keys: Iterable[bytes], medium: str) -> None:
        """Contents can be loaded from another medium than the device."""
        for key in keys:
            group = int.from_bytes(key[_HASH_BYTES:])
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockStored) and last.group_idx == group and last.medium == medium:
                last.block_hashes.append(key[:_HASH_BYTES])
                continue
            self._events.append(
                BlockStored(
                    block_hashes=[key[:_HASH_BYTES]],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=self._groups[group].block_size,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    group_idx=group,
                )
            )

    def removed(self, key: bytes, medium: str = DEVICE) -> None:
        """A content is no longer findable."""
        group = int.from_bytes(key[_HASH_BYTES:])
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.group_idx == group and last.medium == medium:
            last.block_hashes.append(key[:_HASH_BYTES])
        else:
            self._events.append(BlockRemoved(block_hashes=[key[:_HASH_BYTES]], medium=medium, group_idx=group))

    def cleared(self) -> None:
        """Nothing is findable any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> EventBatch | None:
        """What was noted since the last call; None for nothing."""
        if not self._events:
            return None
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, BlockStored) and event.extra_keys is not None and not any(event.extra_keys):
                event.extra_keys = None
        return EventBatch(ts=time.time(), events=events)


def _extra_keys(request: Request, begin: int, end: int) -> list[Any] | None:
    """What the hash of the block of tokens `begin` … `end` - 1 depends on beside tokens, in vLLM's order; None for nothing.

    The adapter's name; media, as pairs of key and place in the block; at the beginning, what the whole sequence depends on (the salt is
    in it, hashed, so that nobody reads it from the events); values that stand beside tokens, hashed.
    """
    prompt = request.prompt
    found: list[Any] = [] if prompt.lora_name is None else [prompt.lora_name]
    contents = prompt.contents
    if contents is not None:
        found += [[item.key.hex(), item.position - begin] for item in contents.media if begin <= item.position < end]
    if begin == 0 and prompt.root_key != _PLAIN_ROOT:
        found.append(prompt.root_key.hex())
    if contents is not None and contents.arrays and (inside := contents_of_block(contents, begin, end)):
        found.append(sha256(inside).hexdigest())
    return found or None
