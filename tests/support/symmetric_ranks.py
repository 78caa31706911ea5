"""Ranks as processes whose symmetric memory is shared memory. Kernels run in Triton's interpreter and wait as on GPUs."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.collectives.symmetric_memory import FLAG_KINDS, BufferLayout, clear, symmetric_memory
from tests.support.forkserver import forkserver
from tests.support.triton_interpreter import make_interpreter_quicker


def run_symmetric_ranks(layout: BufferLayout, work: Callable[..., Any], *args: Any, first_count: int, seconds: float = 300.0) -> list[Any]:
    """Run `work(memory, *args)` in one process per rank, with launch and step counts starting at first_count. → results by rank

    work: a module-level function. Raises with a rank's traceback if it fails, and if a rank takes longer than `seconds`.
    """
    context = forkserver()
    results = context.Queue()
    shared = [SharedMemory(create=True, size=layout.num_bytes) for _ in range(layout.size)]
    for memory in shared:
        clear(torch.frombuffer(memory.buf, dtype=torch.uint8)[: layout.num_bytes], layout)
        flags = np.frombuffer(memory.buf, dtype=np.int32, offset=layout.flags_offset)
        flags[: FLAG_KINDS * layout.num_programs * layout.size] = first_count
        del flags
    names = [memory.name for memory in shared]
    processes = [
        context.Process(target=_run, args=(rank, layout, names, first_count, work, args, results), daemon=True)
        for rank in range(layout.size)
    ]
    try:
        for process in processes:
            process.start()
        by_rank = {}
        for _ in processes:
            rank, result, error = results.get(timeout=seconds)
            assert error is None, f"rank {rank} failed:\n{error}"
            by_rank[rank] = result
        return [by_rank[rank] for rank in range(layout.size)]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for memory in shared:
            memory.close()
            memory.unlink()


def _run(
    rank: int, layout: BufferLayout, names: list[str], first_count: int, work: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    try:
        torch.set_num_threads(1)
        make_interpreter_quicker()
        shared = [SharedMemory(name) for name in names]
        addresses = [np.frombuffer(memory.buf, dtype=np.uint8).ctypes.data for memory in shared]
        memory = symmetric_memory(rank, layout, addresses, torch.device("cpu"), owned=None)
        memory.launches.fill_(first_count)
        memory.steps.fill_(first_count)
        results.put((rank, work(memory, *args), None))
        for memory in shared:
            memory.close()
    except Exception:
        results.put((rank, None, traceback.format_exc()))
