"""Times all-reduce, + residual and RMSNorm after a rowwise linear, fused and unfused. Prints JSON lines.

usage: python -m benchmarks.tensor_parallel [--size 2] [--hidden 4096] [--tokens 1,2,…]
Each rank is a process. If there are enough CUDA devices, each rank uses one, and a time is the replay of a CUDA graph. Otherwise ranks
run on the CPU over gloo, where figures say little about a GPU. All ranks do the same work; rank 0 prints the median of its rounds.

variants: "steps" all_reduce, then addition and norm in one kernel (CUDA) or in torch (CPU); "fused" the op that the compiler inserts,
all-reduced over NCCL or gloo; on CUDA also "pushed", "one_shot", "two_shot" and "two_shot_stores", the op over symmetric memory, and
"chosen", the op with the kernel that the engine chooses at its start, measured anew here ("kernel" names it). Variants ending in
"_quantize" also quantize the norm to float8: in a separate kernel, in torch, or by the fused op.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from benchmarks.common import environment
from compile_and_serve.custom_ops.collectives.allreduce_choice import (
    ALL_KERNELS,
    NCCL,
    ONE_SHOT,
    PUSHED,
    TWO_SHOT,
    TWO_SHOT_STORES,
    AllreduceChoice,
    choose_allreduce,
    fused_allreduce,
    rank_seconds,
    use_symmetric_memory,
)
from compile_and_serve.custom_ops.collectives.allreduce_norm import allreduce_add_rms_norm, allreduce_add_rms_norm_quantize
from compile_and_serve.custom_ops.collectives.collectives import all_reduce, join_groups, leave_groups
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.quantization import quantize_activations
from compile_and_serve.custom_ops.tuning.tuner import Tuner, device_name
from compile_and_serve.runtime.distributed.rank_process import rank_environment

EPS = 1e-6
ROUNDS, REPEATS = 9, 20
EVERYTHING = 1 << 30
FORCED = {
    NCCL: AllreduceChoice(one_shot_rows=0, two_shot_rows=0),
    PUSHED: AllreduceChoice(pushed_rows=EVERYTHING),
    ONE_SHOT: AllreduceChoice(one_shot_rows=EVERYTHING, two_shot_rows=EVERYTHING),
    TWO_SHOT: AllreduceChoice(one_shot_rows=0, two_shot_rows=EVERYTHING),
    TWO_SHOT_STORES: AllreduceChoice(two_shot_stores_rows=EVERYTHING),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1 << i for i in range(15 if torch.cuda.is_available() else 13)],
        help="rows of the messages; default: powers of two up to 16384, without a GPU up to 4096",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (args, folder), nprocs=args.size)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """x differs between ranks; the others are equal. expected: the norm, in float64."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    expected: torch.Tensor

    def fused(self, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if quantize:
            return allreduce_add_rms_norm_quantize(self.x, self.residual, self.weight, EPS)[:2]
        return allreduce_add_rms_norm(self.x, self.residual, self.weight, EPS)

    def in_steps(self, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if self.x.is_cuda:
            from compile_and_serve.custom_ops.linear.triton_elementwise import add_rms_norm
            from compile_and_serve.custom_ops.triton_quantize import quantize_rows

            normed, total = add_rms_norm(all_reduce(self.x), self.residual, self.weight, EPS)
            if quantize:
                quantize_rows(normed, torch.float8_e4m3fn)
            return total, normed
        total = self.residual + all_reduce(self.x)
        normed = F.rms_norm(total, (total.shape[1],), self.weight, EPS)
        if quantize:
            quantize_activations(normed, torch.float8_e4m3fn)
        return total, normed


def run_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    has_devices = torch.cuda.device_count() >= args.size
    device = torch.device("cuda", rank) if has_devices else torch.device("cpu")
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", **rank_environment()}.items():
        os.environ.setdefault(name, value)
    if not has_devices:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.size))
    join_groups(rank=rank, mesh=Mesh(tensor=args.size), init_method=f"file://{folder}/meeting", device=device)
    chosen = chosen_quantized = None
    if has_devices:
        start = time.perf_counter()
        how = choose_allreduce(
            num_features=args.hidden,
            dtype=torch.bfloat16,
            max_rows=max(args.tokens),
            device=device,
            tuner=Tuner(device_name(device), [Path(folder)]),
            kernels=ALL_KERNELS,
            quantizes=True,
        )
        fused = fused_allreduce()
        chosen = None if fused is None else fused.choice
        chosen_quantized = None if fused is None else fused.quantized_choice
        if rank == 0:
            seconds = round(time.perf_counter() - start, 2)
            print(json.dumps({"choice": how, "seconds": seconds} | environment()), flush=True)
    for tokens in args.tokens:
        operands = make_operands(rank, tokens, args.hidden, device)
        variants = {"steps": None, "fused": FORCED[NCCL]} | _over_symmetric_memory(tokens, chosen)
        quantized = {"steps": None, "fused": FORCED[NCCL]} | _over_symmetric_memory(tokens, chosen_quantized)
        variants |= {f"{name}_quantize": choice for name, choice in quantized.items()}
        for variant, choice in variants.items():
            microseconds, error = measure(operands, variant, choice)
            row = {
                "variant": variant,
                "ranks": args.size,
                "tokens": tokens,
                "hidden": args.hidden,
                "dtype": "bfloat16",
                "median_us": round(statistics.median(microseconds), 2),
                "min_us": round(min(microseconds), 2),
                "relative_error": error,
                "device": torch.cuda.get_device_name(device) if has_devices else "cpu",
            }
            if variant.startswith("chosen"):
                row["kernel"] = NCCL if choice is None else choice.kernel(tokens)
            if rank == 0:
                print(json.dumps(row | environment()), flush=True)
    leave_groups()


