"""Routing and the products of experts: the reference, and the Triton kernels against it in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.moe import cuda_experts, triton_experts, triton_gemv_experts, triton_order, triton_route
from compile_and_serve.custom_ops.moe.experts import experts, pack_expert_weights
from compile_and_serve.custom_ops.moe.route import SMALLEST_SUM, route
from tests.support.numbers import relative_error

X, K, D, FEATURES = 6, 2, 48, 40  # no multiples of a tile


def routing(kind: str, num_tokens: int, num_experts: int = X, top_k: int = K) -> torch.Tensor:
    """Expert ids int32 [T, K]: drawn evenly; or the same few experts for all tokens."""
    if kind == "to_one":
        return torch.arange(top_k, dtype=torch.int32).flip(0).expand(num_tokens, top_k).contiguous()
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].to(torch.int32).contiguous()


def operands(num_tokens: int, kind: str, dtype: torch.dtype, biased: bool) -> list[torch.Tensor | None]:
    x = torch.randn(num_tokens, D).to(dtype)
    weights = torch.rand(num_tokens, K)
    gate_up, down = torch.randn(X, 2 * FEATURES, D).to(dtype) * 0.2, torch.randn(X, D, FEATURES).to(dtype) * 0.2
    biases = [torch.randn(X, 2 * FEATURES).to(dtype), torch.randn(X, D).to(dtype)] if biased else [None, None]
    return [x, routing(kind, num_tokens), weights, gate_up, down, *biases]


def by_loops(args: list[torch.Tensor | None], activation: str, limit: float) -> torch.Tensor:
    """The definition in float64, token by token and expert by expert."""
    x, ids, weights, gate_up, down = (a.double() for a in args[:5] if a is not None)
    gate_up_bias, down_bias = (a if a is None else a.double() for a in args[5:])
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            y = gate_up[expert] @ x[token] + (0 if gate_up_bias is None else gate_up_bias[expert])
            gate, up = y.chunk(2)
            if activation == "silu":
                h = F.silu(gate) * up
            else:
                gate = gate.clamp(max=limit)
                h = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(1.702 * gate)
            out[token] += weights[token, slot] * (down[expert] @ h + (0 if down_bias is None else down_bias[expert]))
    return out


TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("kind", ["even", "to_one"])
@pytest.mark.parametrize(("activation", "biased"), [("silu", False), ("clamped_swiglu", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_op_equals_the_definition(num_tokens: int, kind: str, activation: str, biased: bool, dtype: torch.dtype) -> None:
    args = operands(num_tokens, kind, dtype, biased)
    expected = by_loops(args, activation, 1.5)
    out = experts(*args, activation=activation, limit=1.5)  # type: ignore[arg-type]
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    packed = [pack_expert_weights(a) if i in (3, 4) else a for i, a in enumerate(args)]  # type: ignore[arg-type]
    out = experts(*packed, activation=activation, limit=1.5)  # type: ignore[arg-type]
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", ["gemv", "grouped"])
@pytest.mark.parametrize("num_tokens", [1, 13])
@pytest.mark.parametrize("kind", ["even", "to_one"])
@pytest.mark.parametrize(("activation", "biased"), [("silu", False), ("clamped_swiglu", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.pairwise
def test_triton_kernels_equal_the_definition(
    method: str, num_tokens: int, kind: str, activation: str, biased: bool, dtype: torch.dtype
) -> None:  # the interpreter has no products of bfloat16
    x, ids, weights, gate_up, down, gate_up_bias, down_bias = args = operands(num_tokens, kind, dtype, biased)
    ours = triton_experts.Operands(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, 1.5)  # type: ignore[arg-type]
    if method == "gemv":
        out = triton_gemv_experts.run_gemv(ours, gate_up)  # type: ignore[arg-type]
    else:
        out = triton_experts.run_grouped(triton_experts.Tiles(16, 16, 32, 32, 2, 4), ours, gate_up)  # type: ignore[arg-type]
    assert relative_error(out, by_loops(args, activation, 1.5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", [3, 40])  # with so many tokens, pairs are grouped
def test_residual_is_added(num_tokens: int) -> None:
    args = operands(num_tokens, "even", torch.float32, biased=False)
    residual = torch.randn(num_tokens, D + 2)[:, :D]
    expected = by_loops(args, "silu", 0.0) + residual.double()
    out = cuda_experts.experts(triton_experts.Operands(*args, residual_TD=residual))  # type: ignore[arg-type]
    assert relative_error(out, expected) < 1e-6
    out = torch.ops.cas.experts(*args, "silu", 0.0, residual)
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_norm_comes_first(num_tokens: int) -> None:
    args = operands(num_tokens, "even", torch.float32, biased=True)
    weight = torch.randn(D)
    normed = F.rms_norm(args[0].double(), (D,), weight.double(), 1e-5)  # type: ignore[union-attr]
    expected = by_loops([normed, *args[1:]], "silu", 0.0)
    out = cuda_experts.experts(triton_experts.Operands(*args, norm_weight_D=weight, eps=1e-5))  # type: ignore[arg-type]
    assert relative_error(out, expected) < 2e-6
    out = torch.ops.cas.experts(*args, "silu", 0.0, None, weight, 1e-5)
    assert relative_error(out, expected) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["even", "to_one"])
def test_a_thousand_tokens(kind: str) -> None:
    args = operands(1000, kind, torch.float32, biased=False)
    reference = experts(*args)  # type: ignore[arg-type]
    out = cuda_experts.experts(triton_experts.Operands(*args))  # type: ignore[arg-type]
    assert relative_error(out, reference.double()) < 1e-6


@pytest.mark.parametrize(("num_tokens", "turns"), [(1, [[0, 1], [2, 3], [4, 5], [0, 1]]), (2, [[0, 1, 2, 3], [0, 1, 2, 3]])])
def test_measured_calls_take_turns_with_experts(num_tokens: int, turns: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that read the same few experts again would read them from a cache, unlike a step."""
    found: list[list[int]] = []

    def methods(ours: triton_experts.Operands) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        found.append(ours.ids_TK.flatten().tolist())
        return {"one": lambda gate_up: gate_up}

    monkeypatch.setattr(cuda_experts, "methods", methods)
    ours = triton_experts.Operands(*operands(num_tokens, "to_one", torch.float32, biased=False))  # type: ignore[arg-type]
    run = cuda_experts._with_measured_ids({"one": lambda gate_up: gate_up}, ours)["one"]
    for _ in turns:
        run(ours.gate_up)
    assert found == turns


