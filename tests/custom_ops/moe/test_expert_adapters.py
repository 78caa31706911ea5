"""LoRA adapters of experts: the op and the GPU's way of computing it, against experts whose weights have the adapters merged."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler.weights.expert_slots import ExpertSite
from compile_and_serve.custom_ops.mesh import ORIGIN
from compile_and_serve.custom_ops.moe import adapted_cuda_experts, triton_experts
from compile_and_serve.custom_ops.moe.expert_adapters import ExpertAdapters
from compile_and_serve.custom_ops.moe.experts import experts, pack_expert_weights
from compile_and_serve.custom_ops.quantization import quantize_weight, row_scales
from tests.custom_ops.moe.test_experts import FEATURES, TOLERANCE, D, X, by_loops, operands, relative_error

RANK, SLOTS = 4, 2


def adapters_of(index: torch.Tensor, dtype: torch.dtype) -> tuple[ExpertAdapters, list[list[torch.Tensor]]]:
    """Random adapters, and for each slot what they add to gate/up and to down. Slot 0 has fused gate/up, slot 1 single experts."""
    a_gate_up, b_gate_up = torch.zeros(SLOTS, X, 2 * RANK, D), torch.zeros(SLOTS, X, 2 * FEATURES // 16, RANK, 16)
    a_down, b_down = torch.zeros(SLOTS, X, RANK, FEATURES), torch.zeros(SLOTS, X, D // 16, RANK, 16)
    facts = {"num_experts": X, "a": "", "b": "", "by_columns": 0, "by_rows": 0}
    gate_up = ExpertSite(module="gate_up", in_features=D, out_features=2 * FEATURES, parts=2, **facts)  # type: ignore[arg-type]
    down = ExpertSite(module="down", in_features=FEATURES, out_features=D, parts=1, **facts)  # type: ignore[arg-type]
    deltas = []
    for slot, rank in enumerate((RANK, 3)):
        changes = [torch.zeros(X, 2 * FEATURES, D), torch.zeros(X, D, FEATURES)]
        for site, a, b, change in ((gate_up, a_gate_up, b_gate_up, changes[0]), (down, a_down, b_down, changes[1])):
            if slot == 0:  # all experts together: rows expert by expert, columns rank by rank
                own_a, own_b = torch.randn(X * rank, site.in_features), torch.randn(site.out_features, rank * X) * 0.1
                site.fill(a[slot], b[slot], own_a, own_b, ORIGIN)
                columns = own_b.view(-1, rank, X)
                change += torch.stack([columns[:, :, e] @ own_a[e * rank : (e + 1) * rank] for e in range(X)])
                continue
            for expert in (0, 3):
                rows = site.out_features // site.parts
                first = rows * (site.parts - 1)  # up, not gate
                own_a, own_b = torch.randn(rank, site.in_features), torch.randn(rows, rank) * 0.1
                site.fill(a[slot], b[slot], own_a, own_b, ORIGIN, expert, first)
                change[expert, first : first + rows] += own_b @ own_a
        deltas.append(changes)
    tensors = (tensor.to(dtype) for tensor in (a_gate_up, b_gate_up, a_down, b_down))
    return ExpertAdapters(*tensors, index), deltas


@pytest.mark.parametrize("num_tokens", [1, 260])  # with so many pairs, the GPU sorts them
@pytest.mark.parametrize("kind", ["even", "to_one"])
@pytest.mark.parametrize(("activation", "biased"), [("silu", False), ("clamped_swiglu", True)])
@pytest.mark.pairwise
def test_each_token_has_its_own_experts(num_tokens: int, kind: str, activation: str, biased: bool) -> None:
    args = operands(num_tokens, kind, torch.float32, biased)
    index = torch.randint(0, SLOTS + 1, (num_tokens,), dtype=torch.int32)
    index[0] = 1
    adapters, deltas = adapters_of(index, torch.float32)
    expected = torch.empty(num_tokens, D, dtype=torch.float64)
    for slot in range(SLOTS + 1):
        rows = index == slot
        changes = deltas[slot - 1] if slot else [0, 0]
        merged = [
            *(a[rows] for a in args[:3]),  # type: ignore[index]
            *(weight + change for weight, change in zip(args[3:5], changes, strict=True)),
            *args[5:],
        ]
        expected[rows] = by_loops(merged, activation, 1.5)
    residual = torch.randn(num_tokens, D)
    expected += residual
    options = {"activation": activation, "limit": 1.5, "residual_TD": residual}
    out = experts(*args, adapters=adapters, **options)  # type: ignore[arg-type]
    assert relative_error(out, expected) < 2e-6
    packed = [pack_expert_weights(a) if i in (3, 4) else a for i, a in enumerate(args)]  # type: ignore[arg-type]
    out = experts(*packed, adapters=adapters, **options)  # type: ignore[arg-type]
    assert relative_error(out, expected) < 2e-6
    out = adapted_cuda_experts.experts_by_linear(triton_experts.Operands(*args, **options), adapters)  # type: ignore[arg-type]
    assert relative_error(out, expected) < 2e-6


@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_without_a_gate(num_tokens: int) -> None:
    """down(relu(up(x))²), in each layout and linear by linear."""
    args = operands(num_tokens, "even", torch.float32, biased=False)
    x_TD, ids_TK, weights_TK, gate_up, down = args[:5]
    assert gate_up is not None
    assert down is not None
    up = args[3] = gate_up[:, :FEATURES].contiguous()
    hidden_XTF = torch.einsum("td,xfd->xtf", x_TD.double(), up.double()).relu().square()
    by_expert_TXD = torch.einsum("xtf,xdf->txd", hidden_XTF, down.double())
    residual = torch.randn(num_tokens, D)
    chosen = by_expert_TXD.gather(1, ids_TK.long()[:, :, None].expand(-1, -1, D))
    expected = (chosen * weights_TK.double()[:, :, None]).sum(1) + residual
    options = {"activation": "relu2", "residual_TD": residual}
    packed = [pack_expert_weights(a) if i in (3, 4) else a for i, a in enumerate(args)]  # type: ignore[arg-type]
    for out in (
        experts(*args, **options),  # type: ignore[arg-type]
        experts(*packed, **options),  # type: ignore[arg-type]
        adapted_cuda_experts.experts_by_linear(triton_experts.Operands(*args, **options), None),  # type: ignore[arg-type]
    ):
        assert relative_error(out, expected) < 2e-6


def test_tokens_without_an_adapter_have_the_plain_result() -> None:
    args = operands(9, "even", torch.float32, biased=False)
    adapters, _ = adapters_of(torch.zeros(9, dtype=torch.int32), torch.float32)
    out = experts(*args, adapters=adapters)  # type: ignore[arg-type]
    torch.testing.assert_close(out, experts(*args), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


def test_quantized_experts_keep_their_scales() -> None:
    args = operands(5, "even", torch.float16, biased=False)
    adapters, _ = adapters_of(torch.tensor([1, 0, 2, 1, 2], dtype=torch.int32), torch.float16)
    scales = [row_scales(w, torch.float8_e4m3fn) for w in args[3:5]]  # type: ignore[arg-type]
    values = [quantize_weight(w, s, torch.float8_e4m3fn) for w, s in zip(args[3:5], scales, strict=True)]  # type: ignore[arg-type]
    quantized = [*args[:3], *values]
    expected = experts(*quantized, gate_up_scale=scales[0], down_scale=scales[1], adapters=adapters)  # type: ignore[arg-type]
    ours = triton_experts.Operands(*quantized, gate_up_scale=scales[0], down_scale=scales[1])  # type: ignore[arg-type]
    out = adapted_cuda_experts.experts_by_linear(ours, adapters)
    assert relative_error(out, expected.double()) < TOLERANCE[torch.float16]
