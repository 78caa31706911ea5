"""Tokens over symmetric memory in Triton's interpreter. Ranks are processes with shared-memory buffers and wait as on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it", allow_module_level=True)

from compile_and_serve.custom_ops.collectives.symmetric_memory import MAX_BYTES, BufferLayout, SymmetricMemory
from compile_and_serve.custom_ops.collectives.tokens import token_layout
from compile_and_serve.custom_ops.collectives.triton_tokens import fits, gather_rows, scatter_rows
from tests.support.symmetric_ranks import run_symmetric_ranks

# More and fewer rows than programs: each program has its own count of launches, and both slots are used again and again.
ROWS, FEATURES = (3, 1, 7, 7, 3, 1), 24
FIRST_LAUNCH = 2**31 - 3  # counts are about to wrap around, which must not matter


def layout(size: int) -> BufferLayout:
    return BufferLayout(size=size, row_bytes=FEATURES * 4, rows_per_program=2 * size, num_programs=5, has_parts=False, has_pushed=False)


def operands(rank: int, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's own tokens, the weights of their experts, and its results for the tokens of all ranks."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    own, weights = torch.randn(ROWS[step], FEATURES, generator=draw), torch.randn(ROWS[step], 8, generator=draw)
    results = torch.randn(size * ROWS[step], FEATURES, generator=draw)
    return own.bfloat16(), weights, results.to(torch.bfloat16 if step % 2 else torch.float32)


def outputs(memory: SymmetricMemory) -> list[Any]:
    found = []
    for step in range(len(ROWS)):
        own, weights, results = operands(memory.rank, memory.layout.size, step)
        outs = (gather_rows(own, memory), gather_rows(weights, memory), scatter_rows(results, memory))
        found.append([out.float().numpy() for out in outs])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_tokens_come_to_all_ranks_and_sums_go_back(size: int) -> None:
    by_rank = run_symmetric_ranks(layout(size), outputs, first_count=FIRST_LAUNCH)
    for step, rows in enumerate(ROWS):
        parts = [operands(rank, size, step) for rank in range(size)]
        for rank, results in enumerate(by_rank):
            own, weights, added = (torch.from_numpy(out) for out in results[step])
            assert torch.equal(own, torch.cat([one.float() for one, _, _ in parts]))
            assert torch.equal(weights, torch.cat([one for _, one, _ in parts]))
            total = torch.zeros(rows, FEATURES)
            for _, _, one in parts:
                total += one[rank * rows : (rank + 1) * rows].float()
            limit = 2**-7 if step % 2 else 0.0  # the interpreter cuts bfloat16 off where a GPU rounds
            torch.testing.assert_close(added, total, rtol=limit, atol=0.0)


def memory_of(layout: BufferLayout) -> SymmetricMemory:
    return SymmetricMemory(
        rank=0, layout=layout, owned=None, **dict.fromkeys(("addresses_N", "launches", "turns", "steps"), torch.empty(0))
    )


def test_rows_fit_that_the_buffers_hold() -> None:
    memory, row = memory_of(layout(2)), FEATURES * 4
    assert fits(10, row, memory)  # two slots of each of 5 programs for each of 2 ranks
    assert fits(10, 8, memory)
    assert not fits(11, row, memory)
    assert not fits(0, row, memory)
    assert not fits(1, row + 4, memory)
    assert not fits(1, 6, memory)


@pytest.mark.parametrize(("size", "max_tokens"), [(2, 32), (4, 60), (4, 300), (3, 2500), (8, 200), (4, 2048)])
def test_a_layout_holds_the_steps_that_it_is_for(size: int, max_tokens: int) -> None:
    made = token_layout(size, 2048, torch.bfloat16, max_tokens, 132)
    assert fits(max_tokens, 4096, memory_of(made))
    assert fits(made.max_rows // size, 4096, memory_of(made))
    assert not fits(made.max_rows // size + 1, 4096, memory_of(made))
    assert made.max_rows <= 8192 + size * made.num_programs
    assert made.num_bytes < 2 * made.max_rows * 4096 + 100_000


def test_a_layout_keeps_within_its_bytes() -> None:
    made = token_layout(8, 16384, torch.bfloat16, 16384, 132)
    assert made.max_rows * made.row_bytes * 2 <= MAX_BYTES + 2 * 8 * made.num_programs * made.row_bytes
