"""The private torch names that the ops need, for every torch version that is supported (2.11 to 2.15).

Only this file, `compiler/compat.py`, `compiler/inductor.py` and `compiler/built_kernels.py` may use private torch names
(tests/test_private_torch.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket

__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "argument_defaults",
    "current_raw_stream",
    "empty_symmetric",
    "int8_matmul",
    "packed_attention",
    "rendezvous",
    "scaled_matmul",
]


def argument_defaults(op: OpOverload) -> dict[str, Any]:
    """The names of an op's arguments in the schema's order, each with its default; None if it has none."""
    return {argument.name: argument.default_value for argument in op._schema.arguments}


def current_raw_stream(device_index: int) -> int:
    """The handle of a CUDA device's current stream. `torch.cuda.current_stream` makes an object for it, which takes longer."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def int8_matmul(a_TI: torch.Tensor, b_IO: torch.Tensor) -> torch.Tensor:
    """int8 [T, I] · int8 [I, O] → int32 [T, O]. On CUDA: T of at least 17, I and O multiples of 8."""
    return torch._int_mm(a_TI, b_IO)


def packed_attention(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, starts: torch.Tensor, longest: int, scale: float, window: int
) -> torch.Tensor:
    """Softmax attention both ways within packed segments on CUDA; float16 or bfloat16 [N, H, E] and [N, K, E] → [N, H, E].

    starts: int32 [S + 1], where segments begin, and the last one's end. window: the largest distance that is attended to; 0: any.
    `torch.nn.attention.varlen.varlen_attn` calls the same kernel and takes the host 0.1 ms more, a third of an encoder's layer.
    """
    return torch.ops.aten._flash_attention_forward.default(
        q_NHE, k_NKE, v_NKE, starts, starts, longest, longest, 0.0, False, False,
        scale=scale, window_size_left=window or None, window_size_right=window or None,
    )[0]  # fmt: skip


def scaled_matmul(
    a_TI: torch.Tensor, b_IO: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """(scale_a · a) (scale_b · b) of float8 matrices, in `dtype` [T, O].

    Scales are float32: one number each, or [T, 1] and [1, O] with a bfloat16 result.
    """
    return torch._scaled_mm(a_TI, b_IO, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def empty_symmetric(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes], uninitialized, in memory that `rendezvous` can map into the other ranks."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)


def rendezvous(buffer: torch.Tensor, group: dist.ProcessGroup) -> tuple[Sequence[int], Any]:
    """Map `buffer`, which every rank of the group has allocated, into all ranks. Every rank calls it.

    → the addresses of the ranks' allocations in this process, and the handle that keeps them mapped.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    # torch refuses ranks with equal device numbers. Ranks that each see a single device all have number 0.
    with _default_variable("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"):
        handle = symmetric_memory.rendezvous(buffer, group)
    return handle.buffer_ptrs, handle


@contextmanager
def _default_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable that is not set. It is removed again after the block."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
