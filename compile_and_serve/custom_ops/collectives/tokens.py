"""Tokens of groups that have tokens of their own, for ops that run on all ranks: `cas::gather_tokens` brings them to all ranks,
`cas::scatter_tokens` brings the sums of the ranks' results back. On CUDA over symmetric memory where the ranks share a host and the rows
fit, else over NCCL.

Shape legend: T rows of each rank, D features, N ranks, P = N · T rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.collectives.collectives import RankGroup, gather_parts, rank_group, sum_of_parts
from compile_and_serve.custom_ops.collectives.symmetric_memory import (
    MAX_BYTES,
    PROGRAMS_PER_SM,
    BufferLayout,
    SymmetricMemory,
    map_symmetric_memory,
)
from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.mesh import DATA, Axis

log = logging.getLogger(__name__)

MAX_TOKENS = 8192  # of all ranks together over symmetric memory, which bounds the buffers


@dataclass(frozen=True, kw_only=True, slots=True)
class _GroupMemory:
    group: RankGroup
    memory: SymmetricMemory


_mapped: _GroupMemory | None = None  # of the process's group along the data axis: see `rank_group`


def token_layout(size: int, num_features: int, dtype: torch.dtype, max_tokens: int, num_sms: int) -> BufferLayout:
    """The layout for steps of up to max_tokens tokens of each rank, or fewer within MAX_TOKENS and MAX_BYTES.

    A program has a slot of each rank for each of its tokens. num_sms: multiprocessors of each device.
    """
    row_bytes = -(-num_features * dtype.itemsize // 16) * 16
    programs = PROGRAMS_PER_SM * num_sms
    tokens = max(1, min(max_tokens, MAX_TOKENS // size, MAX_BYTES // (2 * row_bytes * size)))
    return BufferLayout(
        size=size,
        row_bytes=row_bytes,
        rows_per_program=size * -(-tokens // programs),
        num_programs=programs,
        has_parts=False,
        has_pushed=False,
    )


def map_token_memory(*, num_features: int, dtype: torch.dtype, max_tokens: int, device: torch.device) -> str:
    """Let tokens of the data group travel over symmetric memory. Every rank calls it, outside of a capture.

    num_features, dtype: of a token. max_tokens: of a rank's largest step. → a sentence, with the reason where NCCL moves all
    """
    from compile_and_serve.custom_ops.triton_common import num_sms

    global _mapped
    group = rank_group(DATA)
    layout = token_layout(group.size, num_features, dtype, max_tokens, num_sms(device))
    memory = map_symmetric_memory(group.rank, layout, group.process_group, device)
    if isinstance(memory, str):
        if group.rank == 0:
            log.warning("Tokens of data-parallel groups go over NCCL alone: %s.", memory)
        return f"over NCCL: {memory}"
    _mapped = _GroupMemory(group=group, memory=memory)
    how = f"over symmetric memory up to {layout.max_rows // group.size} tokens of each rank, then over NCCL"
    if group.rank == 0:
        log.info("Tokens of data-parallel groups go %s.", how)
    return how


def _memory_for(num_rows: int, row_bytes: int, axis: Axis) -> SymmetricMemory | None:
    """The memory, if rows of each rank fit into it."""
    if _mapped is None or _mapped.group is not rank_group(axis):
        return None
    from compile_and_serve.custom_ops.collectives.triton_tokens import fits  # Triton is imported where it is used

    return _mapped.memory if fits(num_rows, row_bytes, _mapped.memory) else None


def _gather_tokens(x_TD: torch.Tensor, size: int, group: Axis = DATA) -> torch.Tensor:
    return gather_parts(x_TD, rank_group(group)).flatten(0, 1)


def _gather_tokens_cuda(x_TD: torch.Tensor, size: int, group: Axis = DATA) -> torch.Tensor:
    memory = _memory_for(x_TD.shape[0], x_TD.shape[1] * x_TD.itemsize, group)
    if memory is None:
        return _gather_tokens(x_TD, size, group)
    from compile_and_serve.custom_ops.collectives.triton_tokens import gather_rows

    return gather_rows(x_TD, memory)


def _scatter_tokens_reference(x_N: Sequence[torch.Tensor], size: int, group: Axis = DATA) -> torch.Tensor:
    """For the verifier, whose groups have the same tokens: each gets what the first one gets."""
    return sum_of_parts([x.chunk(size)[0] for x in x_N])


def _scatter_tokens(x_PD: torch.Tensor, size: int, group: Axis = DATA) -> torch.Tensor:
    own = rank_group(group)
    parts_NND = gather_parts(x_PD.unflatten(0, (size, -1)), own)
    return sum_of_parts(parts_NND[:, own.rank].unbind(0))


def _scatter_tokens_cuda(x_PD: torch.Tensor, size: int, group: Axis = DATA) -> torch.Tensor:
    memory = _memory_for(x_PD.shape[0] // size, x_PD.shape[1] * x_PD.itemsize, group)
    if memory is not None:
        from compile_and_serve.custom_ops.collectives.triton_tokens import scatter_rows

        return scatter_rows(x_PD, memory)
    total_TD = x_PD.new_empty(x_PD.shape[0] // size, *x_PD.shape[1:])
    dist.reduce_scatter_tensor(total_TD, x_PD.contiguous(), group=rank_group(group).process_group)
    return total_TD


GATHER_TOKENS = define(
    "gather_tokens(Tensor x, int size, str group='data') -> Tensor",
    version=1,
    fake=lambda x, size, *_: x.new_empty(size * x.shape[0], *x.shape[1:]),
    across_ranks=lambda x_N, *_: torch.cat(x_N),
    CPU=_gather_tokens,
    CUDA=_gather_tokens_cuda,
)
SCATTER_TOKENS = define(
    "scatter_tokens(Tensor x, int size, str group='data') -> Tensor",
    version=1,
    fake=lambda x, size, *_: x.new_empty(x.shape[0] // size, *x.shape[1:]),
    across_ranks=_scatter_tokens_reference,
    CPU=_scatter_tokens,
    CUDA=_scatter_tokens_cuda,
)


def gather_tokens(x_TD: torch.Tensor, size: int, group: Axis = DATA) -> torch.Tensor:
    """The rows of all ranks of a group behind one another, in the order of ranks. Every rank has as many. size: N. [T, D] → [P, D]"""
    return GATHER_TOKENS(x_TD, size, group)


def scatter_tokens(x_PD: torch.Tensor, size: int, group: Axis = DATA) -> torch.Tensor:
    """Σ over the group's ranks of x, of which each rank gets its own rows: the inverse order of `gather_tokens`. [P, D] → [T, D]"""
    return SCATTER_TOKENS(x_PD, size, group)
