"""Which kernel an all-reduce uses: the bounds follow the measured times, and kept times are used again."""

from __future__ import annotations

import math
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from compile_and_serve.custom_ops.collectives import allreduce_choice
from compile_and_serve.custom_ops.collectives.allreduce_choice import (
    NCCL,
    ONE_SHOT,
    PUSHED,
    TWO_SHOT,
    TWO_SHOT_STORES,
    AllreduceChoice,
    best_choice,
    choose_allreduce,
    fused_allreduce,
)
from compile_and_serve.custom_ops.collectives.collectives import rank_group
from compile_and_serve.custom_ops.collectives.symmetric_memory import (
    BufferLayout,
    SymmetricMemory,
    layout_for,
    map_symmetric_memory,
    symmetric_memory,
)
from compile_and_serve.custom_ops.tuning.store import stored_files
from compile_and_serve.custom_ops.tuning.tuner import Measurement, Tuner
from tests.support.ranks import run_ranks

SIZES = (1, 16, 64, 256)


@pytest.mark.parametrize(
    ("one_shot", "two_shot", "bounds"),
    [
        ([1, 1, 9, 9], [9, 9, 1, 9], (16, 64)),
        ([1, 1, 1, 1], [9, 9, 9, 9], (256, 256)),
        ([9, 9, 9, 9], [9, 9, 9, 9], (0, 0)),
        ([9, 9, 9, 9], [1, 1, 1, 9], (0, 64)),
        ([1, 6, 1, 9], [9, 9, 9, 9], (64, 64)),  # one slow measurement between fast ones
        ([1, 1, 9, 9], None, (16, 16)),
        (None, None, (0, 0)),
    ],
)
def test_bounds_take_the_least_time_over_all_sizes(
    one_shot: list[float] | None, two_shot: list[float] | None, bounds: tuple[int, int]
) -> None:
    seconds = {NCCL: [5.0] * 4} | {w: s for w, s in ((ONE_SHOT, one_shot), (TWO_SHOT, two_shot)) if s is not None}
    choice = best_choice(seconds, SIZES)
    assert choice.pushed_rows == 0
    assert [choice.kernel(n) for n in SIZES] == [ONE_SHOT if n <= bounds[0] else TWO_SHOT if n <= bounds[1] else NCCL for n in SIZES]


def test_a_kernel_is_not_chosen_for_a_size_that_it_does_not_take() -> None:
    inf = float("inf")
    seconds = {NCCL: [5.0] * 4, PUSHED: [1, 1, inf, inf], ONE_SHOT: [2, 2, 2, 9.0], TWO_SHOT: [3, 3, 3, 3.0]}
    choice = best_choice(seconds, SIZES)
    assert [choice.kernel(n) for n in SIZES] == [PUSHED, PUSHED, ONE_SHOT, TWO_SHOT]
    assert choice.sentence() == ("pushed up to 16 rows, in one shot up to 64 rows, in two shots up to 256 rows, then over NCCL")
    del seconds[PUSHED]
    assert [best_choice(seconds, SIZES).kernel(n) for n in SIZES] == [ONE_SHOT, ONE_SHOT, ONE_SHOT, TWO_SHOT]


def test_two_shots_by_stores_go_where_they_are_faster_than_two_by_loads() -> None:
    inf = float("inf")
    seconds = {NCCL: [9.0] * 4, PUSHED: [1, inf, inf, inf], ONE_SHOT: [2, 2, 6, 6.0], TWO_SHOT: [3, 3, 3, 5.0]}
    seconds[TWO_SHOT_STORES] = [4, 4, 4, 4.0]
    choice = best_choice(seconds, SIZES)
    assert choice == AllreduceChoice(pushed_rows=1, one_shot_rows=16, two_shot_rows=64, two_shot_stores_rows=256)
    assert [choice.kernel(n) for n in (*SIZES, 257)] == [PUSHED, ONE_SHOT, TWO_SHOT, TWO_SHOT_STORES, NCCL]
    assert choice.sentence() == (
        "pushed up to 1 rows, in one shot up to 16 rows, in two shots up to 64 rows, in two shots by stores up to 256 rows, then over NCCL"
    )
    seconds[TWO_SHOT_STORES] = [1, 1, 1, 1.0]
    choice = best_choice(seconds, SIZES)
    assert {choice.kernel(n) for n in SIZES[1:]} == {TWO_SHOT_STORES}
    del seconds[TWO_SHOT_STORES]  # which gave other sums than NCCL
    assert [best_choice(seconds, SIZES).kernel(n) for n in SIZES] == [PUSHED, ONE_SHOT, TWO_SHOT, TWO_SHOT]


