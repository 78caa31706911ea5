"""`lift_norms`: each spelling of an RMSNorm, what it leaves alone, and that nothing gets less exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.passes.canonicalize import Canonicalize
from compile_and_serve.compiler.passes.eliminate_noops import EliminateNoops
from compile_and_serve.compiler.passes.lift_norms import LiftNorms
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassResult
from compile_and_serve.compiler.rewrite.pass_manager import run_passes
from tests.support.rewriting import compute, pass_context
from tests.support.tiny_models import capture_decoder

EPS = 1e-5
FEATURES = 48


def like_llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPS)).to(x.dtype)


def like_olmo(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (weight * (wide * torch.rsqrt(variance + EPS))).to(x.dtype)


def like_moshi(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).type_as(x)


def with_power(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (torch.pow((wide * wide).mean(dim=-1, keepdim=True) + EPS, -0.5) * wide * weight.float()).to(x.dtype)


def like_gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())).type_as(x)


def without_weight(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * 2.0 + weight


def in_the_activations_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def read_twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (wide * inverse).to(x.dtype) + inverse.to(x.dtype)


Spelling = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Normed(nn.Module):
    def __init__(self, norm: Spelling, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = norm
        self.table = nn.Parameter(torch.empty(64, FEATURES, dtype=dtype, device="meta"), requires_grad=False)
        self.weight = nn.Parameter(torch.empty(FEATURES, dtype=weight_dtype, device="meta"), requires_grad=False)

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: Any) -> torch.Tensor:
        return self.norm(self.table[input_ids], self.weight)


def lifted(
    norm: Spelling, dtype: torch.dtype = torch.bfloat16, weight_dtype: torch.dtype | None = None
) -> tuple[CapturedGraph, PassContext, PassResult]:
    captured = capture_decoder(Normed(norm, dtype, weight_dtype or dtype), dtype)
    ctx = pass_context(captured, dtype)
    records = run_passes(captured.gm, (Canonicalize(), EliminateNoops(), LiftNorms()), ctx)
    assert isinstance(records[-1].result, PassResult)
    return captured, ctx, records[-1].result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [like_llama, like_olmo, like_moshi, with_power, like_gemma, without_weight])
def test_lifted_norm_is_as_exact_as_the_spelling(norm: Spelling, dtype: torch.dtype) -> None:
    captured, ctx, result = lifted(norm, dtype)
    if norm is like_gemma and dtype == torch.bfloat16:
        assert result.matched == 0
        assert "1 + weight is computed in float32" in result.near_misses[0].reason
        return
    assert result == PassResult(matched=1)
    assert torch.rms_norm in [node.target for node in captured.gm.graph.nodes]
    assert torch.rsqrt not in [node.target for node in captured.gm.graph.nodes]
    generator = torch.Generator().manual_seed(3)
    table = (torch.randn(64, FEATURES, generator=generator) * 3).to(dtype)
    weight = (1 + 0.3 * torch.randn(FEATURES, generator=generator)).to(dtype)
    ids = torch.arange(64)
    exact = norm_in_float64(norm, table[ids], weight)
    theirs = norm(table[ids], weight)
    ours = compute(captured, ctx.weights, {"table": table, "weight": weight}, {"input_ids": ids, "logits_indices": ids})
    assert ours.dtype == theirs.dtype == dtype
    rounding = (theirs.double() - exact).abs().max()
    assert (ours.double() - exact).abs().max() <= rounding * (1 if dtype == torch.bfloat16 else 2)


def norm_in_float64(norm: Spelling, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if norm is without_weight:
        return normed * 2.0 + weight.double()
    return normed * (weight.double() + (norm is like_gemma))


def test_one_plus_weight_is_a_weight_of_its_own() -> None:
    _, ctx, _ = lifted(like_gemma, torch.float32)
    assert ctx.weights["weight+1"].expression == ("one_plus", "weight")


@pytest.mark.parametrize(
    ("norm", "weight_dtype", "reason"),
    [
        (like_llama, torch.float32, "its weight is torch.float32, and its input torch.bfloat16"),
        (like_olmo, torch.float32, "its weight is torch.float32, and its input torch.bfloat16"),
        (in_the_activations_dtype, torch.bfloat16, "it is computed in torch.bfloat16, not in float32"),
        (read_twice, torch.bfloat16, "the inverse root mean square does more than multiply its own input"),
    ],
)
def test_what_is_left_alone_says_why(norm: Spelling, weight_dtype: torch.dtype, reason: str) -> None:
    captured, _, result = lifted(norm, torch.bfloat16, weight_dtype)
    assert result.matched == 0
    assert [reason in miss.reason for miss in result.near_misses] == [True]
    assert "test_lift_norms.py:" in result.near_misses[0].source
    assert torch.rms_norm not in [node.target for node in captured.gm.graph.nodes]


def test_a_second_run_finds_nothing() -> None:
    captured, ctx, _ = lifted(like_llama)
    before = str(captured.gm.graph)
    assert LiftNorms().run(captured.gm, ctx) == PassResult(matched=0)
    assert str(captured.gm.graph) == before
