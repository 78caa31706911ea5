"""Where ranks lie in a mesh, and which of them form groups."""

from __future__ import annotations

import pytest

from compile_and_serve.custom_ops.mesh import AXES, DATA, EXPERT, NUMBERED_AXES, PIPE, SINGLE_RANK, TENSOR, Mesh

MESHES = [SINGLE_RANK, Mesh(tensor=4), Mesh(pipe=2, tensor=2), Mesh(data=2, pipe=3, tensor=2, expert_parallel=True)]


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_and_coordinates_name_each_other(mesh: Mesh) -> None:
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank_at(one) for one in coordinates] == list(range(mesh.size))
    assert len({tuple(one.values()) for one in coordinates}) == mesh.size
    for axis in AXES:
        assert {one[axis] for one in coordinates} == set(range(mesh.of_axis(axis)))


@pytest.mark.parametrize("mesh", MESHES)
def test_groups_divide_the_ranks_along_one_axis(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for members in groups for rank in members) == list(range(mesh.size))
        for members in groups:
            assert [mesh.coordinates(rank)[axis] for rank in members] == list(range(mesh.of_axis(axis)))
            along = (DATA, TENSOR, EXPERT) if axis == EXPERT else (axis, EXPERT)
            others = [{other: at for other, at in mesh.coordinates(rank).items() if other not in along} for rank in members]
            assert all(one == others[0] for one in others)
    assert set(NUMBERED_AXES) | {EXPERT} == set(AXES)
    assert mesh.divided_axes == tuple(axis for axis in AXES if len(mesh.groups(axis)[0]) > 1)


def test_tensor_ranks_are_neighbours_and_the_last_stage_answers() -> None:
    mesh = Mesh(pipe=2, tensor=2)
    assert mesh.groups(TENSOR) == [[0, 1], [2, 3]]
    assert mesh.groups(PIPE) == [[0, 2], [1, 3]]
    assert mesh.groups(DATA) == mesh.groups(EXPERT) == [[0], [1], [2], [3]]
    assert mesh.answering_rank == 2
    assert Mesh(tensor=4).answering_rank == SINGLE_RANK.answering_rank == 0


def test_experts_are_divided_over_all_ranks_of_a_stage() -> None:
    mesh = Mesh(data=2, pipe=2, tensor=2, expert_parallel=True)
    assert mesh.groups(EXPERT) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh.groups(DATA) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert Mesh(pipe=2, expert_parallel=True).divided_axes == (PIPE,)


def test_a_rank_outside_of_the_mesh_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="rank 4 of 4"):
        Mesh(tensor=4).coordinates(4)
