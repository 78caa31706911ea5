"""Memory of all ranks of one host that each of them can read and write: what the all-reduces of `triton_allreduce` and
`custom_ops/collectives/triton_allreduce_stores.py` use.

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

# Programs of one kernel, a multiprocessor. They wait for other ranks', so all of them must be on the device at once; and each waits for
# its own row, so that more of them keep more of the link busy.
PROGRAMS_PER_SM = 2
MAX_BYTES = 1 << 28  # of the two places in one rank's buffer, but for what makes them whole rows of each program
FLAG_KINDS = 3  # launches, launches whose sums are there, steps
MAX_PUSHED_ROWS = 2  # of each program: what comes from each rank has a place of its own
EMPTY = -(1 << 15)  # in 16 bits: -0.0, which no rank sends
# Where torch puts the socket over which ranks hand each other their memory, and how long that path may be.
_SOCKET_FOLDERS, _MAX_SOCKET_FOLDER = ("TMPDIR", "TMP", "TEMP", "TEMPDIR"), 80


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLayout:
    """What lies in a rank's buffer: two places for each row of each program, used in turn, then the programs' flags, then three places
    for a few rows of each program from each rank, then one for every other rank's part of each row that this rank may have to sum.

    num_programs: that one kernel has at most; each has room for `rows_per_program` rows of `row_bytes` (a multiple of 16). has_parts:
    without, there is no room for parts.
    """

    size: int
    row_bytes: int
    rows_per_program: int
    num_programs: int
    has_parts: bool = True

    @property
    def max_rows(self) -> int:
        """Rows of one message."""
        return self.num_programs * self.rows_per_program

    @property
    def flags_offset(self) -> int:
        """int32 [FLAG_KINDS, programs, ranks] begin here."""
        return 2 * self.max_rows * self.row_bytes

    @property
    def pushed_offset(self) -> int:
        """[3 places, programs, pushed_rows, ranks] rows begin here, at first of values that are EMPTY."""
        return -(-(self.flags_offset + FLAG_KINDS * self.num_programs * self.size * 4) // 16) * 16

    @property
    def pushed_rows(self) -> int:
        """Of each program, that others can write here."""
        return min(self.rows_per_program, MAX_PUSHED_ROWS)

    @property
    def max_pushed_rows(self) -> int:
        """Rows of one message that is pushed."""
        return self.num_programs * self.pushed_rows

    @property
    def parts_offset(self) -> int:
        """[programs, owned_rows, ranks - 1] rows begin here."""
        return self.pushed_offset + 3 * self.num_programs * self.pushed_rows * self.size * self.row_bytes

    @property
    def owned_rows(self) -> int:
        """Of each program, that one rank sums at most, where the ranks take turns."""
        return -(-self.rows_per_program // self.size) if self.has_parts else 0

    @property
    def program_parts_bytes(self) -> int:
        """Of the parts of one program's rows."""
        return self.owned_rows * (self.size - 1) * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Of the buffer."""
        return self.parts_offset + self.num_programs * self.program_parts_bytes


def layout_for(
    size: int, num_features: int, dtype: torch.dtype, max_rows: int, num_sms: int, *, has_parts: bool = True
) -> BufferLayout:
    """For messages of up to max_rows rows, or fewer where they would take more than MAX_BYTES. num_sms: of each device."""
    programs = PROGRAMS_PER_SM * num_sms
    row_bytes = -(-num_features * dtype.itemsize // 16) * 16
    rows = -(-min(max_rows, MAX_BYTES // (2 * row_bytes)) // programs)
    return BufferLayout(
        size=size, row_bytes=row_bytes, rows_per_program=rows, num_programs=programs, has_parts=has_parts
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmetricMemory:
    """Buffers of all ranks as one of them sees them.

    addresses_N: int64 [N], of the buffers in the order of ranks, as `clear` leaves them; on this rank's device.
    launches, turns, steps: int32 [programs], zero at first. owned: what keeps the buffers mapped.
    """

    rank: int
    layout: BufferLayout
    addresses_N: torch.Tensor
    launches: torch.Tensor
    turns: torch.Tensor
    steps: torch.Tensor
    owned: object


def symmetric_memory(
    rank: int, layout: BufferLayout, addresses: Sequence[int], device: torch.device, owned: object
) -> SymmetricMemory:
    """From the buffers' addresses in this process."""
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
    """uint8 [num_bytes], as it is before the first launch."""
    buffer.zero_()
    buffer[layout.pushed_offset : layout.parts_offset].view(torch.int16).fill_(EMPTY)


def map_symmetric_memory(
    rank: int, layout: BufferLayout, group: dist.ProcessGroup, device: torch.device
) -> SymmetricMemory | str:
    """A buffer on every rank of a group, mapped by all; every rank calls it. → or a sentence why not, on all ranks if on one"""
    socket_folder = next((os.environ[name] for name in _SOCKET_FOLDERS if name in os.environ), "/tmp")
    everyone = gather_objects((socket.gethostname(), _boot_id(), layout, len(os.fsencode(socket_folder))), group)
    # The mapping would wait for ever for what another host cannot send.
    if len({(host, boot) for host, boot, *_ in everyone}) > 1:
        return "the ranks are on several hosts"
    if len({theirs for _, _, theirs, _ in everyone}) > 1:
        return "the ranks' GPUs have different numbers of multiprocessors"
    if max(length for *_, length in everyone) > _MAX_SOCKET_FOLDER:
        return f"the path of TMPDIR is longer than {_MAX_SOCKET_FOLDER} bytes: no socket for sharing memory fits there"
    try:
        mapped, why_not = _map(rank, layout, group, device), ""
    except RuntimeError as error:  # of CUDA: no access from one device to the other, mostly
        mapped, why_not = None, str(error).splitlines()[0]
    return next((f"rank {i}: {text}" for i, text in enumerate(gather_objects(why_not, group)) if text), mapped)  # type: ignore[return-value]


def _map(rank: int, layout: BufferLayout, group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    buffer = empty_symmetric(layout.num_bytes, device)
    clear(buffer, layout)
    torch.cuda.synchronize(device)  # nobody sees a buffer before: a flag may be set as soon as it is mapped
    addresses, handle = rendezvous(buffer, group)
    begin = buffer.data_ptr() - addresses[rank]  # 0, unless the tensor lies within a larger allocation
    return symmetric_memory(rank, layout, [address + begin for address in addresses], device, (buffer, handle))


def _boot_id() -> str:
    """Differs between hosts whose names are equal."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.exists() else ""
