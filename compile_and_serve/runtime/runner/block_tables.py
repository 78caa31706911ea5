"""Which blocks of one group each sequence holds, on the host and on the device. Only changes are copied.

Shape legend: R batch slots, S sequences of the step, M columns (blocks of the longest sequence).

There are two tables: by batch slot (a request keeps its slot while it runs) and by row of the batch (what attention reads). Slot
mappings are computed from the host's slot table. On the CPU the device's batch table is the host's own memory.
"""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of


class BlockTables:
    """`write` as blocks are given, `set_batch` when the batch's composition changes, `commit` before the step runs."""

    def __init__(self, num_slots: int, num_columns: int, device: torch.device) -> None:
        self.num_columns = num_columns
        self.slot_table = np.zeros((num_slots, num_columns), dtype=np.int32)
        self.flat_slot_table = self.slot_table.reshape(-1)
        self._batch_table = torch.zeros(num_slots, num_columns, dtype=torch.int32, device=device)
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

    def write(self, slot: int, column: int, block_ids: list[int]) -> None:
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
            self._batch_changed = False

    def of_slots(self, slots_S: torch.Tensor) -> torch.Tensor:
        """The rows of batch slots, as they were at the last `commit`: int32 [S, M]. slots_S: int64, on the device, as the result."""
        table = torch.from_numpy(self.slot_table) if self._shares_memory else self._device_slot_table
        return table[slots_S]

    def batch_table(self, num_rows: int) -> torch.Tensor:
        """int32 [num_rows, M] on the device: always the same memory. Columns beyond a sequence's blocks hold old
        block ids.
        """
        return self._batch_table[:num_rows]
