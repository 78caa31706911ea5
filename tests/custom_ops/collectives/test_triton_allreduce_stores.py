"""The two-shot kernel with stores, among the other kernels on the same slots, in random order, in Triton's interpreter: all give the bits
of one shot."""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

from compile_and_serve.custom_ops.collectives import triton_allreduce_stores
from compile_and_serve.custom_ops.collectives.symmetric_memory import EMPTY, MAX_BYTES, BufferLayout, SymmetricMemory, clear, layout_for
from compile_and_serve.custom_ops.collectives.triton_allreduce import (
    one_shot_allreduce_add_rms_norm,
    pushed_allreduce_add_rms_norm,
    takes_pushed,
    two_shot_allreduce_add_rms_norm,
)
from compile_and_serve.custom_ops.collectives.triton_allreduce_stores import two_shot_stores_allreduce_add_rms_norm
from compile_and_serve.custom_ops.triton_quantize import quantize_rows
from tests.support.symmetric_ranks import run_symmetric_ranks

KERNELS = {
    "one shot": one_shot_allreduce_add_rms_norm,
    "two shots": two_shot_allreduce_add_rms_norm,
    "by stores": two_shot_stores_allreduce_add_rms_norm,
    "by stores again": two_shot_stores_allreduce_add_rms_norm,
    "by stores quantized": two_shot_stores_allreduce_add_rms_norm,
    "pushed": pushed_allreduce_add_rms_norm,
}
PROBLEMS, EPS = 6, 1e-5
FIRST_COUNT = 2**31 - 20  # wraps around during the test
LONGEST_DELAY = 0.01  # seconds, of a rank that is sometimes late


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem that all ranks run with the kernels in this order. max_chunks, widest_pair: for two shots by stores."""

    seed: int
    rows: int
    features: int
    dtype: torch.dtype
    kernels: tuple[str, ...]
    max_chunks: int
    widest_pair: int


def layout(size: int) -> BufferLayout:
    return BufferLayout(size=size, row_bytes=40 * 4, rows_per_program=9, num_programs=2)


def problems(size: int, seed: int) -> list[Problem]:
    """Equal on all ranks: one row, fewer rows than ranks, the most rows that fit, and random numbers of rows."""
    chance, most = random.Random(seed), layout(size).max_rows
    rows = [1, size - 1, most, *(chance.randint(1, most) for _ in range(PROBLEMS - 3))]
    chance.shuffle(rows)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [
        Problem(
            seed=i,
            rows=count,
            features=chance.choice((1, 8, 24, 33, 40)),
            dtype=dtypes[i % 3],
            kernels=tuple(chance.sample(list(KERNELS), len(KERNELS))),
            max_chunks=chance.choice((1, 2, 8)),
            widest_pair=chance.choice((0, 4096)),
        )
        for i, count in enumerate(rows)
    ]


def operands(rank: int, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x differs between ranks; residual and weight are equal. Rows are strided."""
    shape, features = (problem.rows, problem.features + 3), problem.features
    shared = torch.Generator().manual_seed(1000 * problem.seed)
    residual, weight = torch.randn(shape, generator=shared)[:, :features], torch.randn(features, generator=shared)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * problem.seed + rank + 1))[:, :features]
    return x.to(problem.dtype), residual.to(problem.dtype), weight.to(problem.dtype)


def outputs(memory: SymmetricMemory, seed: int) -> list[dict[str, list[Any]]]:
    chance = random.Random(1000 * seed + memory.rank)
    results = []
    for problem in problems(memory.layout.size, seed):
        x, residual, weight = operands(memory.rank, problem)
        results.append({})
        with (
            mock.patch.object(triton_allreduce_stores, "MAX_CHUNKS", problem.max_chunks),
            mock.patch.object(triton_allreduce_stores, "WIDEST_PAIR", problem.widest_pair),
        ):
            for name in problem.kernels:
                if name == "pushed" and not takes_pushed(x, memory):
                    continue
                if chance.random() < 0.2:
                    time.sleep(chance.random() * LONGEST_DELAY)
                quantized = None
                if name == "by stores quantized":
                    quantized = (torch.full(x.shape, 7.0).to(torch.float8_e4m3fn), torch.full((len(x), 1), 7.0))
                made = KERNELS[name](x, residual, weight, EPS, memory, quantized)
                results[-1][name] = [tensor.float().numpy() for tensor in (*made, *(quantized or ()))]
    return results


