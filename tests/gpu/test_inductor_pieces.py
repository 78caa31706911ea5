"""Pieces for a GPU: Inductor's processes build their kernels beside each other, each into its piece's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from compiler.inductor import load_pieces, prepared, start_piece

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x * self.factor) + x, x.softmax(-1)  # softmax: the same kernel in all of them


def piece(factor: float) -> GraphModule:
    gm = symbolic_trace(Scaled(factor))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = torch.empty(32, 300)
    return gm


def cubins(folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*.cubin")}


@pytest.mark.parametrize("is_ready", [True, False], ids=["processes", "none yet"])
def test_pieces_in_work_beside_each_other(tmp_path: Path, is_ready: bool) -> None:
    from torch._inductor.async_compile import AsyncCompile

    factors = (0.5, 3.0)
    x = torch.randn(32, 300, device=CUDA)
    with prepared(CUDA, tmp_path / "trials"):
        if is_ready:
            AsyncCompile.wait_pool_ready()
        begun = [start_piece(piece(factor), CUDA, tmp_path / str(factor)) for factor in factors]
        compiled = [in_work.result() for in_work in begun]
    for factor, made in zip(factors, compiled, strict=True):
        scaled, probs = made.run([x])
        torch.testing.assert_close(scaled, torch.tanh(x * factor) + x)
        torch.testing.assert_close(probs, x.softmax(-1))
        folder = tmp_path / str(factor)
        before = cubins(folder)
        assert len(before) >= 2, "not all of the piece's kernels lie in its folder"
        again = load_pieces({"again": made.source}, CUDA, folder)["again"].run([x])
        torch.testing.assert_close(again[0], scaled)
        assert cubins(folder) == before, "loading a piece built kernels again"
