"""`cas::experts`: the gated MLPs of the experts that each token is routed to, and the weighted sum of their results.

Shape legend: T tokens, K experts of a token, P = T · K pairs, X experts, D hidden size, F intermediate size of an expert.

Weights of experts are stacked, gate rows before up rows. There are two layouts:
- plain [X, 2F, D] and [X, D, F];
- packed, one dimension more, for the C++ kernels of the CPU (`packed_experts.py`).
Where experts are spread over ranks, there is a weight for each of the rank's slots instead of each expert (`placement.py`).
Quantized weights come with scales: MXFP4 as checkpoints hold it (uint8), in the Triton layout (int16) of `quantized/mxfp4.py`, or packed.
Codes of other formats are described by `CodeFormat`, and may have offsets and factors: plain (uint8 [X, O, I], with scales and offsets
[X, O, G] and factors [X, 1 or 2, O, S]), in the Triton layout (int16) of `code_format.py`, or packed.
LoRA adapters: `moe/expert_adapters.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import EXPERT_COLUMNS, EXPERT_ROWS, ON_FIRST_RANK, UNGATED_EXPERT_ROWS, Sharding, define
from compile_and_serve.custom_ops.linear.fused_linear import pack_linear_weight
from compile_and_serve.custom_ops.moe.activation import ACTIVATIONS, activate_rows, num_parts
from compile_and_serve.custom_ops.moe.code_format import CodeFormat, dequantize_codes
from compile_and_serve.custom_ops.moe.expert_adapters import ExpertAdapters, expert_adapters
from compile_and_serve.custom_ops.moe.expert_load import count_call
from compile_and_serve.custom_ops.moe.packed_experts import is_packed, packed_inputs, packed_linear
from compile_and_serve.custom_ops.moe.placement import slots_of_pairs
from compile_and_serve.custom_ops.quantization import LARGEST, Activations, dequantize_weight
from compile_and_serve.custom_ops.quantized.mxfp4 import MX_BLOCK, dequantize_mxfp4
from compile_and_serve.custom_ops.quantized.quantized_linear import quantized_linear_reference

NUM_OPERANDS = 21  # arguments of the op before those of adapters
_ACTIVATIONS, _PLACEMENT = 14, 18  # the places of `activations` and `placement` among them
# Arguments that have something for each expert.
_STACKED = tuple(f"{linear}{part}" for linear in ("gate_up", "down") for part in ("", "_bias", "_scale", "_offset", "_factor", "_a", "_b"))


def pack_expert_weights(weight_XOI: torch.Tensor) -> torch.Tensor:
    """`pack_linear_weight` of each expert's matrix; the same tensor where that is the plain layout."""
    if pack_linear_weight(weight_XOI[0]).dim() == 2:
        return weight_XOI
    return torch.stack([pack_linear_weight(weight_OI) for weight_OI in weight_XOI])