def _over_symmetric_memory(tokens: int, chosen: AllreduceChoice | None) -> dict[str, AllreduceChoice]:
    fused = fused_allreduce()
    if fused is None or chosen is None:
        return {}
    memory = fused.memory
    kernels = [PUSHED] if tokens <= memory.layout.max_pushed_rows else []
    if tokens <= memory.layout.max_rows:
        kernels += [ONE_SHOT, TWO_SHOT, TWO_SHOT_STORES]
    return {kernel: FORCED[kernel] for kernel in kernels} | {"chosen": chosen}


def make_operands(rank: int, tokens: int, hidden: int, device: torch.device) -> Operands:
    """Equal on all ranks except x."""
    shared = torch.Generator(device).manual_seed(0)
    residual = torch.randn(tokens, hidden, generator=shared, device=device).bfloat16()
    weight = torch.randn(hidden, generator=shared, device=device).bfloat16()
    x = torch.randn(tokens, hidden, generator=torch.Generator(device).manual_seed(rank + 1), device=device).bfloat16()
    total = x.double()
    dist.all_reduce(total)
    total += residual.double()
    expected = total * torch.rsqrt(total.square().mean(1, keepdim=True) + EPS) * weight.double()
    return Operands(x=x, residual=residual, weight=weight, expected=expected)


def measure(operands: Operands, variant: str, choice: AllreduceChoice | None) -> tuple[list[float], float]:
    """→ microseconds per call in each round, relative error of the norm. All ranks call it."""
    work = partial(operands.in_steps if variant.startswith("steps") else operands.fused, variant.endswith("_quantize"))
    fused = fused_allreduce()
    if choice is not None and fused is not None:
        use_symmetric_memory(fused.memory, choice)
    if operands.x.is_cuda:
        seconds, [(_, normed)] = rank_seconds(variant, [work], operands.x.device, repeats=REPEATS, rounds=ROUNDS)
    else:
        seconds, normed = _host_seconds(work), work()[1]
    error = ((normed.double() - operands.expected).norm() / operands.expected.norm()).item()
    return [s * 1e6 for s in seconds], error


def _host_seconds(work: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            work()
        times.append((time.perf_counter() - start) / REPEATS)
    return times


if __name__ == "__main__":
    main()