def launches_told(memory: SymmetricMemory) -> None:
    """Only launches with stores: after each, all ranks have signalled the launch, as the other kernels require."""
    layout = memory.layout
    first = int(memory.addresses_N[memory.rank]) + layout.flags_offset
    flags = np.ctypeslib.as_array(ctypes.cast(first, ctypes.POINTER(ctypes.c_int32)), (layout.num_programs, layout.size))
    others = [rank for rank in range(layout.size) if rank != memory.rank]
    for problem in problems(layout.size, 0):
        two_shot_stores_allreduce_add_rms_norm(*operands(memory.rank, problem), EPS, memory)
        behind = flags[:, others] - memory.launches.numpy()[:, None]
        assert ((behind == 0) | (behind == 1)).all()  # 1: that rank is at its next launch already


@pytest.mark.parametrize("size", [2, 3, 8])
def test_parts_have_room_behind_what_the_other_kernels_use(size: int) -> None:
    """Room for all rows of a program that one rank may own, at most half the size of the two slots of each row."""
    made = layout_for(size, 4096, torch.bfloat16, 1 << 14, num_sms=132)
    assert made.owned_rows * size >= made.rows_per_program > (made.owned_rows - 1) * size
    assert made.num_bytes - made.parts_offset == made.num_programs * made.owned_rows * (size - 1) * made.row_bytes
    assert made.num_bytes - made.parts_offset <= MAX_BYTES // 2 + made.num_programs * size * made.row_bytes
    assert made.parts_offset % 16 == 0
    buffer = torch.empty(layout(size).num_bytes, dtype=torch.uint8)
    clear(buffer, layout(size))
    pushed = buffer[layout(size).pushed_offset : layout(size).parts_offset].view(torch.int16)
    assert (pushed == EMPTY).all()
    assert not buffer[layout(size).parts_offset :].any()


def test_other_kernels_are_told_of_launches_that_go_by_stores() -> None:
    run_symmetric_ranks(layout(2), launches_told, first_count=FIRST_COUNT)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["3-1"])
@pytest.mark.parametrize(("size", "seed"), [(3, 1), (4, 2)])
def test_all_kernels_by_turns_give_the_bits_of_one_shot(size: int, seed: int) -> None:
    by_rank = run_symmetric_ranks(layout(size), outputs, seed, first_count=FIRST_COUNT, seconds=200.0)
    for i, problem in enumerate(problems(size, seed)):
        total, normed = (torch.from_numpy(part) for part in by_rank[0][i]["one shot"])
        if problem.dtype == torch.float32:  # nothing hides the order of addition
            expected = operands(0, problem)[1]
            for rank in range(size):
                expected = expected + operands(rank, problem)[0]
            assert torch.equal(total, expected)
        quantized = [part.float() for part in quantize_rows(normed.to(problem.dtype), torch.float8_e4m3fn)]
        for rank in range(size):
            made = by_rank[rank][i]
            assert set(KERNELS) - {"pushed"} <= set(made)
            assert ("pushed" in made) == (problem.dtype != torch.float32 and problem.rows <= layout(size).max_pushed_rows)
            for name, parts in made.items():
                right = [total, normed, *(quantized if name == "by stores quantized" else ())]
                assert len(parts) == len(right)
                for what, ours, theirs in zip(("sum", "norm", "8 bits", "scale"), parts, right, strict=False):
                    assert torch.equal(torch.from_numpy(ours), theirs), f"{what} of {name} on rank {rank} of {problem}"
