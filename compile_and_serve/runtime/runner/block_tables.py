"""Which blocks of one group each sequence holds, on the host and on the device. Only changes are copied. `SlotTables` has two of them.

Shape legend: R batch slots, S sequences of the step, M columns (blocks of the longest sequence).

There are two tables: by batch slot (a request keeps its slot while it runs) and by row of the batch (what attention reads). Slot
mappings are computed from the host's slot table. On the CPU the device's batch table is the host's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of


class BlockTables:
    """`begin` and `append` as blocks are given, `set_batch` when the batch's composition changes, `commit` before the step runs."""

    def __init__(self, num_slots: int, num_columns: int, device: torch.device, padding: int | None = None) -> None:
        """padding: the block in all columns of rows beyond the batch; None: any."""
        self.num_columns = num_columns
        self.slot_table = np.zeros((num_slots, num_columns), dtype=np.int32)
        self.flat_slot_table = self.slot_table.reshape(-1)
        self._padding = padding
        self._batch_table = torch.full((num_slots, num_columns), padding or 0, dtype=torch.int32, device=device)
        self._platform = platform_of(device)
        self._shares_memory = self._platform.shares_host_memory
        self._row_of_slot = np.full(num_slots, -1, dtype=np.int64)
        self._slots_S = np.empty(0, dtype=np.int64)
        self._used = np.zeros(num_slots, dtype=np.int64)  # columns of each slot that hold blocks
        if self._shares_memory:
            self._host_batch_table = self._batch_table.numpy()
        else:
            self._device_slot_table = torch.zeros_like(self._batch_table)
            self._pending: list[tuple[int, int, np.ndarray]] = []  # slot, column, blocks
            self._batch_changed = False

    def begin(self, slot: int, block_ids: Sequence[int]) -> None:
        """The slot has a new sequence, which holds `block_ids`."""
        self.write(slot, 0, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """The slot's sequence holds `block_ids`, too."""
        self.write(slot, int(self._used[slot]), block_ids)

    def write(self, slot: int, column: int, block_ids: Sequence[int]) -> None:
        """The slot's sequence holds `block_ids` from `column` on. Raises AssertionError beyond the last column."""
        end = column + len(block_ids)
        assert end <= self.num_columns, f"slot {slot} would hold {end} blocks; the table has {self.num_columns} columns"
        self.slot_table[slot, column:end] = block_ids
        self._used[slot] = end
        if self._shares_memory:
            row = self._row_of_slot[slot]
            if row >= 0:
                self._host_batch_table[row, column:end] = block_ids
        else:
            self._pending.append((slot, column, np.array(block_ids, dtype=np.int32)))

    def set_batch(self, slots_S: np.ndarray) -> None:
        """Row i of the batch is slots_S[i] (int64) from now on."""
        self._row_of_slot[self._slots_S] = -1
        self._slots_S = slots_S
        self._row_of_slot[slots_S] = np.arange(len(slots_S))
        if self._shares_memory:
            columns = int(self._used[slots_S].max(initial=0))
            self._host_batch_table[: len(slots_S), :columns] = self.slot_table[slots_S, :columns]
            if self._padding is not None:
                self._host_batch_table[len(slots_S) :] = self._padding
        else:
            self._batch_changed = True

    def commit(self) -> None:
        """Bring the device up to date."""
        if self._shares_memory:
            return
        if self._pending:
            slots = np.concatenate([np.full(len(ids), slot, dtype=np.int64) for slot, _, ids in self._pending])
            columns = np.concatenate([np.arange(c, c + len(ids), dtype=np.int64) for _, c, ids in self._pending])
            rows = self._row_of_slot[slots]
            packed = np.stack(
                [
                    slots * self.num_columns + columns,
                    np.where(rows >= 0, rows, 0) * self.num_columns + columns,
                    np.concatenate([ids for _, _, ids in self._pending]),
                ]
            )
            self._pending.clear()
            device_packed = self._platform.upload(packed, through_pinned=True)
            blocks = device_packed[2].to(torch.int32)
            self._device_slot_table.view(-1).index_copy_(0, device_packed[0], blocks)
            if not self._batch_changed and (rows >= 0).all():
                self._batch_table.view(-1).index_copy_(0, device_packed[1], blocks)
            else:
                self._batch_changed = True
        if self._batch_changed:
            slots_S = self._platform.upload(self._slots_S, through_pinned=True)
            num_seqs = len(self._slots_S)
            width = int(self._used[self._slots_S].max(initial=0))
            self._batch_table[:num_seqs, :width] = self._device_slot_table[slots_S, :width]
            if self._padding is not None:
                self._batch_table[num_seqs:] = self._padding
            self._batch_changed = False

    def on_device(self, slot: int, count: int) -> list[int]:
        """The first `count` blocks of the slot's row of the batch, as attention reads them; none where it is not in the batch."""
        row = int(self._row_of_slot[slot])
        found: list[int] = [] if row < 0 else self._batch_table[row, :count].tolist()
        return found

    def of_slots(self, slots_S: torch.Tensor) -> torch.Tensor:
        """The rows of batch slots, as they were at the last `commit`: int32 [S, M]. slots_S: int64, on the device, as the result."""
        table = torch.from_numpy(self.slot_table) if self._shares_memory else self._device_slot_table
        return table[slots_S]

    def batch_table(self, num_rows: int) -> torch.Tensor:
        """int32 [num_rows, M] on the device: always the same memory. Columns beyond a sequence's blocks hold old
        block ids.
        """
        return self._batch_table[:num_rows]

    def pages(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """As `StateKind.metadata` takes them, but for the slot mapping."""
        return (self.batch_table(num_rows),)


class SlotTables:
    """Which pages hold the state of each sequence of a group of slots: those that the step reads, and those that it writes.

    Call `settle` before a step's `begin` and `move`, and `forget` before that for the slots whose sequences are gone. The rest is as in
    `BlockTables`.
    """

    def __init__(self, num_slots: int, pages_per_slot: int, device: torch.device, padding: int) -> None:
        """padding: the page that is read and written for rows beyond the batch."""
        self.num_columns = pages_per_slot
        self._read, self._written = (BlockTables(num_slots, pages_per_slot, device, padding) for _ in range(2))
        self._moved: set[int] = set()  # slots whose sequences read other pages than they write

    def begin(self, slot: int, page_ids: Sequence[int]) -> None:
        """The slot has a new sequence. page_ids: those that it writes; before them those that its first step reads, if they are others."""
        written = page_ids[-self.num_columns :]
        self._read.begin(slot, page_ids[: self.num_columns])
        self._written.begin(slot, written)
        if len(page_ids) > self.num_columns:
            self._moved.add(slot)

    def append(self, slot: int, page_ids: Sequence[int]) -> None:
        """The state of the slot's sequence moves: the step reads the pages before and writes these."""
        self._read.begin(slot, self._written.slot_table[slot].tolist())
        self._written.begin(slot, page_ids)
        self._moved.add(slot)

    def forget(self, slot: int) -> None:
        """The slot's sequence is gone."""
        self._moved.discard(slot)

    def settle(self) -> None:
        """The step is launched: what moved is read from where it was written."""
        for slot in self._moved:
            self._read.begin(slot, self._written.slot_table[slot].tolist())
        self._moved.clear()

    def set_batch(self, slots_S: np.ndarray) -> None:
        """As of `BlockTables`."""
        self._read.set_batch(slots_S)
        self._written.set_batch(slots_S)

    def commit(self) -> None:
        """As of `BlockTables`."""
        self._read.commit()
        self._written.commit()

    def pages(self, num_rows: int) -> tuple[torch.Tensor, ...]:
        """As of `BlockTables`."""
        return self._read.batch_table(num_rows), self._written.batch_table(num_rows)
