"""`cas::quantized_linear` on CUDA: the ways to compute it, and the choice among them.

Shape legend: T tokens, I input features, O output features.

- 1 token: one kernel that streams the weight and rounds the activations by itself (`triton_quantized_linear.gemv`), or tiles as below;
- up to MAX_TILE_TOKENS: tiles of the weight, with all that follows in the same kernel (`triton_quantized_linear.matmul`), or a library's
  matrix product (`scaled_gemm`) between elementwise kernels: each way is measured as a whole, once a shape and range of token counts
  (`choices`);
- more: the fastest matrix product, measured likewise; the tiles where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from custom_ops.choices import fastest
from custom_ops.scaled_gemm import EXPANDED, gemm_names, scaled_gemm
from custom_ops.triton_elementwise import rms_norm, silu_mul_rows
from custom_ops.triton_quantize import quantize_rows
from custom_ops.triton_quantized_linear import gemv, matmul

GEMV, TILE = "gemv", "tile"
MAX_TILE_TOKENS = 256
_MAX_UNMEASURED_TILE_TOKENS = 16  # up to here the tiles are taken where nothing could be measured


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLinear:
    """One call of the op, over the plain weight [O, I]; the fields are its arguments. No host synchronization."""

    x_TI: torch.Tensor
    weight_OI: torch.Tensor
    scale: torch.Tensor
    norm_weight_I: torch.Tensor | None = None
    eps: float = 1e-6
    bias_O: torch.Tensor | None = None
    silu_mul: bool = False
    residual_TO: torch.Tensor | None = None
    activations: str = "none"
    input_scale: torch.Tensor | None = None

    def ways(self) -> tuple[str, ...]:
        """The ways that take this call, the one to take without measuring first."""
        num_tokens, is_rounded = self.x_TI.shape[0], self.activations != "none"
        if num_tokens == 1 and self.scale.dim() == 1:
            return (GEMV, TILE) if self.weight_OI.shape[1] % 4 == 0 else (TILE,)
        gemms = gemm_names(num_tokens, self.weight_OI, self.scale, self.x_TI.dtype, is_rounded=is_rounded)
        if num_tokens > MAX_TILE_TOKENS and gemms:
            return gemms
        tile_first = num_tokens <= _MAX_UNMEASURED_TILE_TOKENS or gemms == (EXPANDED,)
        return (TILE, *gemms) if tile_first else (*gemms, TILE)

    def family(self) -> str:
        """What the fastest way depends on besides the number of tokens."""
        kept = ("norm_weight_I", "bias_O", "residual_TO")
        parts = (
            f"{_name(self.weight_OI.dtype)} {'x'.join(map(str, self.weight_OI.shape))}",
            "by_row" if self.scale.dim() == 1 else "by_block",
            f"{_name(self.x_TI.dtype)} {self.activations}",
            *(name.rpartition("_")[0] for name in kept if getattr(self, name) is not None),
            *(("silu_mul",) if self.silu_mul else ()),
        )
        return " ".join(parts)

    def run(self, way: str, weight_OI: torch.Tensor | None = None) -> torch.Tensor:
        """The result by one of `ways`. weight_OI: in place of the weight (when measuring)."""
        weight_OI = self.weight_OI if weight_OI is None else weight_OI
        if way == GEMV:
            return gemv(
                self.x_TI, weight_OI, self.scale, self.norm_weight_I, self.eps, self.bias_O, self.silu_mul, self.residual_TO,
                self.activations, self.input_scale,
            )  # fmt: skip
        dtype, x_TI, x_scale = self.x_TI.dtype, self.x_TI, None
        if self.activations != "none":
            x_TI, x_scale = quantize_rows(
                x_TI, weight_OI.dtype, norm_weight_I=self.norm_weight_I, eps=self.eps,
                per_group=self.scale.dim() == 2, input_scale=self.input_scale,
            )  # fmt: skip
        elif self.norm_weight_I is not None:
            x_TI = rms_norm(x_TI, self.norm_weight_I, self.eps)
        if way == TILE:
            return matmul(x_TI, x_scale, weight_OI, self.scale, self.bias_O, self.silu_mul, self.residual_TO, dtype)
        y_TO = scaled_gemm(way, x_TI, x_scale, weight_OI, self.scale, dtype)
        if self.bias_O is not None:
            y_TO = y_TO + self.bias_O
        if self.silu_mul:
            y_TO = silu_mul_rows(y_TO)
        return y_TO if self.residual_TO is None else y_TO + self.residual_TO


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def quantized_linear(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    scale: torch.Tensor,
    out_features: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    activations: str = "none",
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `custom_ops.quantized_linear.quantized_linear` over the plain weight [O, I], by the fastest way."""
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    if residual_TO is not None and residual_TO.stride(1) != 1:
        residual_TO = residual_TO.contiguous()
    linear = QuantizedLinear(
        x_TI=x_TI, weight_OI=weight_OI, scale=scale, norm_weight_I=norm_weight_I, eps=eps, bias_O=bias_O, silu_mul=silu_mul,
        residual_TO=residual_TO, activations=activations, input_scale=input_scale,
    )  # fmt: skip
    if x_TI.shape[0] == 0:
        return x_TI.new_empty(0, out_features // 2 if silu_mul else out_features)
    runs = {way: partial(linear.run, way) for way in linear.ways()}
    return linear.run(fastest(linear.family(), x_TI.shape[0], runs, weight_OI))
