"""`cas::quantized_linear` and `cas::quantized_mlp` on CUDA: the ways to compute them, and the choice among them.

Shape legend: T tokens, I input features, O output features.

- 1 token: one kernel that streams the weight and rounds the activations by itself (`triton_quantized_gemv`), or tiles as below;
- up to MAX_TILE_TOKENS: tiles of the weight, with all that follows in the same kernel (`triton_quantized_matmul`), or a library's
  matrix product (`scaled_gemm`) between elementwise kernels: each way is measured as a whole, once a shape and range of token counts
  (`choices`);
- more: the fastest matrix product, measured likewise; the tiles where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import overload

import torch

from compile_and_serve.custom_ops.linear.token_chunks import MAX_CHUNK_TOKENS, token_chunks
from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.quantized.cutlass_gemm import load_gemms
from compile_and_serve.custom_ops.quantized.quantization import Activations, Rounded
from compile_and_serve.custom_ops.quantized.quantized_linear import check_arguments, pair_of, reads_rounded
from compile_and_serve.custom_ops.quantized.scaled_gemm import EXPANDED, gemm_names, scaled_gemm
from compile_and_serve.custom_ops.quantized.triton_gemv import gemv
from compile_and_serve.custom_ops.quantized.triton_matmul import matmul
from compile_and_serve.custom_ops.quantized.triton_quantize import quantize_rows
from compile_and_serve.custom_ops.tuning.tuner import fastest

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
    activations: Activations = "none"
    input_scale: torch.Tensor | None = None
    rounded: Rounded | None = None

    def __post_init__(self) -> None:
        check_arguments(self.weight_OI, self.scale, self.activations, self.input_scale, self.rounded)

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
            *(("comes_rounded",) if self.rounded is not None else ()),
            *(("cutlass",) if self._has_cutlass() else ()),  # measured again when it is built
        )
        return " ".join(parts)

    def _has_cutlass(self) -> bool:
        is_float8 = self.weight_OI.is_cuda and self.weight_OI.dtype == torch.float8_e4m3fn
        return is_float8 and load_gemms(self.weight_OI.device) is not None

    def fastest_way(self, most: int = 1) -> str:
        """The way to take: measured, where it may be. most: as many tokens may come, whatever there are now."""
        runs = {way: partial(self.run, way) for way in self.ways()}
        return fastest(self.family(), self.x_TI.shape[0], runs, self.weight_OI, most=most)

    def run(self, way: str, weight_OI: torch.Tensor | None = None, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        """The result by one of `ways`. weight_OI: in place of the weight (when measuring). out_TO: contiguous, where it is to be."""
        weight_OI = self.weight_OI if weight_OI is None else weight_OI
        is_product = way not in (GEMV, TILE) and self.bias_O is None and not self.silu_mul
        if out_TO is not None and not is_product:
            return out_TO.copy_(self.run(way, weight_OI))
        if way == GEMV:
            return gemv(
                self.x_TI, weight_OI, self.scale, self.norm_weight_I, self.eps, self.bias_O, self.silu_mul, self.residual_TO,
                self.activations, self.input_scale,
            )  # fmt: skip
        x_TI, x_scale = self.operand()
        if way == TILE:
            return matmul(
                x_TI, x_scale, weight_OI, self.scale, self.bias_O, self.silu_mul, self.residual_TO, self.x_TI.dtype
            )
        if is_product:
            return scaled_gemm(way, x_TI, x_scale, weight_OI, self.scale, self.x_TI.dtype, self.residual_TO, out_TO)
        y_TO = self._product(way, x_TI, x_scale, weight_OI)
        if self.silu_mul:
            y_TO = silu_mul_rows(y_TO)
        return y_TO if self.residual_TO is None else y_TO + self.residual_TO

    def gate_and_up(self, way: str) -> torch.Tensor:
        """What SiLU-mul is taken of, by a library's product. → [T, O]"""
        assert self.silu_mul
        assert self.residual_TO is None
        return self._product(way, *self.operand(), self.weight_OI)

    def _reads_rounded(self) -> bool:
        return reads_rounded(self.x_TI.shape[0], self.x_TI.device, per_block=self.scale.dim() == 2)

    def operand(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x, normalized, rounded where it is to be, and then its scales."""
        if self.rounded is not None and self._reads_rounded():
            return self.rounded
        if self.activations != "none":
            return quantize_rows(
                self.x_TI, self.weight_OI.dtype, norm_weight_I=self.norm_weight_I, eps=self.eps,
                per_group=self.scale.dim() == 2, input_scale=self.input_scale,
            )  # fmt: skip
        if self.norm_weight_I is not None:
            return rms_norm(self.x_TI, self.norm_weight_I, self.eps), None
        return self.x_TI, None

    def _product(
        self, way: str, x_TI: torch.Tensor, x_scale: torch.Tensor | None, weight_OI: torch.Tensor
    ) -> torch.Tensor:
        y_TO = scaled_gemm(way, x_TI, x_scale, weight_OI, self.scale, self.x_TI.dtype)
        return y_TO if self.bias_O is None else y_TO + self.bias_O


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
    activations: Activations = "none",
    input_scale: torch.Tensor | None = None,
    rounded_TI: torch.Tensor | None = None,
    rounded_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `compile_and_serve.custom_ops.quantized.quantized_linear.quantized_linear` over the plain weight [O, I], by the fastest way."""
    linear = QuantizedLinear(
        x_TI=_rows(x_TI), weight_OI=weight_OI, scale=scale, norm_weight_I=norm_weight_I, eps=eps, bias_O=bias_O, silu_mul=silu_mul,
        residual_TO=_rows(residual_TO), activations=activations, input_scale=input_scale, rounded=pair_of(rounded_TI, rounded_scale),
    )  # fmt: skip
    if x_TI.shape[0] == 0:
        return x_TI.new_empty(0, out_features // 2 if silu_mul else out_features)
    return linear.run(linear.fastest_way())


def quantized_mlp(
    x_TI: torch.Tensor,
    gate_up_OI: torch.Tensor,
    gate_up_scale: torch.Tensor,
    inner_features: int,
    norm_weight_I: torch.Tensor | None,
    eps: float,
    gate_up_bias_O: torch.Tensor | None,
    gate_up_input_scale: torch.Tensor | None,
    down_OI: torch.Tensor,
    down_scale: torch.Tensor,
    out_features: int,
    down_bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor | None,
    down_input_scale: torch.Tensor | None,
    activations: Activations,
    rounded_TI: torch.Tensor | None = None,
    rounded_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `quantized_mlp` over plain weights [O, I], in `token_chunks`, each linear by its fastest way.

    Where the first is a library's product, one kernel takes SiLU-mul of it and rounds that for the second.
    """
    num_tokens = x_TI.shape[0]
    most = min(num_tokens, MAX_CHUNK_TOKENS)  # of a chunk of any prompt that is no longer
    x_TI, residual_TO, rounded = _rows(x_TI), _rows(residual_TO), pair_of(rounded_TI, rounded_scale)

    def run(at: slice, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        gate_up = QuantizedLinear(
            x_TI=x_TI[at], weight_OI=gate_up_OI, scale=gate_up_scale, norm_weight_I=norm_weight_I, eps=eps,
            bias_O=gate_up_bias_O, silu_mul=True, activations=activations, input_scale=gate_up_input_scale,
            rounded=None if rounded is None else (rounded[0][at], rounded[1][at]),
        )  # fmt: skip
        way, inner_rounded = gate_up.fastest_way(most), None
        if way in (GEMV, TILE) or gate_up.x_TI.shape[0] == 1 or activations == "none":
            inner_TI = gate_up.run(way)
        else:
            both_TO = gate_up.gate_and_up(way)
            inner_TI = both_TO[:, :inner_features]  # stands for what is never written: it has its shape
            inner_rounded = quantize_rows(
                both_TO, down_OI.dtype, silu_mul=True, per_group=down_scale.dim() == 2, input_scale=down_input_scale
            )
        down = QuantizedLinear(
            x_TI=inner_TI, weight_OI=down_OI, scale=down_scale, bias_O=down_bias_O,
            residual_TO=None if residual_TO is None else residual_TO[at], activations=activations, input_scale=down_input_scale,
        )  # fmt: skip
        # The way is that of a linear that rounds by itself: for several tokens all ways would round alike.
        return replace(down, rounded=inner_rounded).run(down.fastest_way(most), out_TO=out_TO)

    chunks = token_chunks(num_tokens)
    if len(chunks) == 1:
        return run(chunks[0])
    out_TO = x_TI.new_empty(num_tokens, out_features)
    for at in chunks:
        run(at, out_TO[at])
    return out_TO


@overload
def _rows(x_TI: torch.Tensor) -> torch.Tensor: ...
@overload
def _rows(x_TI: None) -> None: ...
def _rows(x_TI: torch.Tensor | None) -> torch.Tensor | None:
    return x_TI if x_TI is None or x_TI.stride(1) == 1 else x_TI.contiguous()