def test_two_shots_by_stores_take_memory_only_where_they_may_be_chosen() -> None:
    options = (2, 4096, torch.bfloat16, 1 << 14, 132)
    assert layout_for(*options, has_parts=False).num_bytes < layout_for(*options).num_bytes * 0.85
    assert layout_for(*options, has_parts=False).max_rows == layout_for(*options).max_rows


def test_sizes_between_the_measured_ones_go_by_the_bounds() -> None:
    choice = AllreduceChoice(one_shot_rows=16, two_shot_rows=64)
    assert [choice.kernel(n) for n in (1, 16, 17, 64, 65)] == [ONE_SHOT, ONE_SHOT, TWO_SHOT, TWO_SHOT, NCCL]
    assert choice.sentence() == "in one shot up to 16 rows, in two shots up to 64 rows, then over NCCL"
    assert AllreduceChoice(one_shot_rows=0, two_shot_rows=8).sentence() == "in two shots up to 8 rows, then over NCCL"
    assert AllreduceChoice(one_shot_rows=0, two_shot_rows=0).sentence() == "over NCCL"


def choose(rank: int, folder: Path) -> tuple[list[str], tuple[AllreduceChoice, AllreduceChoice], int]:
    """Starts of two ranks that measure the same, as they do after they have told each other; their stores differ."""
    asked = 0

    def measured(group: object, memory: SymmetricMemory, *rest: object) -> Measurement:
        nonlocal asked
        asked += 1
        sizes = [size for size in allreduce_choice.SIZES if size <= memory.layout.max_rows]
        largest = 16 if rest[-1] else 64  # quantized
        return Measurement(seconds={NCCL: [2.0] * len(sizes), ONE_SHOT: [1.0 if s <= largest else math.inf for s in sizes]})

    def mapped(rank: int, layout: BufferLayout, group: object, device: torch.device) -> SymmetricMemory:
        return symmetric_memory(rank, layout, [0, 0], device, owned=None)

    with mock.patch.object(allreduce_choice, "_measured", measured), mock.patch.object(allreduce_choice, "map_symmetric_memory", mapped):
        said = [
            choose_allreduce(
                num_features=features,
                dtype=torch.bfloat16,
                max_rows=300,
                device=torch.device("cpu"),
                tuner=Tuner("a device", [folder / f"store-of-rank-{rank}"]),
                quantizes=quantizes,
            )
            for features, quantizes in ((64, False), (64, False), (128, False), (64, True), (64, True))
        ]
    fused = fused_allreduce()
    assert fused is not None
    return said, (fused.choice, fused.quantized_choice), asked


def test_what_rank_0_kept_holds_for_all(tmp_path: Path) -> None:
    by_rank = run_ranks(2, choose, tmp_path, folder=tmp_path)
    said, (choice, quantized_choice), asked = by_rank[0]
    assert by_rank[1] == by_rank[0]
    assert said[0] == said[2] == "in one shot up to 64 rows, then over NCCL"
    assert said[1] == f"{said[0]}, as measured at an earlier start"
    float8 = "; with the norm quantized to float8 in one shot up to 16 rows, then over NCCL"
    assert said[3] == said[0] + float8
    assert said[4] == f"{said[3]}, as measured at an earlier start"
    assert asked == 3
    assert choice == AllreduceChoice(one_shot_rows=64, two_shot_rows=64, two_shot_stores_rows=64)
    assert quantized_choice == AllreduceChoice(one_shot_rows=16, two_shot_rows=16, two_shot_stores_rows=16)
    [file] = stored_files(tmp_path / "store-of-rank-0")
    assert (file.kind, file.device, file.num_problems, file.is_current) == ("allreduce", "a device", 3, True)
    assert not (tmp_path / "store-of-rank-1").exists()


def map_without_cuda(rank: int) -> SymmetricMemory | str:
    """As on GPUs that have no access to each other: torch raises where a buffer is made."""
    layout = BufferLayout(size=2, row_bytes=16, rows_per_program=1, num_programs=128)
    return map_symmetric_memory(rank, layout, rank_group().process_group, torch.device("cpu"))


def test_memory_that_cannot_be_mapped_is_a_sentence_on_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(2, map_without_cuda, folder=tmp_path)
    assert isinstance(said[0], str)
    assert said[0].startswith("rank 0: ")
    assert said[1] == said[0]


def map_from_a_long_folder(rank: int) -> SymmetricMemory | str:
    os.environ["TMPDIR"] = "/tmp/" + "x" * (100 if rank == 1 else 1)
    return map_without_cuda(rank)


def test_a_folder_too_long_for_a_socket_is_found_before_anybody_waits(tmp_path: Path) -> None:
    said = run_ranks(2, map_from_a_long_folder, folder=tmp_path)
    assert said == 2 * ["the path of TMPDIR is longer than 80 bytes: no socket for sharing memory fits there"]
