"""Symmetric memory: a buffer on each rank of a host that all ranks can read and write, for the kernels of `triton_allreduce.py` and
`triton_allreduce_stores.py`.

Shape legend: N ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.collectives.collectives import gather_objects
from compile_and_serve.custom_ops.compat import empty_symmetric, rendezvous
from compile_and_serve.custom_ops.platform import platform_of

# Programs of a kernel per multiprocessor. All have to be resident at once, because they wait for other ranks' programs. Each waits for its
# own row, so more programs keep the link busier.
PROGRAMS_PER_SM = 2
MAX_BYTES = 1 << 28  # of the two slots of all rows in a rank's buffer, before rounding up to whole rows of each program
FLAG_KINDS = 3  # launches, launches with finished sums, steps
MAX_PUSHED_ROWS = 2  # per program, each with a slot for every rank
EMPTY = -(1 << 15)  # 16-bit pattern of -0.0, which no rank sends
# Variables that name the folder of torch's socket for exchanging memory handles, and the longest path that fits.
_SOCKET_FOLDERS, _MAX_SOCKET_FOLDER = ("TMPDIR", "TMP", "TEMP", "TEMPDIR"), 80


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """The layout of a rank's buffer: two slots for each row of each program, used in turn; the programs' flags; three slots for a few rows
    of each program from each rank (pushed rows); and one slot for every other rank's part of each row that this rank may sum.

    num_programs: at most, of one kernel; each has `rows_per_program` rows of `row_bytes` (a multiple of 16). has_parts: whether there are
    slots for parts. has_pushed: whether there are slots for pushed rows.
    """

    size: int
    row_bytes: int
    rows_per_program: int
    num_programs: int
    has_parts: bool = True
    has_pushed: bool = True

    @property
    def max_rows(self) -> int:
        """Rows of the largest message."""
        return self.num_programs * self.rows_per_program

    @property
    def flags_offset(self) -> int:
        """Offset of the flags, int32 [FLAG_KINDS, programs, ranks]."""
        return 2 * self.max_rows * self.row_bytes

    @property
    def pushed_offset(self) -> int:
        """Offset of the pushed rows, [3 slots, programs, pushed_rows, ranks] rows; all values are EMPTY at first."""
        return -(-(self.flags_offset + FLAG_KINDS * self.num_programs * self.size * 4) // 16) * 16

    @property
    def pushed_rows(self) -> int:
        """Rows of each program that other ranks can push."""
        return min(self.rows_per_program, MAX_PUSHED_ROWS) if self.has_pushed else 0

    @property
    def max_pushed_rows(self) -> int:
        """Rows of the largest message that can be pushed."""
        return self.num_programs * self.pushed_rows

    @property
    def parts_offset(self) -> int:
        """Offset of the parts, [programs, owned_rows, ranks - 1] rows."""
        return self.pushed_offset + 3 * self.num_programs * self.pushed_rows * self.size * self.row_bytes

    @property
    def owned_rows(self) -> int:
        """Rows of each program that one rank sums at most, when the ranks take turns."""
        return -(-self.rows_per_program // self.size) if self.has_parts else 0

    @property
    def program_parts_bytes(self) -> int:
        """Bytes of the parts of one program's rows."""
        return self.owned_rows * (self.size - 1) * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.parts_offset + self.num_programs * self.program_parts_bytes


def layout_for(size: int, num_features: int, dtype: torch.dtype, max_rows: int, num_sms: int, *, has_parts: bool = True) -> BufferLayout:
    """The layout for messages up to max_rows rows, or fewer within MAX_BYTES. num_sms: multiprocessors of each device."""
    programs = PROGRAMS_PER_SM * num_sms
    row_bytes = -(-num_features * dtype.itemsize // 16) * 16
    rows = -(-min(max_rows, MAX_BYTES // (2 * row_bytes)) // programs)
    return BufferLayout(size=size, row_bytes=row_bytes, rows_per_program=rows, num_programs=programs, has_parts=has_parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricMemory:
    """The buffers of all ranks, mapped into this rank.

    addresses_N: int64 [N] on this rank's device: addresses of the buffers in the order of ranks, each after `clear`.
    launches, turns, steps: int32 [programs], zero at first. owned: keeps the buffers mapped.
    """

    rank: int
    layout: BufferLayout
    addresses_N: torch.Tensor
    launches: torch.Tensor
    turns: torch.Tensor
    steps: torch.Tensor
    owned: object


def symmetric_memory(rank: int, layout: BufferLayout, addresses: Sequence[int], device: torch.device, owned: object) -> SymmetricMemory:
    """Symmetric memory of buffers at these addresses in this process."""
    return SymmetricMemory(
        rank=rank,
        layout=layout,
        addresses_N=torch.tensor(addresses, dtype=torch.int64, device=device),
        launches=torch.zeros(layout.num_programs, dtype=torch.int32, device=device),
        turns=torch.zeros(layout.num_programs, dtype=torch.int32, device=device),
        steps=torch.zeros(layout.num_programs, dtype=torch.int32, device=device),
        owned=owned,
    )


def clear(buffer: torch.Tensor, layout: BufferLayout) -> None:
    """Initialize a buffer, uint8 [num_bytes], for the first launch."""
    buffer.zero_()
    buffer[layout.pushed_offset : layout.parts_offset].view(torch.int16).fill_(EMPTY)


def map_symmetric_memory(rank: int, layout: BufferLayout, group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory | str:
    """Allocate a buffer on every rank of a group and map it into all. Every rank calls this. → the reason, on all ranks, if one fails"""
    socket_folder = next((os.environ[name] for name in _SOCKET_FOLDERS if name in os.environ), "/tmp")
    everyone = gather_objects((socket.gethostname(), _boot_id(), layout, len(os.fsencode(socket_folder))), group)
    # Between hosts, the mapping would wait for ever.
    if len({(host, boot) for host, boot, *_ in everyone}) > 1:
        return "the ranks are on several hosts"
    if len({theirs for _, _, theirs, _ in everyone}) > 1:
        return "the ranks' GPUs have different numbers of multiprocessors"
    if max(length for *_, length in everyone) > _MAX_SOCKET_FOLDER:
        return f"the path of TMPDIR is longer than {_MAX_SOCKET_FOLDER} bytes: no socket for sharing memory fits there"
    try:
        mapped, why_not = _map(rank, layout, group, device), ""
    except RuntimeError as error:  # of CUDA, usually because a device cannot access another
        mapped, why_not = None, str(error).splitlines()[0]
    return next((f"rank {i}: {text}" for i, text in enumerate(gather_objects(why_not, group)) if text), mapped)  # type: ignore[return-value]


def _map(rank: int, layout: BufferLayout, group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    buffer = empty_symmetric(layout.num_bytes, device)
    clear(buffer, layout)
    platform_of(device).synchronize()  # before the mapping: other ranks may set flags as soon as it is mapped
    addresses, handle = rendezvous(buffer, group)
    begin = buffer.data_ptr() - addresses[rank]  # not 0 if the tensor is part of a larger allocation
    return symmetric_memory(rank, layout, [address + begin for address in addresses], device, (buffer, handle))


def _boot_id() -> str:
    """Differs between hosts of the same name."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.exists() else ""
