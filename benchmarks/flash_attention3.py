"""Kernels of FlashAttention-3 from `fa3-fwd`, for encoders beside torch's kernel. Prints JSON lines. Needs Hopper.

    python -m benchmarks.flash_attention3

`fa3_ms`, `torch_ms`: of one call. `fa3_tflops`: half of the products count where attention is causal. `err`: the largest difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_timing import environment
from compile_and_serve.custom_ops.attention.flash_attention3 import flash_attention3, flash_attention3_unavailable_reason
from compile_and_serve.custom_ops.compat import packed_attention
from compile_and_serve.custom_ops.platform import resolve_device

# Segments, rows of each, query heads, key/value heads, head size, causal: prompts, then encoders (Whisper, BGE, Qwen2.5-VL, Qwen3-VL).
SHAPES = (
    (1, 4096, 32, 8, 128, True),
    (4, 4096, 32, 8, 128, True),
    (16, 512, 32, 8, 128, True),
    (4, 4096, 32, 32, 96, True),
    (8, 4096, 16, 4, 256, True),
    (64, 1500, 20, 20, 64, False),
    (256, 512, 16, 16, 64, False),
    (16, 5476, 16, 16, 80, False),
    (16, 4096, 16, 16, 64, False),
)


def main() -> None:
    device = resolve_device("cuda", None)
    if reason := flash_attention3_unavailable_reason(device):
        raise SystemExit(reason)
    for segments, length, heads, kv_heads, head_dim, is_causal in SHAPES:
        counts = (heads, kv_heads, kv_heads)
        q, k, v = (torch.randn(segments * length, count, head_dim, device=device, dtype=torch.bfloat16) for count in counts)
        starts = torch.arange(segments + 1, device=device, dtype=torch.int32) * length
        operands, scale, out = (q, k, v, starts), head_dim**-0.5, torch.empty_like(q)
        ms = _ms(lambda: flash_attention3(*operands, starts, (length, length), scale, out, is_causal=is_causal))
        flops = 4 * segments * length * length * heads * head_dim / (2 if is_causal else 1)
        row: dict[str, Any] = {"sequences": segments, "length": length, "heads": heads, "head_dim": head_dim, "causal": is_causal}
        row |= {"fa3_ms": round(ms, 3), "fa3_tflops": round(flops / ms / 1e9)}
        if not is_causal:
            row["torch_ms"] = round(_ms(lambda: packed_attention(*operands, length, scale, 0)), 3)
            row["err"] = float((packed_attention(*operands, length, scale, 0).float() - out.float()).abs().max())
        print(json.dumps({"benchmark": "flash_attention3", **row, **environment()}), flush=True)


def _ms(call: Callable[[], object], rounds: int = 10) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(rounds):
        call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / rounds


if __name__ == "__main__":
    main()
