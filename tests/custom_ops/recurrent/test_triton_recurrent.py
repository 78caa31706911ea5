"""The Triton kernels of recurrent ops beside the references; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.recurrent import short_convolution  # noqa: F401  registers the op
from compile_and_serve.custom_ops.recurrent.fla_prompts import Operands
from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, ConvolutionState
from compile_and_serve.custom_ops.step import current_metadata
from tests.custom_ops.recurrent.test_linear_attention import make_inputs, run_script, state_of
from tests.support.recurrent_steps import SCRIPT, Slots

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def triton_linear_attention(*args: Any) -> torch.Tensor:
    from compile_and_serve.custom_ops.recurrent import triton_linear_attention as kernels

    q, k, v, decay, beta, *tensors = args
    state = list(zip(tensors[::2], tensors[1::2], strict=True))
    return kernels.linear_attention(Operands(q, k, v, decay, beta, state, current_metadata(RECURRENT_STATES)))


KINDS = pytest.mark.parametrize(("delta", "per_channel"), [(True, False), (True, True), (False, False)], ids=["delta rule", "KDA", "SSD"])


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["KDA"])
@KINDS
def test_linear_attention(delta: bool, per_channel: bool) -> None:
    inputs = make_inputs(2, 1, 24, 40, delta=delta, per_channel=per_channel, dtype=torch.float32)
    state = state_of(inputs, torch.float32)
    wanted = run_script(inputs, state, op=torch.ops.cas.linear_attention_reference)
    for number, (out, want) in enumerate(zip(run_script(inputs, state, op=triton_linear_attention, device=DEVICE), wanted, strict=True)):
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4, msg=lambda text, n=number: f"step {n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_convolution(dtype: torch.dtype) -> None:
    from compile_and_serve.custom_ops.recurrent import triton_short_convolution as kernels

    torch.manual_seed(0)
    channels, width = 96, 4
    x_STD, weight_DW, bias_D = torch.randn(3, 320, channels), torch.randn(channels, width), torch.randn(channels)
    x_STD, weight_DW, bias_D = (x.to(dtype).to(DEVICE) for x in (x_STD, weight_DW, bias_D))
    state = ConvolutionState(channels=channels, width=width, dtype=dtype)
    torch.manual_seed(1)
    ours = Slots(state, 3, device=DEVICE)
    torch.manual_seed(1)
    theirs = Slots(state, 3, device=DEVICE)
    for spans, moving in SCRIPT if dtype == torch.float32 else SCRIPT[:4]:  # the dtype changes only how values are loaded and stored
        x_TD = torch.cat([x_STD[s, begin:end] for s, (begin, end) in spans.items()])

        def run(x_TD: torch.Tensor = x_TD) -> torch.Tensor:
            return kernels.short_convolution(x_TD, weight_DW, bias_D, ours.parts[0], current_metadata(RECURRENT_STATES))

        out_TD = ours.step(spans, run, moving)
        want_TD = theirs.step(
            spans, lambda x_TD=x_TD: torch.ops.cas.short_convolution_reference(x_TD, weight_DW, bias_D, *theirs.parts[0]), moving
        )
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out_TD, want_TD, rtol=limit, atol=limit)


@pytest.mark.gpu
@KINDS
def test_prompts_through_fla(delta: bool, per_channel: bool) -> None:
    """In bfloat16: prompts through fla-core, decodes and the ends of prompts through our kernel, beside the reference in float32."""
    from compile_and_serve.custom_ops.recurrent import fla_prompts

    assert fla_prompts.kernels(torch.device("cuda")) is not None
    inputs = make_inputs(4, 2 if not per_channel else 4, 128, 128, delta=delta, per_channel=per_channel, dtype=torch.bfloat16)
    wide = [None if x is None else x.float() for x in inputs]
    wanted = run_script(wide, state_of(wide, torch.float32), op=torch.ops.cas.linear_attention_reference)
    outs = run_script(inputs, state_of(inputs, torch.bfloat16), op=torch.ops.cas.linear_attention, device="cuda")
    for number, (out, want) in enumerate(zip(outs, wanted, strict=True)):
        difference = (out.float() - want).norm() / want.norm()
        assert difference < 2e-2, f"step {number}: {difference:.1e}"
