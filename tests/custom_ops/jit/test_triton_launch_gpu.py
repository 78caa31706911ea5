"""Triton kernels compiled before they run: nothing runs meanwhile, and nothing is compiled afterwards."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit import triton_launch
from compile_and_serve.custom_ops.jit.triton_launch import compile_ahead, is_compiling_ahead, launch
from compile_and_serve.custom_ops.linear.triton_elementwise import _silu_mul_kernel, silu_mul_rows
from compile_and_serve.custom_ops.platform import platform_of

pytestmark = pytest.mark.gpu


@triton.jit
def sum_kernel(x_ptr, RESIDENT: tl.constexpr):
    x = tl.arange(0, 1024)
    tl.store(x_ptr, tl.sum(tl.load(x_ptr + x)))  # a sum over several warps needs shared memory


def test_kernels_are_compiled_and_not_run() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    both_TO = torch.randn(3, 2 * 1032, device=device, dtype=torch.float16)  # a dtype that no other test compiles this kernel for
    results: list[torch.Tensor] = []

    def work() -> None:
        assert is_compiling_ahead()
        results.extend(silu_mul_rows(both_TO) for _ in range(2))

    counts = [compile_ahead(work, device, 2), compile_ahead(work, device, 2)]
    assert counts == [1, 0]
    assert not is_compiling_ahead()

    out_TO = torch.zeros(3, 1032, device=device, dtype=torch.float16)
    args = (_silu_mul_kernel, (3, 2), both_TO, out_TO, 1032, both_TO.stride(0))
    compile_ahead(lambda: launch(*args, BLOCK=1024, GELU=False, PDL=False), device, 2)
    assert not out_TO.any()
    launch(*args, BLOCK=1024, GELU=False, PDL=False)
    assert out_TO.any()

    compiled: list[object] = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs)
    try:
        result = silu_mul_rows(both_TO)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert not compiled
    gate, up = both_TO.float().chunk(2, -1)
    torch.testing.assert_close(result.float(), torch.nn.functional.silu(gate) * up, rtol=2e-3, atol=2e-3)


def test_a_kernel_with_resident_programs_leaves_the_other_shared_memory_to_the_cache() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    most = platform_of(device).shared_bytes_per_multiprocessor
    for resident in (None, 1, 2):
        x = torch.ones(1024, device=device)
        launch(sum_kernel, (1,), x, RESIDENT=resident)
        assert x[0] == 1024
        compiled = next(
            one for (jit, *_, constant), (one, _) in triton_launch._launched.items() if jit is sum_kernel and constant is resident
        )
        percent = ctypes.c_int()
        function = ctypes.c_void_p(compiled.function)
        assert ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(ctypes.byref(percent), 9, function) == 0
        expected = -1 if resident is None else -(-100 * resident * (compiled.metadata.shared + 1024) // most)
        assert compiled.metadata.shared > 0
        assert percent.value == expected
