"""The one-shot all-reduce in Triton's interpreter: ranks are processes, their buffers shared memory, flags and waiting as on GPUs."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.shared_memory import SharedMemory
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before the modules below are imported

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

from custom_ops.triton_allreduce import MAX_ROWS, buffer_bytes, one_shot_allreduce_add_rms_norm, peer_memory, takes

SIZE = 2
ROWS = (3, 1, 5, 2, 1, 4)  # rows count their launches each for itself: both places are used, in different order
FEATURES = (24, 33)


def operands(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x differs from rank to rank, residual and weight do not; rows are strided."""
    dtype = torch.bfloat16 if step % 2 else torch.float32
    rows, features = ROWS[step], FEATURES[step % 2]
    shared = torch.Generator().manual_seed(step)
    residual = torch.randn(rows, features + 3, generator=shared)[:, :features]
    weight = torch.randn(features, generator=shared)
    x = torch.randn(rows, features + 5, generator=torch.Generator().manual_seed(100 * step + rank + 1))[:, :features]
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def run_rank(rank: int, names: list[str], results: Any) -> None:
    shared = [SharedMemory(name) for name in names]
    views = [np.frombuffer(memory.buf, dtype=np.uint8) for memory in shared]
    peers = peer_memory(rank, [view.ctypes.data for view in views], torch.device("cpu"), owned=None)
    outs = [one_shot_allreduce_add_rms_norm(*operands(rank, step), 1e-5, peers) for step in range(len(ROWS))]
    results.put((rank, [(total.float().numpy(), normed.float().numpy()) for total, normed in outs]))
    del views
    for memory in shared:
        memory.close()


def test_ranks_sum_wait_and_normalize() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shared = [SharedMemory(create=True, size=buffer_bytes(SIZE)) for _ in range(SIZE)]  # zero at first
    names = [memory.name for memory in shared]
    processes = [context.Process(target=run_rank, args=(rank, names, results), daemon=True) for rank in range(SIZE)]
    try:
        for process in processes:
            process.start()
        by_rank = dict(results.get(timeout=240) for _ in range(SIZE))
    finally:
        for process in processes:
            process.kill()
            process.join()
        for memory in shared:
            memory.close()
            memory.unlink()
    for step in range(len(ROWS)):
        parts = [operands(rank, step) for rank in range(SIZE)]
        total = torch.stack([x.double() for x, _, _ in parts]).sum(0) + parts[0][1].double()
        normed = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * parts[0][2].double()
        limit = 2**-7 if step % 2 else 1e-5
        for rank in range(SIZE):
            ours, ours_normed = by_rank[rank][step]
            torch.testing.assert_close(torch.from_numpy(ours).double(), total, rtol=limit, atol=limit)
            torch.testing.assert_close(torch.from_numpy(ours_normed).double(), normed, rtol=2 * limit, atol=2 * limit)
            assert np.array_equal(ours, by_rank[0][step][0])
            assert np.array_equal(ours_normed, by_rank[0][step][1])


def test_large_messages_are_left_to_the_library() -> None:
    assert takes(torch.empty(MAX_ROWS, 8192, dtype=torch.bfloat16))
    assert not takes(torch.empty(MAX_ROWS + 1, 8192, dtype=torch.bfloat16))
    assert not takes(torch.empty(1, 16385, dtype=torch.bfloat16))
