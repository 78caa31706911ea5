"""Collectives over named groups of ranks: `cas::all_reduce`, `cas::all_gather`, and how a process joins its groups.

A process joins the groups of its mesh (`join_groups`) before it runs a sharded model. A collective names the axis whose group it is over;
the graph depends on the mesh but not on the rank, so that all ranks run the same pieces.

Shape legend: T rows, D features, N ranks.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.mesh import PIPE, TENSOR, Axis, Mesh
from compile_and_serve.custom_ops.platform import platform_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """A group of ranks, and this process's rank in it."""

    rank: int
    size: int
    process_group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLinks:
    """This process's stage, and its links to others. one_way: (sending stage, receiving stage) → a group of these two ranks alone, because
    the transfers of a group run one after another: what waits on one way must keep nothing on another waiting.
    """

    stage: int
    num_stages: int
    one_way: Mapping[tuple[int, int], dist.ProcessGroup]


# Of the process, as torch's groups are: a process is a rank of one engine at most.
_groups: dict[Axis, RankGroup] = {}
_links: StageLinks | None = None
_num_entered = 0
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


def join_groups(*, rank: int, mesh: Mesh, init_method: str, device: torch.device, timeout_seconds: float = 600.0) -> None:
    """Join the other ranks as rank `rank` of the mesh, and form a group along each divided axis. Waits until all ranks have called this.

    init_method: the rendezvous, equal for all ranks, for example "file:///dev/shm/<fresh name>" or "tcp://127.0.0.1:29500".
    device: of this rank's tensors; CUDA ranks use NCCL, CPU ranks gloo. timeout_seconds: of the rendezvous and of each collective.
    Raises torch's `RuntimeError` if a rank does not join; a collective raises it if a rank has ended.
    """
    assert 0 <= rank < mesh.size, f"rank {rank} of {mesh.size}"
    global _links
    assert not _groups, f"this process is already in the groups {', '.join(_groups)}"
    assert _links is None, "this process is already a stage"
    platform = platform_of(device)
    platform.make_current()  # the device of NCCL's and Triton's launches
    timeout = timedelta(seconds=timeout_seconds)
    meeting: dict[str, Any] = {"init_method": init_method}
    if init_method.startswith("tcp://"):
        meeting = {"store": _tcp_store(init_method, rank, mesh.size, timeout)}
    dist.init_process_group(
        platform.collectives,
        **meeting,
        rank=rank,
        world_size=mesh.size,
        timeout=timeout,
        device_id=None if platform.shares_host_memory else device,
    )
    # Every rank takes part in forming each group.
    for axis in mesh.divided_axes:
        for members in mesh.groups(axis):
            if axis == PIPE:
                one_way = {
                    (source, to): dist.new_group([members[source], members[to]], timeout=timeout) for source, to in _directions(mesh.pipe)
                }
                if rank in members:
                    _links = StageLinks(stage=members.index(rank), num_stages=mesh.pipe, one_way=one_way)
                continue
            is_whole = len(members) == mesh.size
            process_group = dist.group.WORLD if is_whole else dist.new_group(list(members), timeout=timeout)
            if rank in members:
                assert process_group is not None
                _groups[axis] = RankGroup(rank=members.index(rank), size=len(members), process_group=process_group)


def _directions(num_stages: int) -> list[tuple[int, int]]:
    """The (sending stage, receiving stage) of all transfers: each stage to the next one, the last to all others."""
    last = num_stages - 1
    return [*itertools.pairwise(range(num_stages)), *((last, other) for other in range(last))]


