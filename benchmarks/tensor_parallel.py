"""What follows a rowwise linear, fused and in steps: all-reduce, + residual, RMSNorm. Prints JSON lines.

usage: python -m benchmarks.tensor_parallel [--size 2] [--hidden 4096] [--tokens 1,2,…,4096]
One process a rank: on CUDA devices where there are as many as ranks (NCCL; a time is the replay of a CUDA graph), else on the CPU
over gloo, where figures say little about a GPU. Every rank does the same work; rank 0 prints the median of its rounds.

variants: "steps" all_reduce, then addition and norm in one kernel (CUDA) or as torch has them (CPU); "fused" the op as the compiler
places it; "one-shot" the same over peer memory, for messages that it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from benchmarks.common import environment
from custom_ops.allreduce_norm import allreduce_add_rms_norm
from custom_ops.collectives import all_reduce, join_tensor_parallel_group, leave_tensor_parallel_group

EPS = 1e-6
ROUNDS, REPEATS = 9, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")],
                        default=[1 << i for i in range(13)])  # fmt: skip
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (args, f"file://{folder}/meeting"), nprocs=args.size)


def run_rank(rank: int, args: argparse.Namespace, meeting_place: str) -> None:
    has_devices = torch.cuda.device_count() >= args.size
    device = torch.device("cuda", rank) if has_devices else torch.device("cpu")
    if has_devices:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.size))
    for variant in ("steps", "fused", "one-shot") if has_devices else ("steps", "fused"):
        group = join_tensor_parallel_group(
            rank=rank, size=args.size, init_method=f"{meeting_place}-{variant}", device=device,
            one_shot=variant == "one-shot",
        )  # fmt: skip
        if variant == "one-shot" and group.peers is None:
            leave_tensor_parallel_group()
            continue
        for tokens in args.tokens:
            if variant == "one-shot" and not _takes(tokens, args.hidden):
                continue
            work, error = _work(variant, rank, tokens, args.hidden, device)
            microseconds = _graph_times(work) if has_devices else _host_times(work)
            row = {
                "variant": variant, "ranks": args.size, "tokens": tokens, "hidden": args.hidden, "dtype": "bfloat16",
                "median_us": round(statistics.median(microseconds), 2), "min_us": round(min(microseconds), 2),
                "relative_error": error, "device": torch.cuda.get_device_name(device) if has_devices else "cpu",
            }  # fmt: skip
            if rank == 0:
                print(json.dumps(row | environment()), flush=True)
        leave_tensor_parallel_group()


def _takes(tokens: int, hidden: int) -> bool:
    from custom_ops.triton_allreduce import takes

    return takes(torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta"))


def _work(variant: str, rank: int, tokens: int, hidden: int, device: torch.device) -> tuple[Callable[[], Any], float]:
    """The call that is timed, and the error of its norm against float64."""
    shared = torch.Generator(device).manual_seed(0)
    residual = torch.randn(tokens, hidden, generator=shared, device=device).bfloat16()
    weight = torch.randn(hidden, generator=shared, device=device).bfloat16()
    x = torch.randn(tokens, hidden, generator=torch.Generator(device).manual_seed(rank + 1), device=device).bfloat16()
    work = (
        _in_steps(x, residual, weight)
        if variant == "steps"
        else lambda: allreduce_add_rms_norm(x, residual, weight, EPS)
    )
    total = x.double()
    dist.all_reduce(total)
    total += residual.double()
    expected = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * weight.double()
    return work, ((work()[1].double() - expected).norm() / expected.norm()).item()


def _in_steps(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    if x.is_cuda:
        from custom_ops.triton_elementwise import add_rms_norm

        return lambda: add_rms_norm(all_reduce(x), residual, weight, EPS)[::-1]

    def steps() -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + all_reduce(x)
        return total, F.rms_norm(total, (total.shape[1],), weight, EPS)

    return steps


def _graph_times(work: Callable[[], Any]) -> list[float]:
    """Microseconds of one call in each round; every rank replays equally often."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            work()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPEATS)
    return times


def _host_times(work: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        times.append((time.perf_counter() - start) * 1e6 / REPEATS)
    return times


if __name__ == "__main__":
    main()
