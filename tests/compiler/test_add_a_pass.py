"""The worked example of docs/add-a-pass.md runs, and does what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compiler.capture import capture, example_inputs
from compiler.graph_pass import PassContext, PassResult
from compiler.pass_manager import run_passes
from compiler.passes import default_passes
from custom_ops.attention import attention

DOC = Path(__file__).resolve().parents[2] / "docs" / "add-a-pass.md"


class UnitScale(nn.Module):
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        x = positions[:, None].float() * 1.0
        y = attention(x[:, None], x[:, None], x[:, None], kv_caches[0], 1.0)[:, 0]
        return ((y * 1) * 2.0)[logits_indices]


def test_the_example_works() -> None:
    code = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), names)
    captured = capture(UnitScale(), example_inputs([(8, 2, 1, 16, 1)], torch.float32))
    ctx = PassContext(
        device=torch.device("cpu"), dtype=torch.float32, weights=captured.weights, fake_mode=captured.fake_mode
    )
    passes = (*default_passes(), names["DropUnitScales"]())
    assert run_passes(captured.gm, passes, ctx)[-1].result == PassResult(matched=2)
    scales = [node.args[1] for node in captured.gm.graph.find_nodes(op="call_function", target=torch.mul)]
    assert scales == [2.0]
    assert run_passes(captured.gm, passes, ctx)[-1].result == PassResult(matched=0)
