"""What the Triton kernels share: programmatic dependent launch (PDL), small device functions, and buffers that outlive a launch.

PDL (Hopper and later): a kernel launched with `launch_pdl` may start while the previous kernel still runs. Until `wait_for_previous`
returns, it may read only what no such kernel writes: weights, and the step's inputs (lengths, block tables), which were written by the
step's first kernel, an ordinary one, or before it. Every PDL kernel calls `wait_for_previous`, so that the end of a kernel implies the end
of all kernels before it: in every program, but for programs that write nothing while others of the same launch wait.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_and_serve.custom_ops.platform import platform_of

SPLIT_COUNTERS = 1 << 16  # output tiles that one split launch may have
TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all writes of earlier kernels of the stream are visible."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel of the stream to start once every program of this kernel has called this."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, num_elements, THREADS: tl.constexpr):
    """Prefetch num_elements (contiguous, 16-byte aligned, a multiple of 16 · THREADS bytes) into L2."""
    bytes_each = (num_elements * (ptr.dtype.element_ty.primitive_bitwidth // 8) // THREADS).to(tl.int32)
    addresses = ptr.to(tl.int64) + tl.arange(0, THREADS).to(tl.int64) * bytes_each
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses, tl.zeros((THREADS,), dtype=tl.int32) + bytes_each],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows_l2(pointers_C, num_elements):
    """Prefetch the row of num_elements values (16-byte aligned, a multiple of 16 bytes) at each pointer into L2."""
    num_bytes = num_elements * pointers_C.dtype.element_ty.primitive_bitwidth // 8
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers_C.to(tl.int64), tl.zeros(pointers_C.shape, dtype=tl.int32) + num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def to_cache(values, kv_ptr):
    """Values in the KV cache's dtype: to nearest, ties to even. Float8 saturates, and NaN stays NaN."""
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(dtype)


@triton.jit
def to_products(q, dtype: tl.constexpr):
    """Queries in the dtype of the products: the model's, or float16 for a bfloat16 model with a float8 cache.

    Float16 holds every float8 value, and one instruction converts two of them; conversion to bfloat16 takes four. Of bfloat16 queries
    and probabilities, float16 loses values below 2^-24 and bits of values below 2^-17. Queries saturate at ±65504.
    """
    if dtype == tl.float16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
    return q.to(dtype)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gate(x, GELU: tl.constexpr):
    """SiLU, or GELU's tanh form: x · sigmoid(2 · sqrt(2 / π) · (x + 0.044715 x³))."""
    if GELU:
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = silu(x)
    return y


@triton.jit
def add_pairs(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def weight_tile(w_ptr, block, start, num_rows, num_blocks, row_size, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """One block of rows of a contiguous matrix, columns [start, start + BLOCK_I); zeros after the last block and column."""
    rows_O = block * BLOCK_O + tl.arange(0, BLOCK_O)
    cols_I = start + tl.arange(0, BLOCK_I)
    safe_rows_O = tl.where(rows_O < num_rows, rows_O, 0).to(tl.int64)
    ok_1I = cols_I[None, :] < tl.where(block < num_blocks, row_size, 0)
    at_OI = w_ptr + safe_rows_O[:, None] * row_size + cols_I[None, :]
    return tl.load(at_OI, mask=ok_1I, other=0, eviction_policy="evict_first")


def cdiv(x: int, y: int) -> int:
    """x / y, rounded up, on the host. (On the host, Triton's own function is slow.)"""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, for n ≥ 1, on the host."""
    return 1 << (n - 1).bit_length()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on this device may be launched with `launch_pdl`."""
    return platform_of(device).compute_capability >= (9, 0)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device (1 for a CPU, where kernels run in Triton's interpreter)."""
    return platform_of(device).num_multiprocessors


# By stream, on which kernels run one after another: engines share them.
_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def split_counters(device: torch.device) -> torch.Tensor:
    """int32 zeros [SPLIT_COUNTERS] of the current stream. A kernel that counts its finished splits resets its counters to zero.

    They are allocated at the first use, which must not be in a graph capture: run a kernel before capturing it, on any stream. A
    capture uses the buffer of any stream, because all graphs are replayed on one stream.
    """
    platform = platform_of(device)
    if platform.is_capturing():
        for (owner, _), buffer in _counters.items():
            if owner == device:
                return buffer
        raise AssertionError("a split kernel was captured before its first run")
    key = (device, platform.current_stream())
    if key not in _counters:
        _counters[key] = torch.zeros(SPLIT_COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]


def launch_options(pdl: bool) -> dict[str, bool]:
    """Launch options of a PDL kernel. pdl: whether the device has PDL."""
    return {"launch_pdl": True} if pdl else {}
