"""Triton kernels compiled before they run: nothing runs meanwhile, and nothing is compiled afterwards."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from compile_and_serve.custom_ops.build.triton_launch import compile_ahead, is_compiling_ahead, launch
from compile_and_serve.custom_ops.linear.triton_elementwise import _silu_mul_kernel, silu_mul_rows

pytestmark = pytest.mark.gpu


def test_kernels_are_compiled_and_not_run() -> None:
    import triton

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
    compile_ahead(lambda: launch(*args, BLOCK=1024, PDL=False), device, 2)
    assert not out_TO.any()
    launch(*args, BLOCK=1024, PDL=False)
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