def test_measured_pairs_are_not_spread_evenly() -> None:
    """Equal numbers of pairs would fill every block of as many pairs, unlike those of a step."""
    (ids,) = cuda_experts._measured_ids(256, 8, 128, torch.device("cpu"))
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = ids.flatten().bincount(minlength=128)
    assert (counts > 16).sum() > 32
    assert counts.max() < 48


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "block_size"), [(1, 4, 16), (70, 5, 16), pytest.param(1100, 16, 64, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["even", "to_one"])
@pytest.mark.exhaustive_cases
def test_order_has_every_pair_once(num_pairs: int, num_experts: int, block_size: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_order, "_MAX_UNCOUNTED", 1000)
    ids = routing(kind, num_pairs, num_experts, top_k=1)
    order = triton_order.order_by_expert(ids, num_experts, block_size)
    blocks = order.pairs.view(-1, block_size)
    seen: list[int] = []
    for expert, pairs in zip(order.experts.tolist(), blocks.tolist(), strict=True):
        if expert < 0:
            continue
        taken = [pair for pair in pairs if pair < num_pairs]
        assert taken
        assert taken == sorted(taken)
        assert pairs == taken + [num_pairs] * (block_size - len(taken))
        assert all(int(ids[pair, 0]) == expert for pair in taken)
        seen += taken
    assert sorted(seen) == list(range(num_pairs))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_experts", "num_groups", "top_groups"), [(128, 1, 1), (60, 1, 1), (64, 8, 4), (8, 8, 3), (60, 5, 2)])
@pytest.mark.parametrize("group_best", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.pairwise
def test_route_kernel_equals_reference(
    scoring: str, num_experts: int, num_groups: int, top_groups: int, group_best: int, biased: bool, renormalize: bool
) -> None:
    logits = torch.randn(11, num_experts + 3)[:, :num_experts]
    bias = torch.randn(num_experts) * 0.3 if biased else None
    settings = (3, scoring, renormalize, 2.5, bias, num_groups, top_groups, group_best)
    weights, ids = triton_route.route(logits, *settings, smallest_sum=SMALLEST_SUM)
    expected_weights, expected_ids = torch.ops.cas.route(logits, *settings)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_route_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, ids = route(logits, 2, renormalize=True)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 1.0]]).softmax(-1))
    # the bias decides which expert is chosen, the score its weight
    weights, ids = route(logits, 1, scoring="sigmoid", renormalize=False, bias_X=torch.tensor([9.0, 0, 0, 0]))
    assert ids.tolist() == [[0]]
    assert weights.item() == 0.5
    # of two groups, the one with the best pair
    weights, ids = route(torch.tensor([[3.0, -9.0, 2.0, 2.0]]), 2, scoring="sigmoid", num_groups=2, top_groups=1)
    assert sorted(ids[0].tolist()) == [2, 3]


def test_nan_logits_stay_inside_the_experts() -> None:
    _, ids = triton_route.route(torch.full((2, 6), float("nan")), 2, smallest_sum=SMALLEST_SUM)
    assert ids.min() >= 0
    assert ids.max() < 6
