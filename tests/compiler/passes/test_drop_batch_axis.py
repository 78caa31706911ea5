"""`drop_batch_axis`: what counts dimensions from the front still means the same ones, and an unknown op keeps its axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.compiler.passes.canonicalize import Canonicalize
from compile_and_serve.compiler.passes.drop_batch_axis import DropBatchAxis
from compile_and_serve.compiler.rewrite.graph_pass import PassResult
from compile_and_serve.compiler.rewrite.verify import RandomWeights, compare, evaluate
from tests.support.rewriting import pass_context
from tests.support.tiny_models import capture_decoder

FEATURES = 24
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # [1, T, D], positions [1, T] → [1, T, …]


def heads_first_and_back(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, x.shape[1], -1, 6).transpose(1, 2)
    angles = (positions[:, None, :, None].float() * 0.1).cos()
    return (heads * angles).transpose(1, 2).reshape(1, x.shape[1], -1).contiguous()


def parts_and_means(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=2)
    mean = x.mean(2, keepdim=True)
    return torch.cat((F.silu(first) * second, first - mean), dim=2) + x.flatten(2)


def positions_by_frequencies(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    frequencies = torch.arange(1, FEATURES + 1, dtype=torch.float32, device=x.device)[None, :, None].expand(1, -1, 1)
    return x + (frequencies @ positions[:, None, :].float()).transpose(1, 2).sin()


def sums_along_tokens(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return F.silu(torch.cumsum(F.silu(x), dim=1)) * 2.0


class Batched(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.table = nn.Parameter(torch.empty(64, FEATURES, device="meta"), requires_grad=False)

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: Any) -> torch.Tensor:
        x = F.embedding(input_ids[None], self.table)
        return self.body(x, positions[None])[:, logits_indices, :][0]


@pytest.mark.parametrize(
    ("body", "kept"), [(heads_first_and_back, 0), (parts_and_means, 0), (positions_by_frequencies, 0), (sums_along_tokens, 1)]
)
def test_the_result_is_the_same_without_the_axis(body: Body, kept: int) -> None:
    captured = capture_decoder(Batched(body), torch.float32)
    ctx = pass_context(captured, torch.float32)
    Canonicalize().run(captured.gm, ctx)
    before = evaluate(captured.gm, RandomWeights(captured.weights, {}, 0))
    result = DropBatchAxis().run(captured.gm, ctx)
    captured.gm.graph.lint()
    assert result.matched > 3
    assert len(result.near_misses) == kept
    if kept:
        assert "there is no rule for cumsum" in result.near_misses[0].reason
        assert "test_drop_batch_axis.py:" in result.near_misses[0].source
    assert compare(before, evaluate(captured.gm, RandomWeights(captured.weights, {}, 0)), 1e-12).reason is None
    shapes = [getattr(n.meta.get("example_value"), "shape", ()) for n in captured.gm.graph.find_nodes(op="call_function", target=F.silu)]
    assert all(len(shape) == 2 for shape in shapes)  # before and after an op that keeps the axis
    text = str(captured.gm.graph)
    assert DropBatchAxis().run(captured.gm, ctx) == PassResult(matched=0)
    assert str(captured.gm.graph) == text
