"""Collectives over the ranks of a tensor-parallel group: `cas::all_reduce`, `cas::all_gather`, and how a process joins the group.

A process joins one group, once (`join_tensor_parallel_group`), before it runs a model that was sharded; the graph knows the
group's size and never the rank, so that all ranks run the same pieces.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelGroup:
    """This process's place among the ranks that share a model's tensors."""

    rank: int
    size: int
    process_group: dist.ProcessGroup


_group: TensorParallelGroup | None = None
_num_entered = 0
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13


def join_tensor_parallel_group(
    *, rank: int, size: int, init_method: str, device: torch.device, timeout_seconds: float = 600.0
) -> TensorParallelGroup:  # fmt: skip
    """Wait until all `size` ranks have called this, and be rank `rank` of them until `leave_tensor_parallel_group`.

    init_method: where the ranks meet, the same text for all, e.g. "file:///dev/shm/<fresh name>" or "tcp://127.0.0.1:29500".
    device: that this rank's tensors live on; CUDA ranks speak over NCCL, CPU ranks over gloo. timeout_seconds: for the meeting
    and for each collective. Raises `RuntimeError` (torch's) where not all come; a collective raises it where a rank is gone.
    """
    global _group
    assert 0 <= rank < size, f"rank {rank} of {size}"
    assert _group is None, f"this process is rank {_group.rank} of a group already"
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)  # what NCCL's and Triton's launches go to
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if is_cuda else None,
    )
    everyone = dist.group.WORLD
    assert everyone is not None
    _group = TensorParallelGroup(rank=rank, size=size, process_group=everyone)
    return _group


def leave_tensor_parallel_group() -> None:
    """Leave the group, if this process is in one; the other ranks' next collective fails."""
    global _group
    if _group is not None:
        _group = None
        dist.destroy_process_group()


def tensor_parallel_group() -> TensorParallelGroup:
    """The group that this process has joined."""
    assert _group is not None, "a sharded model ran before join_tensor_parallel_group(...)"
    return _group


def collectives_entered() -> int:
    """How many collectives this process has begun on the CPU: two looks at it tell whether it moves."""
    return _num_entered


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, which can be pickled, in the order of ranks."""
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
    # Gathered and then summed in the order of ranks: every rank has the same bits, and a row's sum does not depend on where
    # in the batch the row lies, as it does in a ring. One rounding, whatever gloo can add.
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

# What a collective gives every rank, from every rank's first argument and the others, which are equal on all ranks.
REFERENCES: dict[Any, Callable[..., Any]] = {
    _all_reduce_op: _all_reduce_reference,
    _all_gather_op: _all_gather_reference,
}


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Σ over ranks of x, the same bits on every rank; on the CPU summed in float32 in the order of ranks, rounded once."""
    return _all_reduce_op(x)


def all_gather(x: torch.Tensor, size: int, length: int) -> torch.Tensor:
    """The ranks' x side by side along the last dimension, the first `length` columns of it. [..., D] → [..., length]

    size: N, as the graph was made for; N · D ≥ length, where what is beyond is padding of the last ranks.
    """
    return _all_gather_op(x, size, length)
