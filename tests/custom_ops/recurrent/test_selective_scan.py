"""`cas::selective_scan`: its reference beside transformers' function, and its kernels beside the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.recurrent import selective_scan  # noqa: F401  registers the op
from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, SelectiveScanState
from compile_and_serve.custom_ops.step import current_metadata
from tests.support.recurrent_steps import SCRIPT, Slots

T = 320


def make_inputs(channels: int, state_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, dt [3, T, I], b, c [3, T, N] of three sequences, and a [I, N]."""
    torch.manual_seed(channels + state_size)
    rows = [torch.randn(3, T, size).to(dtype) for size in (channels, channels, state_size, state_size)]
    return [*rows, -torch.rand(channels, state_size) * 4]


def run_script(inputs: list[torch.Tensor], op: Any, device: str = "cpu") -> list[torch.Tensor]:
    """The output of each step of the script, on the CPU. op: takes the arguments of `cas::selective_scan`."""
    x, dt, b, c, a = inputs
    state = SelectiveScanState(channels=x.shape[2], state_size=b.shape[2], dtype=x.dtype)
    torch.manual_seed(1)
    slots = Slots(state, 3, device=device)
    tensors = [tensor for part in slots.parts for tensor in part]
    outs = []
    for spans, moving in SCRIPT:
        rows = [torch.cat([one[s, begin:end] for s, (begin, end) in spans.items()]).to(device) for one in (x, dt, b, c)]
        outs.append(slots.step(spans, lambda r=rows: op(r[0], r[1], a.to(device), r[2], r[3], *tensors), moving).cpu())
    return outs


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("channels", "state_size"), [(128, 16), (96, 12)])
def test_it_equals_transformers(channels: int, state_size: int, reference: bool) -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    assert load_cpu_kernels()
    x, dt, b, c, a = inputs = make_inputs(channels, state_size, torch.float32)
    whole = mamba_selective_scan(*(one.transpose(1, 2) for one in (x, dt)), a, b.mT, c.mT, delta_softplus=True).transpose(1, 2)
    op = torch.ops.cas.selective_scan_reference if reference else torch.ops.cas.selective_scan
    for number, (out, (spans, _)) in enumerate(zip(run_script(inputs, op), SCRIPT, strict=True)):
        wanted = torch.cat([whole[s, begin:end] for s, (begin, end) in spans.items()])
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5, msg=lambda text, number=number: f"step {number}: {text}")


def test_the_cpu_kernel_in_bfloat16_equals_the_reference() -> None:
    inputs = make_inputs(256, 16, torch.bfloat16)
    wanted = run_script(inputs, torch.ops.cas.selective_scan_reference)
    for out, want in zip(run_script(inputs, torch.ops.cas.selective_scan), wanted, strict=True):
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_the_triton_kernels_equal_the_reference() -> None:
    """In Triton's interpreter where there is no GPU."""
    pytest.importorskip("triton")
    from compile_and_serve.custom_ops.recurrent import triton_selective_scan

    def op(*args: Any) -> torch.Tensor:
        out, tensors = torch.zeros_like(args[0]), args[5:]
        state = list(zip(tensors[::2], tensors[1::2], strict=True))
        triton_selective_scan.selective_scan(*args[:5], state, current_metadata(RECURRENT_STATES), out)
        return out

    inputs = make_inputs(96, 12, torch.float32)
    wanted = run_script(inputs, torch.ops.cas.selective_scan_reference)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, (out, want) in enumerate(zip(run_script(inputs, op, device), wanted, strict=True)):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4, msg=lambda text, n=number: f"step {n}: {text}")
