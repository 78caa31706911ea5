"""Times silu(x Wgᵀ) · (x Wuᵀ) with each configuration of csrc/cuda/silu_mul_gemm.cu and with two kernels. Prints JSON lines.

usage: python -m benchmarks.silu_mul_gemm [--models llama-8b,qwen3-0.6b] [--tokens 512,1024,2048,4096,16384]
The kernels take turns, so that none runs on a cooler device. A time is the median over rounds of replays of a CUDA graph. Errors are
relative to float64, over a few rows.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import capture, emit, in_turns_ms
from compile_and_serve.custom_ops.linear.silu_mul_gemm import KERNELS, load_silu_mul_gemms, run_silu_mul_gemm, silu_mul_library
from compile_and_serve.custom_ops.linear.triton_elementwise import silu_mul_rows


def measure(model: str, num_tokens: int, hidden: int, inputs: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    silu_mul_library().build()
    library = load_silu_mul_gemms(device)
    if library is None:
        raise SystemExit("The library is for compute capability 9.0; this device has another.")
    x = torch.randn(num_tokens, inputs, device=device).bfloat16()
    weight = torch.empty(2 * hidden, inputs, dtype=torch.bfloat16, device=device).normal_(std=inputs**-0.5)
    kernels: dict[str, Callable[[], torch.Tensor]] = {"torch, silu_mul_rows": lambda: silu_mul_rows(F.linear(x, weight))}
    for kernel in KERNELS:
        kernels[kernel] = functools.partial(run_silu_mul_gemm, library, kernel, x, weight)
    rows = torch.unique(torch.cat([torch.randint(num_tokens, (64,)), torch.tensor([0, num_tokens - 1])]))
    gate, up = (x[rows].double() @ weight.double().T).chunk(2, -1)
    expected = F.silu(gate) * up
    errors, graphs = {}, {}
    for name, kernel_call in kernels.items():
        errors[name] = ((kernel_call()[rows].double() - expected).norm() / expected.norm()).item()
        graphs[name] = capture(kernel_call)
    for name, ms in in_turns_ms(graphs).items():
        emit(work="silu_mul_gemm", model=model, tokens=num_tokens, hidden=hidden, inputs=inputs, kernel=name, ms=round(ms, 4),
             tflops=round(4e-9 * num_tokens * hidden * inputs / ms, 1), error=float(f"{errors[name]:.2e}"))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-8b,qwen3-0.6b")
    parser.add_argument("--tokens", default="512,1024,2048,4096,16384")
    args = parser.parse_args()
    for model in args.models.split(","):
        config = json.loads((Path(__file__).parent / "configs" / model / "config.json").read_text())
        for num_tokens in map(int, args.tokens.split(",")):
            measure(model, num_tokens, config["intermediate_size"], config["hidden_size"])


if __name__ == "__main__":
    main()
