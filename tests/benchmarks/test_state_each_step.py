"""The kernel that writes states in each step computes what the reference does; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.custom_ops.recurrent.test_linear_attention import make_inputs, state_of
from tests.custom_ops.recurrent.test_triton_recurrent import DEVICE, KINDS, triton_linear_attention
from tests.support.recurrent_steps import Slots

pytestmark = pytest.mark.slow
pytest.importorskip("triton")


@KINDS
@pytest.mark.exhaustive_cases(but=["KDA"])
def test_decodes(monkeypatch: pytest.MonkeyPatch, delta: bool, per_channel: bool) -> None:
    from benchmarks.state_each_step import write_each_step
    from compile_and_serve.custom_ops.recurrent import triton_linear_attention as kernels

    monkeypatch.setattr(kernels, "_linear_attention_decode_kernel", None)  # is restored
    write_each_step()
    inputs = make_inputs(2, 1, 24, 40, delta=delta, per_channel=per_channel, dtype=torch.float32)
    state = state_of(inputs, torch.float32)
    outs = {}
    for name, op, device in (("ours", triton_linear_attention, DEVICE), ("reference", torch.ops.cas.linear_attention_reference, "cpu")):
        slots = Slots(state, 3, device=device)
        tensors = [tensor for part in slots.parts for tensor in part]
        lengths = {0: 15, 1: 33, 2: 1}
        steps = [{seq: (0, length) for seq, length in lengths.items()}]
        steps += [{seq: (length + i, length + i + 1) for seq, length in lengths.items()} for i in range(18)]
        outs[name] = []
        for spans in steps:
            rows = [None if x is None else torch.cat([x[s, begin:end] for s, (begin, end) in spans.items()]).to(device) for x in inputs]
            outs[name].append(slots.step(spans, lambda op=op, rows=rows, tensors=tensors: op(*rows, *tensors)).cpu())
    for out, wanted in zip(outs["ours"], outs["reference"], strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