@dataclass(frozen=True, slots=True)
class Linears:
    """One linear of all experts, in either layout, with its biases [X, O] and scales. out_features: O.

    activations: "dynamic" if its input is quantized to the weight's dtype. offset, codes, factor: of codes.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    out_features: int
    activations: Activations = "none"
    offset: torch.Tensor | None = None
    codes: str = ""
    factor: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        return is_packed(self.weight, self.scale)

    def of_expert(self, x_RI: torch.Tensor, expert: int, *, silu_mul: bool = False) -> torch.Tensor:
        """The rows of one expert. silu_mul: only of packed weights. → [R, O], or [R, O / 2]"""
        bias = None if self.bias is None else self.bias[expert].to(x_RI.dtype)
        if self.is_packed:
            scale, offset, factor = (None if one is None else one[expert] for one in (self.scale, self.offset, self.factor))
            return packed_linear(
                x_RI,
                self.weight[expert],
                scale,
                self.out_features,
                bias,
                silu_mul=silu_mul,
                activations=self.activations,
                offset=offset,
                codes=self.codes,
                factor=factor,
            )
        assert not silu_mul
        if self.activations == "dynamic":
            assert self.scale is not None
            return quantized_linear_reference(
                x_RI, self.weight[expert], self.scale[expert], self.out_features, None, 0.0, bias, False, None, self.activations
            )
        return F.linear(x_RI, self._matrix(expert, x_RI.dtype), bias)

    def _matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """The plain matrix of an expert, dequantized to `dtype` if the weight has scales. → [O, I]"""
        weight = self.weight[expert]
        if self.scale is None:
            return weight
        assert weight.dtype != torch.int16, "only kernels take this layout"
        scale = self.scale[expert]
        if weight.dtype in LARGEST:
            return dequantize_weight(weight, scale, dtype)
        if not self.codes:
            return dequantize_mxfp4(weight, scale, dtype)
        offset = None if self.offset is None else self.offset[expert]
        factors = () if self.factor is None else tuple(self.factor[expert])
        return dequantize_codes(weight, scale, offset, CodeFormat.of(self.codes), dtype, factors)

    def run(self, x_PI: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows that are sorted by expert, with `counts` rows of each. → [P, O]"""
        parts = enumerate(x_PI.split(counts))
        out = [self.of_expert(x_RI, expert) for expert, x_RI in parts if len(x_RI)]
        return torch.cat([x_PI.new_empty(0, self.out_features), *out])


def _mlp(x_RD: torch.Tensor, expert: int, gate_up: Linears, down: Linears, activation: str, limit: float) -> torch.Tensor:
    """The gated MLP of one expert. → [R, D] in x's dtype, before the router's weight"""
    if gate_up.is_packed and activation == "silu":
        h_RF = gate_up.of_expert(x_RD, expert, silu_mul=True)
    else:
        math_dtype = torch.promote_types(x_RD.dtype, torch.float32)
        # Where activations are quantized, an error of gate and up moves h to another float8 value, so they are not rounded before.
        operand = x_RD.to(math_dtype) if gate_up.activations == "dynamic" else x_RD
        gate_up_RO = gate_up.of_expert(operand, expert).to(math_dtype)
        h_RF = activate_rows(gate_up_RO, activation, limit).to(x_RD.dtype)
    return down.of_expert(h_RF, expert)


