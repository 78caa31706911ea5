"""`Mesh`: the ranks of one engine, laid out along named axes.

A rank's number counts along `data`, `pipe` and `tensor`, the last innermost, so that the ranks that talk most are neighbours. The axis
`expert` runs over the ranks of `data` and `tensor` together: with expert parallelism, all ranks of a stage have different experts.
What is divided over ranks names its axis and asks the mesh; nothing takes a bare number of ranks. Along an axis of size 1 there is nothing
to divide: no group is formed and no op inserted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Axis = Literal["data", "pipe", "expert", "tensor"]
# Requests; layers, one stage of them after another; experts; each layer's weights and heads.
DATA: Axis = "data"
PIPE: Axis = "pipe"
EXPERT: Axis = "expert"
TENSOR: Axis = "tensor"
AXES: tuple[Axis, ...] = get_args(Axis)
NUMBERED_AXES: tuple[Axis, ...] = (DATA, PIPE, TENSOR)  # which number the ranks, the outermost first

Coordinates = Mapping[Axis, int]  # where a rank lies along the axes; 0 along one that is not given
Partition = Sequence[Sequence[int]]  # of all ranks: the ranks of each group of one name, ascending


class AlongAxis(NamedTuple):
    """How a module's weight is sharded along an axis other than `tensor`, for example `AlongAxis("rowwise", DATA)`."""

    style: str
    axis: Axis


class ColwisePart(NamedTuple):
    """Rows of a weight that lie behind one another: how many, and in how many units, such as heads, ranks share them.

    shared_by_ranks: several ranks may have the same unit, if there are fewer units than ranks.
    """

    rows: int
    units: int
    shared_by_ranks: bool = False


class ColwiseParts(NamedTuple):
    """How a linear is sharded over the tensor axis that computes several things at once: each part by its outputs."""

    parts: tuple[ColwisePart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """Sizes of the axes that number the ranks, each at least 1. expert_parallel: the ranks of a stage have different experts."""

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    expert_parallel: bool = False

    def of_axis(self, axis: Axis) -> int:
        """The size of an axis."""
        experts = self.data * self.tensor if self.expert_parallel else 1
        sizes: dict[Axis, int] = {DATA: self.data, PIPE: self.pipe, EXPERT: experts, TENSOR: self.tensor}
        return sizes[axis]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipe * self.tensor

    @property
    def divided_axes(self) -> tuple[Axis, ...]:
        """The axes of more than one rank."""
        return tuple(axis for axis in AXES if self.of_axis(axis) > 1)

    @property
    def answering_rank(self) -> int:
        """The rank that samples for all and answers: the first one of the last stage, of the first data group."""
        return self.rank_at({PIPE: self.pipe - 1})

    @property
    def answering_ranks(self) -> tuple[int, ...]:
        """The rank of each data group that samples for the group and answers."""
        return tuple([self.rank_at({DATA: group, PIPE: self.pipe - 1}) for group in range(self.data)])

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where a rank lies along each axis."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        found: dict[Axis, int] = {}
        for axis in reversed(NUMBERED_AXES):
            rank, found[axis] = divmod(rank, self.of_axis(axis))
        found[EXPERT] = found[DATA] * self.tensor + found[TENSOR] if self.expert_parallel else 0
        return found

    def rank_at(self, coordinates: Coordinates) -> int:
        """The rank that lies there along `NUMBERED_AXES`."""
        rank = 0
        for axis in NUMBERED_AXES:
            rank = rank * self.of_axis(axis) + coordinates.get(axis, 0)
        return rank

    def groups(self, axis: Axis) -> Partition:
        """The ranks that differ along this axis alone, group by group; along `expert`, the ranks of each stage."""
        if self.of_axis(axis) == 1:
            return [[rank] for rank in range(self.size)]
        along: tuple[Axis, ...] = (DATA, TENSOR) if axis == EXPERT else (axis,)
        by_others: dict[int, list[int]] = {}
        for rank in range(self.size):
            by_others.setdefault(self.rank_at({**self.coordinates(rank), **dict.fromkeys(along, 0)}), []).append(rank)
        return list(by_others.values())


SINGLE_RANK = Mesh()
ORIGIN: Coordinates = {}  # of rank 0
