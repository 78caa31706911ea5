"""`cas::experts`: the gated MLPs of the experts that each token is routed to, and the weighted sum of their results.

Shape legend: T tokens, K experts of a token, P = T · K pairs, X experts, D hidden size, F intermediate size of an expert.

Weights of experts are stacked, gate rows before up rows. There are two layouts:
- plain [X, 2F, D] and [X, D, F];
- packed, one dimension more: `pack_linear_weight` of each expert's matrix, for the C++ kernels of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.linear.fused_linear import fused_linear, pack_linear_weight
from compile_and_serve.custom_ops.moe.expert_load import count_call

ACTIVATIONS = ("silu", "clamped_swiglu")
CLAMPED_SWIGLU_ALPHA = 1.702


def activate(gate: torch.Tensor, up: torch.Tensor, activation: str, limit: float) -> torch.Tensor:
    """silu(gate) · up; or with "clamped_swiglu" min(gate, limit) · σ(1.702 · min(gate, limit)) · (clamp(up, ±limit) + 1)."""
    if activation == "silu":
        return F.silu(gate) * up
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_ALPHA * gate) * (up.clamp(-limit, limit) + 1)


def pack_expert_weights(weight_XOI: torch.Tensor) -> torch.Tensor:
    """`pack_linear_weight` of each expert's matrix; the same tensor where that is the plain layout."""
    if pack_linear_weight(weight_XOI[0]).dim() == 2:
        return weight_XOI
    return torch.stack([pack_linear_weight(weight_OI) for weight_OI in weight_XOI])


def _expert_mlp(
    gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None,
    activation: str, limit: float,
) -> Callable[[torch.Tensor, int], torch.Tensor]:  # fmt: skip
    """The function of one expert's rows [R, D] and its number. → [R, D] in the rows' dtype, before the router's weight"""
    is_packed = gate_up.dim() == 4

    def bias_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
        return None if bias is None else bias[expert]

    def of_plain(x_RD: torch.Tensor, expert: int) -> torch.Tensor:
        gate_up_RO = F.linear(x_RD, gate_up[expert], bias_of(gate_up_bias, expert))
        math_dtype = torch.promote_types(x_RD.dtype, torch.float32)
        gate, up = gate_up_RO.to(math_dtype).chunk(2, dim=-1)
        h_RF = activate(gate, up, activation, limit).to(x_RD.dtype)
        return F.linear(h_RF, down[expert], bias_of(down_bias, expert))

    def of_packed(x_RD: torch.Tensor, expert: int) -> torch.Tensor:
        hidden = x_RD.shape[1]
        lanes = down.shape[3] // 16
        features = down.shape[2] * lanes
        is_silu = activation == "silu"
        bias = bias_of(gate_up_bias, expert)
        h_RF = fused_linear(x_RD, gate_up[expert], 2 * features, bias_O=bias, silu_mul=is_silu)
        if not is_silu:
            gate, up = h_RF.float().chunk(2, dim=-1)
            h_RF = activate(gate, up, activation, limit).to(x_RD.dtype)
        return fused_linear(h_RF, down[expert], hidden, bias_O=bias_of(down_bias, expert))

    return of_packed if is_packed else of_plain


def _experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float = 0.0,
    residual_TD: torch.Tensor | None = None,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    count_call(ids_TK, down)
    num_tokens, top_k = ids_TK.shape
    math_dtype = torch.promote_types(x_TD.dtype, torch.float32)
    run = _expert_mlp(gate_up, down, gate_up_bias, down_bias, activation, limit)
    flat_ids = ids_TK.reshape(-1)
    order = flat_ids.argsort(stable=True)
    counts = flat_ids.bincount(minlength=gate_up.shape[0]).tolist()
    if norm_weight_D is not None:
        x_TD = F.rms_norm(x_TD, (x_TD.shape[1],), norm_weight_D, eps)
    x_PD = x_TD.index_select(0, order // top_k)
    y_PD = x_TD.new_empty(num_tokens * top_k, x_TD.shape[1], dtype=math_dtype)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            y_PD[begin : begin + count] = run(x_PD[begin : begin + count], expert)
            begin += count
    y_PD *= weights_TK.to(math_dtype).reshape(-1)[order, None]
    by_pair = torch.empty_like(y_PD).index_copy_(0, order, y_PD)
    out_TD = by_pair.view(num_tokens, top_k, -1).sum(1)
    return (out_TD if residual_TD is None else out_TD + residual_TD).to(x_TD.dtype)


def _experts_fake(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float = 0.0,
    residual_TD: torch.Tensor | None = None,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    return x_TD.new_empty(x_TD.shape)


def _experts_cuda(
    x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *args: Any,
    **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    # imported here, because Triton may be missing
    from compile_and_serve.custom_ops.moe.triton_experts import experts as triton_experts

    count_call(ids_TK, down)
    return triton_experts(x_TD, ids_TK, weights_TK, gate_up, down, *args, **kwargs)


_experts_op = define(
    "experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None, "
    'Tensor? down_bias=None, str activation="silu", float limit=0.0, Tensor? residual=None, '
    "Tensor? norm_weight=None, float eps=1e-6) -> Tensor",
    kind=OpKind.CAPTURABLE,
    version=1,
    fake=_experts_fake,
    CompositeExplicitAutograd=_experts,
    CUDA=_experts_cuda,
)


def experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    limit: float = 0.0,
    residual_TD: torch.Tensor | None = None,
    norm_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """out = Σ_k weight_k · (f(x Wgᵀ + bg, x Wuᵀ + bu) Wdᵀ + bd) [+ residual], with the W of expert id_k and f = `activate`.

    x_TD: [T, D]. ids_TK: integers [T, K], a token's ids differ. weights_TK: floating [T, K]. gate_up: [X, 2F, D], gate rows before up rows;
    down: [X, D, F]; both plain or both packed. gate_up_bias: [X, 2F]. down_bias: [X, D]. limit: of "clamped_swiglu". residual_TD: [T, D].
    norm_weight_D: x is rms_norm(x) · norm_weight before the products.
    → [T, D] in x's dtype
    Products and sums are in float32; f's result, each expert's result and the output are rounded to x's dtype.
    """
    assert activation in ACTIVATIONS, activation
    return _experts_op(
        x_TD,
        ids_TK,
        weights_TK,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation,
        limit,
        residual_TD,
        norm_weight_D,
        eps,
    )
