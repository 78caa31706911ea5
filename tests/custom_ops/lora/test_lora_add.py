"""`cas::lora_add`, the reference and the Triton kernels, against float64; kernels compile for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_and_serve.custom_ops.lora.lora_add import lora_add
from compile_and_serve.custom_ops.lora.triton_lora import lora_add as triton_lora_add
from tests.support.hopper import LARGEST_SHARED, run_script

LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SLOTS = 3
# tokens, input features, output features, rank
SIZES = [(1, 48, 40, 8), (5, 64, 96, 16), (7, 2100, 33, 20), (70, 200, 130, 5), (129, 600, 48, 64)]


def exact(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = y.double()
    for token, i in enumerate(index.tolist()):
        if i:
            out[token] += b[i - 1].double() @ (a[i - 1].double() @ x[token].double())
    return out


@pytest.mark.parametrize("run", [lora_add, triton_lora_add], ids=["op", "triton"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens, num_in, num_out, rank", SIZES)
@pytest.mark.parametrize("mix", ["none", "one", "runs", "many"])
def test_numbers(
    run: Callable[..., torch.Tensor], dtype: torch.dtype, tokens: int, num_in: int, num_out: int, rank: int, mix: str
) -> None:
    if run is triton_lora_add and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products of bfloat16")
    y = torch.randn(tokens, num_out + 7).to(dtype)[:, :num_out]
    x = torch.randn(tokens, num_in + 8).to(dtype)[:, :num_in]
    a = (torch.randn(SLOTS, rank, num_in) / num_in**0.5).to(dtype)
    b = (torch.randn(SLOTS, num_out, rank) / rank**0.5).to(dtype)
    index = {
        "none": torch.zeros(tokens), "one": torch.full((tokens,), 2), "runs": torch.arange(tokens) * (SLOTS + 1) // tokens,
        "many": torch.randint(0, SLOTS + 1, (tokens,)),
    }[mix].to(torch.int32)  # fmt: skip
    before = y.clone()
    out = run(y, x, a, b, index)
    assert torch.equal(y, before)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, y.shape, True)
    expected = exact(y, x, a, b, index)
    assert ((out.double() - expected).norm() / expected.norm()).item() < LIMITS[dtype]
    none = index == 0
    assert torch.equal(out[none], y[none])  # exactly: a token without an adapter does not see the others'


def test_the_fake_refuses_adapters_that_do_not_fit() -> None:
    with FakeTensorMode():
        y, x, index = torch.empty(2, 8), torch.empty(2, 6), torch.zeros(2, dtype=torch.int32)
        assert lora_add(y, x, torch.empty(3, 4, 6), torch.empty(3, 8, 4), index).shape == (2, 8)
        with pytest.raises(ValueError, match="do not fit"):
            lora_add(y, x, torch.empty(3, 4, 6), torch.empty(3, 9, 4), index)


SCRIPT = """
import json
from compile_and_serve.custom_ops.lora import triton_lora as kernels
from tests.support.hopper import compiled
shared = {}
for rank in (16, 64, 256):
    for parts in (1, 8):
        for name, constants in {
            "shrink_rows": {"BLOCK_R": 4, "BLOCK_I": 512},
            "expand_rows": {"PARTS": parts, "BLOCK_R": rank, "BLOCK_O": max(16, 4096 // rank)},
            "shrink_blocks": {"BLOCK_T": 32, "BLOCK_R": min(rank, 64), "BLOCK_I": 128},
            "expand_blocks": {"PARTS": parts, "BLOCK_T": 32, "BLOCK_R": min(rank, 32), "BLOCK_O": 128},
        }.items():
            kernel = getattr(kernels, f"_{name}_kernel")
            types = {"h_ptr": "*fp32", "index_ptr": "*i32"}
            done = compiled(
                kernel, constants, lambda n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32"), num_warps=4
            )
            shared[f"{name} {rank} {parts}"] = done.metadata.shared
print(json.dumps(shared))
"""


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    shared = run_script(SCRIPT, tmp_path)
    assert len(shared) == 24
    assert max(shared.values()) <= LARGEST_SHARED
