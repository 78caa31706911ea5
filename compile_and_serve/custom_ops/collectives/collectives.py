"""Collectives over the ranks of a tensor-parallel group: `cas::all_reduce`, `cas::all_gather`, and how a process joins the group.

A process joins one group (`join_tensor_parallel_group`) before it runs a sharded model. The graph depends on the group's size but not on
the rank, so that all ranks run the same pieces.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.platform import platform_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelGroup:
    """This process's rank in the group that shares a model's tensors."""

    rank: int
    size: int
    process_group: dist.ProcessGroup


_group: TensorParallelGroup | None = None
_num_entered = 0
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def join_tensor_parallel_group(
    *, rank: int, size: int, init_method: str, device: torch.device, timeout_seconds: float = 600.0
) -> TensorParallelGroup:  # fmt: skip
    """Join a group as rank `rank` of `size`. Waits until all ranks have called this.

    init_method: the rendezvous, equal for all ranks, for example "file:///dev/shm/<fresh name>" or "tcp://127.0.0.1:29500".
    device: of this rank's tensors; CUDA ranks use NCCL, CPU ranks gloo. timeout_seconds: of the rendezvous and of each collective.
    Raises torch's `RuntimeError` if a rank does not join; a collective raises it if a rank has ended.
    """
    global _group
    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert _group is None, f"this process is already rank {_group.rank} of a group"
    platform = platform_of(device)
    platform.make_current()  # the device of NCCL's and Triton's launches
    dist.init_process_group(
        platform.collectives,
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=None if platform.shares_host_memory else device,
    )
    everyone = dist.group.WORLD
    assert everyone is not None
    _group = TensorParallelGroup(rank=rank, size=size, process_group=everyone)
    return _group


def leave_tensor_parallel_group() -> None:
    """Leave the group, if this process is in one. The other ranks' next collective fails."""
    global _group
    if _group is not None:
        _group = None
        dist.destroy_process_group()


def tensor_parallel_group() -> TensorParallelGroup:
    """The group that this process has joined."""
    assert _group is not None, "a sharded model ran before join_tensor_parallel_group(...)"
    return _group


def collectives_entered() -> int:
    """How many collectives this process has begun on the CPU. It grows as long as the process makes progress."""
    return _num_entered


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in the order of ranks. Values have to be picklable."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_parts(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Every rank's x, in the order of ranks. [...] → [N, ...]"""
    global _num_entered
    _num_entered += 1
    x = x.contiguous()
    all_N = x.new_empty(group.size, *x.shape)
    _gather(all_N.flatten(0, 1), x, group=group.process_group)
    return all_N


def _all_reduce_reference(x_N: Sequence[torch.Tensor]) -> torch.Tensor:
    math_dtype = torch.promote_types(x_N[0].dtype, torch.float32)
    total = x_N[0].to(math_dtype)
    for x in x_N[1:]:
        total = total + x.to(math_dtype)
    return total.to(x_N[0].dtype)


def _all_gather_reference(x_N: Sequence[torch.Tensor], size: int, length: int) -> torch.Tensor:
    assert len(x_N) == size, f"a graph for {size} ranks runs on {len(x_N)}"
    return torch.cat(tuple(x_N), dim=-1)[..., :length].contiguous()


def _all_reduce_cpu(x: torch.Tensor) -> torch.Tensor:
    # Gathered, then summed in the order of ranks with one rounding: every rank has the same bits, and a row's sum does not depend on the
    # row's index in the batch, as it does in a ring.
    return _all_reduce_reference(gather_parts(x, tensor_parallel_group()).unbind(0))


def _all_reduce_cuda(x: torch.Tensor) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tensor_parallel_group().process_group)
    return total


def _all_reduce_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _all_gather(x: torch.Tensor, size: int, length: int) -> torch.Tensor:
    return _all_gather_reference(gather_parts(x, tensor_parallel_group()).unbind(0), size, length)


def _all_gather_fake(x: torch.Tensor, size: int, length: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], length)


_all_reduce_op = define(
    "all_reduce(Tensor x) -> Tensor",
    kind=OpKind.CAPTURABLE,
    version=1,
    fake=_all_reduce_fake,
    CPU=_all_reduce_cpu,
    CUDA=_all_reduce_cuda,
)
_all_gather_op = define(
    "all_gather(Tensor x, int size, int length) -> Tensor",
    kind=OpKind.CAPTURABLE,
    version=1,
    fake=_all_gather_fake,
    CompositeExplicitAutograd=_all_gather,
)

# A collective's result, as a function of every rank's first argument and of the other arguments, which are equal on all ranks.
REFERENCES: dict[Any, Callable[..., Any]] = {
    _all_reduce_op: _all_reduce_reference,
    _all_gather_op: _all_gather_reference,
}


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Σ over ranks of x, with the same bits on every rank. On the CPU summed in float32 in the order of ranks, with one rounding."""
    return _all_reduce_op(x)


def all_gather(x: torch.Tensor, size: int, length: int) -> torch.Tensor:
    """The ranks' x concatenated along the last dimension, cut to `length` columns. [..., D] → [..., length]

    size: N, which the graph was compiled for. N · D ≥ length; the rest is padding of the last ranks.
    """
    return _all_gather_op(x, size, length)
