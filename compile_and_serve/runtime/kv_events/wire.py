"""The events as they are sent: msgpack in the format of vLLM 0.33, so that what reads vLLM's events reads ours."""

from __future__ import annotations

from typing import Any

import msgspec

DEVICE, HOST, DISK = "GPU", "CPU", "STORAGE"  # vLLM's names of the places, whatever the device is
END_OF_REPLAY = (-1).to_bytes(8, signed=True)


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A map with the class's name as `type`."""


class BlockStored(_Event, tag="BlockStored"):
    """Blocks that follow each other can be found by their hashes.

    parent_block_hash: of the block before the first; None: they begin the sequence. token_ids: of all blocks together, `block_size` each.
    extra_keys: for each block, what its hash depends on beside tokens; None for nothing. In another medium than the device's, only hashes
    and medium are known: `token_ids` is empty there.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event, tag="BlockRemoved"):
    """Blocks are no longer in that medium."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event, tag="AllBlocksCleared"):
    """Nothing is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What happened in a step. ts: seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
