"""The all-reduces over symmetric memory in Triton's interpreter. Ranks are processes with shared-memory buffers and wait as on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

from compile_and_serve.custom_ops.collectives.symmetric_memory import (
    MAX_BYTES,
    PROGRAMS_PER_SM,
    BufferLayout,
    SymmetricMemory,
    layout_for,
    symmetric_memory,
)
from compile_and_serve.custom_ops.collectives.triton_allreduce import (
    one_shot_allreduce_add_rms_norm,
    pushed_allreduce_add_rms_norm,
    takes,
    takes_pushed,
    two_shot_allreduce_add_rms_norm,
)
from compile_and_serve.custom_ops.collectives.triton_allreduce_stores import two_shot_stores_allreduce_add_rms_norm
from compile_and_serve.custom_ops.quantization import quantize_activations
from compile_and_serve.custom_ops.triton_quantize import quantize_rows
from tests.support.symmetric_ranks import run_symmetric_ranks

KERNELS = (one_shot_allreduce_add_rms_norm, two_shot_allreduce_add_rms_norm, two_shot_stores_allreduce_add_rms_norm)
# All kernels take turns, with more and with fewer rows than programs: each program has its own count, and all slots are used.
ROWS = (3, 1, 8, 7, 7, 3, 0, 2)
FEATURES = (24, 24, 33, 33, 33, 33, 24, 24)
PUSHES = 4  # of each message that can be pushed: those of 16 bits, at odd steps
NAN_STEPS = (4, 5)
# Counts are about to wrap around, which must not matter.
FIRST_LAUNCH = 2**31 - 3


def kernel_of(step: int) -> int:
    """The first kernel of a step. Each kernel comes first in steps of both dtypes."""
    return step // 2 % len(KERNELS)


def quantizes(launch: int) -> bool:
    """Every other launch of a step. Each kernel quantizes in some step."""
    return launch % 2 == 1


def operands(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x differs between ranks; residual and weight are equal. Rows are strided."""
    dtype = torch.bfloat16 if step % 2 else torch.float32
    rows, features = ROWS[step], FEATURES[step]
    shared = torch.Generator().manual_seed(step)
    residual = torch.randn(rows, features + 3, generator=shared)[:, :features]
    weight = torch.randn(features, generator=shared)
    x = torch.randn(rows, features + 5, generator=torch.Generator().manual_seed(100 * step + rank + 1))[:, :features]
    if step in NAN_STEPS and rank == 1:
        x[2, 5], x[1, 6] = float("nan"), float("inf")
    residual[:1, :3] = -0.0
    if rank == 0:
        x[:1, :7] = -0.0  # which is sent as 0.0
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def layout(size: int) -> BufferLayout:
    return BufferLayout(size=size, row_bytes=33 * 4 + 12, rows_per_program=3, num_programs=5)


def arrays_of(kernel: Any, rank: int, step: int, memory: Any, *, quantize: bool) -> list[Any]:
    """One launch: the sum and the norm; with `quantize` also the quantized norm and its scales."""
    x, residual, weight = operands(rank, step)
    # The buffers are not zero, so a value that is not written shows.
    quantized = (torch.full(x.shape, 7.0).to(torch.float8_e4m3fn), torch.full((len(x), 1), 7.0)) if quantize else None
    result = kernel(x, residual, weight, 1e-5, memory, quantized)
    return [part.float().numpy() for part in (*result, *(quantized or ()))]


def outputs(memory: SymmetricMemory) -> list[Any]:
    rank, by_step = memory.rank, []
    for step in range(len(ROWS)):
        outs = []
        for other in range(len(KERNELS)):  # the same work with the other kernels too: the same bits
            kernel = KERNELS[(kernel_of(step) + other) % len(KERNELS)]
            outs.append(arrays_of(kernel, rank, step, memory, quantize=quantizes(len(outs))))
        if step % 2:
            assert takes_pushed(operands(rank, step)[0], memory)
            for _ in range(PUSHES):
                outs.append(arrays_of(pushed_allreduce_add_rms_norm, rank, step, memory, quantize=quantizes(len(outs))))
        by_step.append(outs)
    return by_step


def differing_bits(ours: Any, theirs: Any) -> list[tuple[Any, str, str]]:
    """The indices and bits that differ. The sign and payload of a NaN are ignored."""
    both = [np.where(np.isnan(values), np.float32("nan"), values).view(np.uint32) for values in (ours, theirs)]
    return [(index, hex(both[0][tuple(index)]), hex(both[1][tuple(index)])) for index in np.argwhere(both[0] != both[1])]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def by_rank(request: pytest.FixtureRequest) -> list[list[Any]]:
    return run_symmetric_ranks(layout(request.param), outputs, first_count=FIRST_LAUNCH)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["3"])
