"""Processes that are the ranks of a tensor-parallel group, for tests: on the CPU over gloo, or one on each GPU."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from compile_and_serve.custom_ops.collectives.collectives import join_groups, leave_groups
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.runtime.child_process import one_device
from compile_and_serve.runtime.distributed.rank_process import rank_environment
from tests.support.forkserver import forkserver


def run_ranks(
    size: int,
    work: Callable[..., Any],
    *args: Any,
    folder: Path,
    seconds: float = 300.0,
    device: str = "cpu",
    sees_all: bool = True,
    mesh: Mesh | None = None,
) -> list[Any]:
    """`work(rank, *args)` in `size` new processes, one thread each, that have joined groups. → results in the order of ranks

    work: a module-level function. folder: of the rendezvous file, used once. device: of the group. sees_all: whether a
    rank sees the other ranks' GPUs too. mesh: of the ranks; None: all share a model's tensors. Raises with a rank's traceback if one fails.
    """
    context = forkserver() if device == "cpu" else multiprocessing.get_context("spawn")
    results = context.Queue()
    rendezvous = f"file://{folder / 'rendezvous'}"
    processes = [
        context.Process(
            target=_run_rank, args=(rank, mesh or Mesh(tensor=size), rendezvous, device, sees_all, work, args, results), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    done: dict[int, Any] = {}
    try:
        while len(done) < size:
            try:
                rank, pickled, error = results.get(timeout=seconds)
            except Empty:
                raise TimeoutError(f"ranks {set(range(size)) - set(done)} gave nothing for {seconds} s") from None
            assert error is None, f"rank {rank} failed:\n{error}"
            done[rank] = pickle.loads(pickled)
    finally:
        for process in processes:
            if len(done) < size:
                process.kill()
            process.join()
    return [done[rank] for rank in range(size)]


def _run_rank(
    rank: int, mesh: Mesh, rendezvous: str, kind: str, sees_all: bool, work: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", **rank_environment()}.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    environment, index = ({}, rank) if sees_all else one_device(rank, kind)
    os.environ.update(environment)  # CUDA looks at it when it is first used
    device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
    try:
        join_groups(rank=rank, mesh=mesh, init_method=rendezvous, device=device, timeout_seconds=240)
        value = pickle.dumps(work(rank, *args))  # tensors as bytes: their memory ends with this process
        leave_groups()
        results.put((rank, value, None))
    except Exception:
        results.put((rank, b"", traceback.format_exc()))
