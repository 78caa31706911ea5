# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""LoRA kernels on a GPU, in bfloat16, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.linear.fused_linear import pack_linear_weight
from compile_and_serve.custom_ops.lora.lora_add import lora_add
from compile_and_serve.custom_ops.lora.lora_linear import lora_linear
from tests.custom_ops.lora.test_lora_add import exact, make_adapters, make_index, relative_error

CUDA = torch.device("cuda")


@pytest.mark.parametrize("mix", ["none", "one", "many", "runs"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 300, 700])
@pytest.mark.parametrize("rank", [8, 16, 256])
@pytest.mark.parametrize(
    "num_in, ends, norm, silu_mul, residual", [(2048, [2048, 2560, 3072], 1, 0, 0), (2048, [5632, 11264], 1, 1, 0), (5632, [2048], 0, 0, 1)]
)
def test_lora_linear(num_in: int, ends: list[int], norm: int, silu_mul: int, residual: int, rank: int, tokens: int, mix: str) -> None:
    width = ends[-1] // 2 if silu_mul else ends[-1]
    x = torch.randn(tokens, num_in, device=CUDA).bfloat16()
    weight = (torch.randn(ends[-1], num_in, device=CUDA) / num_in**0.5).bfloat16()
    norms = torch.rand(num_in, device=CUDA).bfloat16() + 0.5 if norm else None
    residuals = torch.randn(tokens, width, device=CUDA).bfloat16() if residual else None
    a, b = (one.to(CUDA) for one in make_adapters(num_in, ends, rank, torch.bfloat16))
    index = make_index(tokens, mix).to(CUDA)
    out = lora_linear(x, pack_linear_weight(weight), ends[-1], norms, 1e-5, None, bool(silu_mul), residuals, False, a, b, index, ends)
    n = x.double() if norms is None else F.rms_norm(x.double(), (num_in,), norms.double(), 1e-5)
    y = exact(F.linear(n, weight.double()), n, a, b, index, ends)
    y = F.silu(y[:, :width]) * y[:, width:] if silu_mul else y
    y = y if residuals is None else y + residuals.double()
    assert relative_error(out, y) < 1e-2
    plain = torch.randn(tokens, ends[-1], device=CUDA).bfloat16()
    added = lora_add(plain, x, a, b, index, ends)
    assert relative_error(added, exact(plain, x, a, b, index, ends)) < 1e-2
