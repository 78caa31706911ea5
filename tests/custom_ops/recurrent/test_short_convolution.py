"""`cas::short_convolution` beside torch's convolution."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.recurrent import short_convolution  # noqa: F401  registers the op
from compile_and_serve.custom_ops.recurrent.layer_state import ConvolutionState
from tests.support.recurrent_steps import SCRIPT, Slots

T = 320


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("channels", "width"), [(96, 4), (256, 3), (48, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_a_convolution_of_whole_sequences(dtype: torch.dtype, channels: int, width: int, has_bias: bool, reference: bool) -> None:
    torch.manual_seed(channels)
    x_STD, weight_DW = torch.randn(3, T, channels).to(dtype), torch.randn(channels, width).to(dtype)
    bias_D = torch.randn(channels).to(dtype) if has_bias else None
    wide_bias = None if bias_D is None else bias_D.float()
    padded = torch.nn.functional.pad(x_STD.float().transpose(1, 2), (width - 1, 0))
    whole = torch.nn.functional.conv1d(padded, weight_DW.float()[:, None], wide_bias, groups=channels).transpose(1, 2)
    slots = Slots(ConvolutionState(channels=channels, width=width, dtype=dtype), 3)
    op = torch.ops.cas.short_convolution_reference if reference else torch.ops.cas.short_convolution
    for number, (spans, moving) in enumerate(SCRIPT):
        x_TD, wanted = (torch.cat([y[s, begin:end] for s, (begin, end) in spans.items()]) for y in (x_STD, whole))
        out = slots.step(spans, lambda x_TD=x_TD: op(x_TD, weight_DW, bias_D, *slots.parts[0]), moving)
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.float(), wanted, rtol=limit, atol=limit, msg=lambda text, n=number: f"step {n}: {text}")
