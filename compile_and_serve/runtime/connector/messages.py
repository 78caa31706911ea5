"""What the two sides of a connector tell each other, inside the messages of a step."""

from __future__ import annotations

import msgspec


class BlockTransfer(msgspec.Struct, kw_only=True):
    """Blocks of one state group that are loaded or stored together.

    group: number of the group. keys: what the blocks contain. Of a group of tokens, key i names block i; of a group of slots, a key names
    all pages of a snapshot, in order. meta: from the connector's scheduler side to its worker side.
    """

    transfer_id: int
    group: int
    keys: list[bytes]
    block_ids: list[int]
    meta: bytes = b""

    @property
    def blocks_per_key(self) -> int:
        """How many blocks a key names."""
        return len(self.block_ids) // len(self.keys)


class StepTransfers(msgspec.Struct, kw_only=True):
    """What to begin before a step. A load writes its blocks, a store reads them; both may go on during later steps.

    A load writes only after all steps that were launched before, and a store sees what those have written.
    cancelled: transfers whose result nobody waits for any more. They end as soon as possible, with any result.
    """

    loads: list[BlockTransfer] = []
    stores: list[BlockTransfer] = []
    cancelled: list[int] = []


class FinishedTransfers(msgspec.Struct, kw_only=True):
    """Transfers that no longer touch their blocks. Steps that are launched later see what loads have written.

    failed: transfer → why, as a sentence. The content of the blocks of a failed load is undefined.
    """

    finished: list[int] = []
    failed: dict[int, str] = {}