def _tcp_store(init_method: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """A store at "tcp://address:port". Rank 0 listens there alone; left to itself, torch would listen on all addresses."""
    address, _, port = init_method.removeprefix("tcp://").rpartition(":")
    listening = socket.create_server((address, int(port))).detach() if rank == 0 else None
    return dist.TCPStore(address, int(port), size, rank == 0, timeout=timeout, wait_for_workers=False, master_listen_fd=listening)


def leave_groups() -> None:
    """Leave the groups, if this process is in any. The other ranks' next collective fails."""
    global _links
    if _groups or _links is not None:
        _groups.clear()
        _links = None
        dist.destroy_process_group()


def rank_group(axis: Axis = TENSOR) -> RankGroup:
    """This process's group along an axis."""
    assert axis in _groups, f"a collective over the {axis!r} axis ran before join_groups(...) with a mesh that divides it"
    return _groups[axis]


def stage_links() -> StageLinks:
    """This process's links to the other stages of its model."""
    assert _links is not None, "a stage ran before join_groups(...) with a mesh that divides the 'pipe' axis"
    return _links


def collectives_entered() -> int:
    """How many collectives on the CPU and transfers this process has begun. It grows as long as the process makes progress."""
    return _num_entered


@dataclass(slots=True)
class Transfer:
    """A tensor on its way between two ranks. It must not be written, nor read where it is received, before `wait`."""

    tensor: torch.Tensor
    _work: dist.Work | None

    def wait(self) -> None:
        """Let what follows on this device come after the transfer. On the CPU this waits for it. May be called more than once."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()  # gloo would wait for another transfer if it were called again


def start_send(x: torch.Tensor, to: int, links: StageLinks) -> Transfer:
    """Begin to send x to stage `to`, which receives it with `start_receive`. On CUDA it runs beside this stream, behind what computes x.
    Transfers from one stage to another keep their order; all others do not wait for them.
    """
    x = x.contiguous()
    return _transfer(dist.isend(x, group=links.one_way[links.stage, to], group_dst=int(links.stage < to)), x)


def start_receive(x: torch.Tensor, source: int, links: StageLinks) -> Transfer:
    """Begin to receive into x, which is contiguous and has the shape and dtype of what stage `source` sends."""
    assert x.is_contiguous()
    return _transfer(dist.irecv(x, group=links.one_way[source, links.stage], group_src=int(links.stage < source)), x)


def exchange(sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], group: RankGroup) -> None:
    """Send and receive contiguous tensors, each to or from a rank of the group. Those between two ranks are in the same order on both.

    On CUDA what follows on the stream comes after it; on the CPU this waits.
    """
    global _num_entered
    _num_entered += 1
    to = [dist.P2POp(dist.isend, _bytes(x), group=group.process_group, group_peer=rank) for x, rank in sends]
    came = [dist.P2POp(dist.irecv, _bytes(x), group=group.process_group, group_peer=rank) for x, rank in receives]
    for work in dist.batch_isend_irecv([*to, *came]) if to or came else ():
        work.wait()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    return x.view(torch.uint8)


def _transfer(work: dist.Work | None, x: torch.Tensor) -> Transfer:
    global _num_entered
    _num_entered += 1
    assert work is not None, "this process is no member of the group"
    return Transfer(x, work)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in the order of ranks. Values have to be picklable. group: None is all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_parts(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Every rank's x, in the order of ranks. [...] → [N, ...]"""
    global _num_entered
    _num_entered += 1
    x = x.contiguous()
    all_N = x.new_empty(group.size, *x.shape)
    _gather(all_N.flatten(0, 1), x, group=group.process_group)
    return all_N


def sum_of_parts(x_N: Sequence[torch.Tensor], group: Axis = TENSOR) -> torch.Tensor:
    """Σ of the ranks' tensors, in float32 or wider in the order of ranks, with one rounding."""
    math_dtype = torch.promote_types(x_N[0].dtype, torch.float32)
    total = x_N[0].to(math_dtype)
    for x in x_N[1:]:
        total = total + x.to(math_dtype)
    return total.to(x_N[0].dtype)


def _all_gather_reference(x_N: Sequence[torch.Tensor], size: int, length: int, group: Axis = TENSOR) -> torch.Tensor:
    assert len(x_N) == size, f"a graph for {size} ranks runs on {len(x_N)}"
    return torch.cat(tuple(x_N), dim=-1)[..., :length].contiguous()


def _all_reduce_cpu(x: torch.Tensor, group: Axis = TENSOR) -> torch.Tensor:
    # Gathered, then summed in the order of ranks with one rounding: every rank has the same bits, and a row's sum does not depend on the
    # row's index in the batch, as it does in a ring.
    return sum_of_parts(gather_parts(x, rank_group(group)).unbind(0))


def _all_reduce_cuda(x: torch.Tensor, group: Axis = TENSOR) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=rank_group(group).process_group)
    return total


def _all_gather(x: torch.Tensor, size: int, length: int, group: Axis = TENSOR) -> torch.Tensor:
    return _all_gather_reference(gather_parts(x, rank_group(group)).unbind(0), size, length)


ALL_REDUCE = define(
    "all_reduce(Tensor x, str group='tensor') -> Tensor",
    version=1,
    fake=lambda x, *_: x.new_empty(x.shape),
    across_ranks=sum_of_parts,
    row_wise=True,
    CPU=_all_reduce_cpu,
    CUDA=_all_reduce_cuda,
)
ALL_GATHER = define(
    "all_gather(Tensor x, int size, int length, str group='tensor') -> Tensor",
    version=1,
    fake=lambda x, size, length, *_: x.new_empty(*x.shape[:-1], length),
    across_ranks=_all_gather_reference,
    CompositeExplicitAutograd=_all_gather,
)


def all_reduce(x: torch.Tensor, group: Axis = TENSOR) -> torch.Tensor:
    """Σ over the group's ranks of x, with the same bits on each. On the CPU summed in float32 in the order of ranks, rounded once."""
    return ALL_REDUCE(x, group)


def all_gather(x: torch.Tensor, size: int, length: int, group: Axis = TENSOR) -> torch.Tensor:
    """The ranks' x concatenated along the last dimension, cut to `length` columns. [..., D] → [..., length]

    size: N, of the group, which the graph was compiled for. N · D ≥ length; the rest is padding of the last ranks.
    """
    return ALL_GATHER(x, size, length, group)
