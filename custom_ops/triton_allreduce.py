"""One-shot all-reduce over peer memory, with the residual and the norm: one kernel for what follows a rowwise linear.

    s = residual + Σ over ranks of x;  y = s / sqrt(mean(s²) + eps) · weight

Every rank writes its row into its own buffer, tells the others, waits until they have, and reads all of them: one trip over the
link, right for the small messages of a decode step (a two-shot or a ring moves less and waits more often). One program a row; each
counts its own launches, so that it runs in a CUDA graph. A row has two places in the buffer, used in turn: a program that is at its
launch e has seen all ranks at e - 1, so all of them have ended e - 2, whose place it takes; no second barrier is needed. NVLink's
multicast is not used.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

MAX_ROWS = 128  # programs that wait for each other: all of them must be on the device at once
MAX_ROW_BYTES = 1 << 15
# Where torch puts the socket over which ranks hand each other their memory, and how long that path may be.
_SOCKET_FOLDERS, _MAX_SOCKET_FOLDER = ("TMPDIR", "TMP", "TEMP", "TEMPDIR"), 80


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """Buffers of all ranks as one of them sees them.

    addresses_N: int64 [N], of the buffers in the order of ranks, each `buffer_bytes(N)` long and zero at first; on this rank's device.
    launches: int32 [MAX_ROWS], zero at first. owned: what keeps the buffers mapped.
    """

    rank: int
    addresses_N: torch.Tensor
    launches: torch.Tensor
    owned: object


def buffer_bytes(size: int) -> int:
    """Two places for each row, and a flag from each of `size` ranks for it."""
    return 2 * MAX_ROWS * MAX_ROW_BYTES + MAX_ROWS * size * 4


def map_peer_memory(rank: int, size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """A buffer on every rank of a group, mapped by all; every rank calls it. Raises `RuntimeError` where there is no peer access,
    on all ranks where it can be known beforehand.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    socket_folder = next((os.environ[name] for name in _SOCKET_FOLDERS if name in os.environ), "/tmp")
    mine = (socket.gethostname(), _boot_id(), len(os.fsencode(socket_folder)) <= _MAX_SOCKET_FOLDER)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine, group=group)
    if (
        len({(host, boot) for host, boot, _ in everyone}) > 1
    ):  # the mapping would wait for ever for what another host cannot send
        raise RuntimeError("the ranks are on several hosts")
    if not all(fits for *_, fits in everyone):
        raise RuntimeError("the path of TMPDIR is too long for the socket over which memory is shared")
    buffer = symmetric_memory.empty(buffer_bytes(size), dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)  # nobody sees a buffer that is not zero: a flag may be set as soon as it is mapped
    handle = symmetric_memory.rendezvous(buffer, group)
    begin = buffer.data_ptr() - handle.buffer_ptrs[rank]  # 0, unless the tensor lies within a larger allocation
    return peer_memory(rank, [address + begin for address in handle.buffer_ptrs], device, owned=(buffer, handle))


def _boot_id() -> str:
    """Differs between hosts whose names are equal."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text() if file.exists() else ""


def peer_memory(rank: int, addresses: Sequence[int], device: torch.device, owned: object) -> PeerMemory:
    """From the buffers' addresses in this process."""
    return PeerMemory(
        rank=rank,
        addresses_N=torch.tensor(addresses, dtype=torch.int64, device=device),
        launches=torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
        owned=owned,
    )


@triton.jit
def _one_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, addresses_ptr, launches_ptr, num_features, x_stride,
    residual_stride, eps, rank,
    SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, MAX_ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols_D = tl.arange(0, BLOCK)
    ok_D = cols_D < num_features
    launch = tl.load(launches_ptr + row) + 1
    place = ((launch & 1) * MAX_ROWS + row) * MAX_ROW_BYTES
    flags = 2 * MAX_ROWS * MAX_ROW_BYTES + row * SIZE * 4

    mine = tl.load(addresses_ptr + rank)
    x_D = tl.load(x_ptr + row * x_stride + cols_D, mask=ok_D, other=0.0)
    tl.store(tl.multiple_of((mine + place).to(x_ptr.dtype), 16) + cols_D, x_D, mask=ok_D)
    tl.debug_barrier()  # every thread's part is written before one thread says so
    for peer in tl.static_range(SIZE):
        flag = (tl.load(addresses_ptr + peer) + flags + rank * 4).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, launch, sem="release", scope="sys")
    weight_D = tl.load(weight_ptr + cols_D, mask=ok_D, other=0.0).to(tl.float32)
    total_D = tl.load(residual_ptr + row * residual_stride + cols_D, mask=ok_D, other=0.0).to(tl.float32)
    for peer in tl.static_range(SIZE):
        flag = (mine + flags + peer * 4).to(tl.pointer_type(tl.int32))
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - launch < 0:  # a difference: launches wrap around
            pass
        tl.debug_barrier()
        theirs = tl.multiple_of((tl.load(addresses_ptr + peer) + place).to(x_ptr.dtype), 16)
        total_D += tl.load(theirs + cols_D, mask=ok_D, other=0.0, volatile=True).to(tl.float32)
    rounded_D = total_D.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * num_features + cols_D, rounded_D, mask=ok_D)
    total_D = rounded_D.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(total_D * total_D) / num_features + eps)
    y_D = total_D * inverse_rms * weight_D
    tl.store(out_ptr + row * num_features + cols_D, y_D.to(out_ptr.dtype.element_ty), mask=ok_D)
    tl.store(launches_ptr + row, launch)


def takes(x_TD: torch.Tensor) -> bool:
    """Whether a message is small enough."""
    return x_TD.shape[0] <= MAX_ROWS and x_TD.shape[1] * x_TD.itemsize <= MAX_ROW_BYTES


def one_shot_allreduce_add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, norm_weight_D: torch.Tensor, eps: float, peers: PeerMemory
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cas::allreduce_add_rms_norm`, for a message that `takes` takes. → s, y, each [T, D]; summed in float32, rank by rank."""
    num_rows, num_features = x_TD.shape
    assert takes(x_TD), f"{list(x_TD.shape)} is too large for one shot"
    assert x_TD.stride(1) == 1 and residual_TD.stride(1) == 1, "features must be contiguous"  # noqa: PT018
    total_TD, out_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    block = triton.next_power_of_2(num_features)
    _one_shot_kernel[(num_rows,)](
        x_TD, residual_TD, norm_weight_D, total_TD, out_TD, peers.addresses_N, peers.launches, num_features,
        x_TD.stride(0), residual_TD.stride(0), eps, peers.rank,
        SIZE=len(peers.addresses_N), MAX_ROWS=MAX_ROWS, MAX_ROW_BYTES=MAX_ROW_BYTES, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    return total_TD, out_TD