def _adapted_mlps(
    x_PD: torch.Tensor,
    counts: list[int],
    gate_up: Linears,
    down: Linears,
    activation: str,
    limit: float,
    adapters: ExpertAdapters,
    slots_P: torch.Tensor,
) -> torch.Tensor:
    """The gated MLPs of pairs that are sorted by expert, with adapters. counts: pairs of each expert. → [P, D]"""
    y_PO = adapters.add_to_gate_up(gate_up.run(x_PD, counts), x_PD, slots_P)
    h_PF = activate_rows(y_PO.to(torch.promote_types(x_PD.dtype, torch.float32)), activation, limit).to(x_PD.dtype)
    return adapters.add_to_down(down.run(h_PF, counts), h_PF, slots_P)


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
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    activations: Activations = "none",
    gate_up_offset: torch.Tensor | None = None,
    down_offset: torch.Tensor | None = None,
    codes: str = "",
    placement: torch.Tensor | None = None,
    gate_up_factor: torch.Tensor | None = None,
    down_factor: torch.Tensor | None = None,
    *adapter_tensors: torch.Tensor | None,
) -> torch.Tensor:
    count_call(ids_TK, down if placement is None else placement)
    if placement is not None:
        ids_TK = slots_of_pairs(ids_TK, placement)
    _check_activations(activations, gate_up, gate_up_scale)
    adapters = expert_adapters(*adapter_tensors)
    num_tokens, top_k = ids_TK.shape
    math_dtype = torch.promote_types(x_TD.dtype, torch.float32)
    flat_ids = ids_TK.reshape(-1)
    order = flat_ids.argsort(stable=True)
    # Pairs of other ranks come last, and are computed by nobody here.
    counts = flat_ids.bincount(minlength=gate_up.shape[0]).tolist()[: gate_up.shape[0]]
    order = order[: sum(counts)]
    if norm_weight_D is not None:
        x_TD = F.rms_norm(x_TD, (x_TD.shape[1],), norm_weight_D, eps)
    x_PD = x_TD.index_select(0, order // top_k)
    # Packed rows may be padded, so the inputs of down tell the number of features.
    features = packed_inputs(down) if is_packed(down, down_scale) else gate_up.shape[1] // num_parts(activation)
    rows = num_parts(activation) * features
    linears = (
        Linears(gate_up, gate_up_bias, gate_up_scale, rows, activations, gate_up_offset, codes.partition("|")[0], gate_up_factor),
        Linears(down, down_bias, down_scale, x_TD.shape[1], activations, down_offset, codes.rpartition("|")[2], down_factor),
    )
    if adapters is None:
        y_PD = x_TD.new_empty(len(order), x_TD.shape[1], dtype=math_dtype)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                y_PD[begin : begin + count] = _mlp(x_PD[begin : begin + count], expert, *linears, activation, limit)
                begin += count
    else:
        slots_P = adapters.slots_of_pairs(ids_TK)[order]
        y_PD = _adapted_mlps(x_PD, counts, *linears, activation, limit, adapters, slots_P).to(math_dtype)
    y_PD *= weights_TK.to(math_dtype).reshape(-1)[order, None]
    by_pair = y_PD.new_zeros(num_tokens * top_k, x_TD.shape[1]).index_copy_(0, order, y_PD)
    out_TD = by_pair.view(num_tokens, top_k, -1).sum(1)
    return (out_TD if residual_TD is None else out_TD + residual_TD).to(x_TD.dtype)


def _check_activations(activations: str, gate_up: torch.Tensor, gate_up_scale: torch.Tensor | None) -> None:
    if activations not in ("none", "dynamic"):
        raise ValueError(f"The activations of experts must be 'none' or 'dynamic', not {activations!r}.")
    if activations == "dynamic" and (gate_up.dtype != torch.float8_e4m3fn or gate_up_scale is None):
        raise ValueError(f"The activations of experts are quantized over float8 weights with scales only, not over {gate_up.dtype}.")


def _exact_experts(*args: Any) -> torch.Tensor:
    """`experts` without quantizing activations."""
    exact = (*args[:_ACTIVATIONS], "none", *args[_ACTIVATIONS + 1 :])
    return _experts(*exact)


def _expert_features(gate_up: torch.Tensor, down: torch.Tensor) -> int:
    """Intermediate features of an expert, from its projections in any layout."""
    if down.dtype == torch.int16:
        return gate_up.shape[1] // 2
    if down.dtype == torch.uint8 and down.dim() == 4:  # MXFP4 of a checkpoint, or packed codes
        return down.shape[2] * MX_BLOCK
    return down.shape[2] if down.dim() == 3 else down.shape[2] * (down.shape[3] // 16)


def _flops(x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *_: Any) -> int:
    return 2 * ids_TK.numel() * x_TD.shape[1] * 3 * _expert_features(gate_up, down)


def _read_shares(*args: Any) -> dict[str, float]:
    """Of each expert's weights, the chance that a token goes to it, if all choices are equally likely."""
    (num_tokens, top_k), gate_up = args[1].shape, args[3]
    placement = args[_PLACEMENT] if len(args) > _PLACEMENT else None
    num_experts = gate_up.shape[0] if placement is None else placement.shape[0]
    return dict.fromkeys(_STACKED, 1 - (1 - top_k / num_experts) ** num_tokens)


def _experts_cuda(*args: Any) -> torch.Tensor:
    # imported here, because Triton may be missing
    from compile_and_serve.custom_ops.moe.adapted_cuda_experts import experts_by_linear
    from compile_and_serve.custom_ops.moe.cuda_experts import experts as cuda_experts
    from compile_and_serve.custom_ops.moe.triton_experts import Operands

    operands, adapters = Operands(*args[:NUM_OPERANDS]), expert_adapters(*args[NUM_OPERANDS:])
    _check_activations(operands.activations, operands.gate_up, operands.gate_up_scale)
    count_call(operands.ids_TK, operands.down if operands.placement is None else operands.placement)
    if operands.placement is not None:
        operands = replace(operands, ids_TK=slots_of_pairs(operands.ids_TK, operands.placement))
    # The kernels that compute an activation take gate and up.
    one_by_one = adapters is not None or num_parts(operands.activation) == 1
    return experts_by_linear(operands, adapters) if one_by_one else cuda_experts(operands)


_SHARES = {"down": EXPERT_COLUMNS, "gate_up": EXPERT_ROWS, "gate_up_bias": EXPERT_ROWS, "down_bias": ON_FIRST_RANK}


def _shares(arguments: Mapping[str, Any]) -> Mapping[str, str]:
    if num_parts(arguments["activation"]) == 2:
        return _SHARES
    return {name: UNGATED_EXPERT_ROWS if function == EXPERT_ROWS else function for name, function in _SHARES.items()}


EXPERTS = define(
    "experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None, "
    'Tensor? down_bias=None, str activation="silu", float limit=0.0, Tensor? residual=None, '
    "Tensor? norm_weight=None, float eps=1e-6, Tensor? gate_up_scale=None, Tensor? down_scale=None, "
    'str activations="none", Tensor? gate_up_offset=None, Tensor? down_offset=None, str codes="", Tensor? placement=None, '
    "Tensor? gate_up_factor=None, Tensor? down_factor=None, "
    "Tensor? gate_up_a=None, Tensor? gate_up_b=None, "
    "Tensor? down_a=None, Tensor? down_b=None, Tensor? adapter_index=None) -> Tensor",
    version=7,
    fake=lambda x_TD, *_: x_TD.new_empty(x_TD.shape),
    reference=_experts,
    exact=_exact_experts,
    sharding=Sharding(output=None, weights=_SHARES, weights_of=_shares, style="experts", units=(2, "features in each expert")),
    row_wise=True,
    flops=_flops,
    read_shares=_read_shares,
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
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
    activations: Activations = "none",
    gate_up_offset: torch.Tensor | None = None,
    down_offset: torch.Tensor | None = None,
    codes: str = "",
    placement_XC: torch.Tensor | None = None,
    gate_up_factor: torch.Tensor | None = None,
    down_factor: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """out = Σ_k weight_k · (f(x Wgᵀ + bg, x Wuᵀ + bu) Wdᵀ + bd) [+ residual], with the W of expert id_k and f = `activate`.

    x_TD: [T, D]. ids_TK: integers [T, K], a token's ids differ. weights_TK: floating [T, K]. gate_up: [X, 2F, D], gate rows before up rows
    (with the activation "relu2" there is no gate: [X, F, D]);
    down: [X, D, F]; both plain, packed, quantized, or quantized and packed; gate_up_scale, down_scale: of quantized ones.
    gate_up_bias: [X, 2F]. down_bias: [X, D]. limit: of "clamped_swiglu". residual_TD: [T, D].
    norm_weight_D: x is rms_norm(x) · norm_weight before the products. adapters: of the experts' linears.
    activations: "dynamic" rounds x (after the norm) and f's result to float8 before the products with float8 weights
    (`quantize_activations`, with a scale per row, or per row and 128 inputs if the weights have scales per block). Adapters see x and f's
    result unrounded.
    gate_up_offset, down_offset: zero points or minima of codes. codes: `CodeFormat.name` of both, with a "|" between them.
    placement_XC: int32 (`placement.py`): weights are of the rank's slots, and the result is the rank's part of a sum over ranks.
    gate_up_factor, down_factor: of scales and minima (`code_format.py`).
    → [T, D] in x's dtype
    Products and sums are in float32; f's result, each expert's result and the output are rounded to x's dtype.
    """
    assert activation in ACTIVATIONS, activation
    return EXPERTS(
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
        gate_up_scale,
        down_scale,
        activations,
        gate_up_offset,
        down_offset,
        codes,
        placement_XC,
        gate_up_factor,
        down_factor,
        *(() if adapters is None else (getattr(adapters, field.name) for field in fields(adapters))),
    )
