"""Pieces for a GPU: Inductor's processes build their kernels in parallel, each in the folder of its piece."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from compile_and_serve.compiler.built_kernels import built_kernels
from compile_and_serve.compiler.inductor import load_pieces, start_inductor, start_piece

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x * self.factor) + x, x.softmax(-1)  # softmax: a kernel that the pieces share


def piece(factor: float) -> GraphModule:
    gm = symbolic_trace(Scaled(factor))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = torch.empty(32, 300)
    return gm


@pytest.mark.parametrize("is_ready", [True, False], ids=["processes", "none yet"])
def test_pieces_are_compiled_in_parallel(tmp_path: Path, is_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from torch._inductor.async_compile import AsyncCompile

    found: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    factors = (0.5, 3.0)
    x = torch.randn(32, 300, device=CUDA)
    with start_inductor(CUDA, tmp_path / "trials"):
        if is_ready:
            AsyncCompile.wait_pool_ready()
        begun = [start_piece(piece(factor), CUDA, tmp_path / str(factor)) for factor in factors]
        compiled = [pending.result() for pending in begun]
    for factor, made in zip(factors, compiled, strict=True):
        scaled, probs = made.run([x])
        torch.testing.assert_close(scaled, torch.tanh(x * factor) + x)
        torch.testing.assert_close(probs, x.softmax(-1))
        folder = tmp_path / str(factor)
        assert list(folder.rglob("*.cubin")), "the piece's kernels are not in its folder"
        # Like an artifact: in another folder, after the first one is gone.
        elsewhere = tmp_path / f"{factor}-loaded"
        shutil.copytree(folder, elsewhere)
        shutil.rmtree(folder)
        found.clear()
        again = load_pieces({"again": made.source}, CUDA, elsewhere)["again"].run([x])
        torch.testing.assert_close(again[0], scaled)
        assert found, "no kernel was loaded"
        assert all(found), "loading a piece rebuilt its kernels"
        # As a start loads it. The first of two calls measures the configurations.
        built = built_kernels(made.source, made.run)
        assert built["obstacle"] is None
        assert built["triton"]
        own = load_pieces({"own": made.source}, CUDA, elsewhere, {"own": built})["own"]
        for ours in (own.run([x]), own.run([x])):
            torch.testing.assert_close(ours[0], scaled)
            torch.testing.assert_close(ours[1], probs)
