"""Weight functions that select a rank's share of a weight along the tensor axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import (
    ALONG_DIMENSION,
    COLUMNS,
    EXPERT_COLUMNS,
    EXPERT_ROWS,
    ON_FIRST_RANK,
    ROWS,
    SHARE_OF_PARTS,
    UNGATED_EXPERT_ROWS,
)
from compile_and_serve.custom_ops.mesh import TENSOR
from compile_and_serve.custom_ops.weight_functions import weight_function


@weight_function(ROWS, axis=TENSOR, selects="rows")
def shard_rows(weight: torch.Tensor, parts: int, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part of `parts` equal parts along dimension 0. size / parts consecutive ranks have the same part.

    If `parts` does not divide the rows, the last parts are padded with zeros. [O, …] → [ceil(O / parts), …]
    """
    rows, part = -(-weight.shape[0] // parts), rank * parts // size
    shard = weight[part * rows : (part + 1) * rows]
    missing = rows - shard.shape[0]
    return F.pad(shard, (0, 0) * (weight.dim() - 1) + (0, missing)) if missing else shard


@weight_function(COLUMNS, axis=TENSOR, selects="columns")
def shard_columns(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part along dimension 1. [O, I] → [O, I / size]"""
    columns = weight.shape[1] // size
    return weight[:, rank * columns : (rank + 1) * columns]


@weight_function(SHARE_OF_PARTS, axis=TENSOR, selects="rows")
def shard_parts(weight: torch.Tensor, size: int, *parts: int, rank: int) -> torch.Tensor:
    """A rank's share of each part of the rows, behind one another. parts: of each, its length and its number of different shares.

    The lengths may be in units of several rows, or of a part of one, as scales of blocks have them.
    """
    lengths, shares = parts[::2], parts[1::2]
    total, taken, begin = sum(lengths), [], 0
    for length, count in zip(lengths, shares, strict=True):
        rows, remainder = divmod(length * weight.shape[0], total * count)
        if remainder:
            raise ValueError(f"{weight.shape[0]} rows cannot be shared in parts of {lengths} by {count} ranks")
        taken.append(weight.narrow(0, begin + rank * count // size * rows, rows))
        begin += rows * count
    return torch.cat(taken)


@weight_function(EXPERT_ROWS, axis=TENSOR, selects="rows")
def shard_expert_rows(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's gate and up: [X, 2F, …] → [X, 2F / size, …]"""
    halves = weight.unflatten(1, (2, -1))
    rows = halves.shape[2] // size
    return halves[:, :, rank * rows : (rank + 1) * rows].flatten(1, 2)


@weight_function(UNGATED_EXPERT_ROWS, axis=TENSOR, selects="rows")
def shard_ungated_expert_rows(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's up, which has no gate: [X, F, …] → [X, F / size, …]"""
    rows = weight.shape[1] // size
    return weight[:, rank * rows : (rank + 1) * rows]


@weight_function(EXPERT_COLUMNS, axis=TENSOR, selects="columns")
def shard_expert_columns(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """A rank's features of every expert's down: [X, D, F] → [X, D, F / size]"""
    columns = weight.shape[2] // size
    return weight[:, :, rank * columns : (rank + 1) * columns]


@weight_function(ALONG_DIMENSION, axis=TENSOR)
def shard_along_dimension(weight: torch.Tensor, dimension: int, parts: int, size: int, *, rank: int) -> torch.Tensor:
    """A rank's part of `parts` equal parts along a dimension of a parameter that no linear reads. size / parts consecutive ranks have the
    same part.
    """
    length = weight.shape[dimension] // parts
    return weight.narrow(dimension, rank * parts // size * length, length)


@weight_function("first_row", axis=TENSOR)
def first_row(weight: torch.Tensor, size: int, *, rank: int) -> torch.Tensor:
    """The first row of a rank's part of `shard_rows(weight, size, size)`. → int64 [1]"""
    return torch.full((1,), rank * -(-weight.shape[0] // size), dtype=torch.int64, device=weight.device)


@weight_function(ON_FIRST_RANK, axis=TENSOR)
def on_first_rank(bias: torch.Tensor, *, rank: int) -> torch.Tensor:
    """The bias on rank 0, zeros on other ranks, so that the sum over ranks is the bias."""
    return bias if rank == 0 else torch.zeros_like(bias)