def test_ranks_sum_wait_and_normalize(by_rank: list[list[Any]]) -> None:
    size = len(by_rank)
    for step in range(len(ROWS)):
        parts = [operands(rank, step) for rank in range(size)]
        total = torch.stack([x.double() for x, _, _ in parts]).sum(0) + parts[0][1].double()
        normed = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * parts[0][2].double()
        limit = 2**-7 if step % 2 else 1e-5
        assert total.isnan().any() == (step in NAN_STEPS)
        expected, first = {"total": total, "normed": normed}, by_rank[0][step]
        assert len(first) == len(KERNELS) + (step % 2) * PUSHES
        for rank in range(size):
            for number, (ours, of_rank_0) in enumerate(zip(by_rank[rank][step], first, strict=True)):
                for name, value, theirs, same in zip(("total", "normed"), ours[:2], of_rank_0[:2], first[0], strict=True):
                    where = f"{name} of launch {number} of step {step} on rank {rank}"
                    assert differing_bits(value, theirs) == [], f"{where} differs from rank 0's"
                    assert np.array_equal(value, same, equal_nan=True), f"{where} differs from launch 0's"
                    torch.testing.assert_close(
                        torch.from_numpy(value).double(), expected[name], rtol=2 * limit, atol=2 * limit, equal_nan=True
                    )


def test_the_norm_is_quantized_to_float8(by_rank: list[list[Any]]) -> None:
    """Bit-identical to a separate quantization of the norm, also in rows with NaN."""
    for step in range(len(ROWS)):
        for rank, of_rank in enumerate(by_rank):
            for number, (_, normed, *quantized) in enumerate(of_rank[step]):
                assert len(quantized) == 2 * quantizes(number)
                if not quantized:
                    continue
                normed_TD = torch.from_numpy(normed).to(operands(rank, step)[0].dtype)
                values_TD, scale_T1 = quantize_rows(normed_TD, torch.float8_e4m3fn)
                where = f"launch {number} of step {step} on rank {rank}"
                assert differing_bits(quantized[0], values_TD.float().numpy()) == [], where
                for scale in (scale_T1, quantize_activations(normed_TD, torch.float8_e4m3fn)[1]):
                    assert differing_bits(quantized[1], scale.numpy()) == [], where


def test_the_order_of_addition_is_that_of_ranks(by_rank: list[list[Any]]) -> None:
    """In float32, starting from the residual, so that all ranks and kernels round alike."""
    for step in range(0, len(ROWS), 2):  # float32: nothing hides the order
        total = operands(0, step)[1]
        for rank in range(len(by_rank)):
            total = total + operands(rank, step)[0]
        for of_rank in by_rank:
            assert np.array_equal(of_rank[step][0][0], total.numpy(), equal_nan=True)


def test_only_what_there_is_room_for_is_taken() -> None:
    made = layout_for(2, 8192, torch.bfloat16, 300, num_sms=50)
    assert made.num_programs == 50 * PROGRAMS_PER_SM
    memory = symmetric_memory(0, made, [0, 0], torch.device("cpu"), owned=None)
    assert takes(torch.empty(made.max_rows, 8192, dtype=torch.bfloat16), memory)
    assert not takes(torch.empty(made.max_rows + 1, 8192, dtype=torch.bfloat16), memory)
    assert not takes(torch.empty(1, 8200, dtype=torch.bfloat16), memory)
    assert takes_pushed(torch.empty(made.max_pushed_rows, 8192, dtype=torch.float16), memory)
    assert not takes_pushed(torch.empty(made.max_pushed_rows + 1, 8192, dtype=torch.float16), memory)
    assert not takes_pushed(torch.empty(1, 64), memory)


@pytest.mark.parametrize("features", [1, 33, 4096, 16384])
def test_rows_begin_where_wide_loads_may_and_a_buffer_has_a_limit(features: int) -> None:
    made = layout_for(8, features, torch.bfloat16, 1 << 20, num_sms=132)
    assert made.row_bytes % 16 == 0
    assert made.row_bytes >= 2 * features
    assert made.flags_offset < MAX_BYTES + 2 * made.num_programs * made.row_bytes
    assert layout_for(8, features, torch.bfloat16, 1 << 12, num_sms=132).max_rows >= 1 << 12
