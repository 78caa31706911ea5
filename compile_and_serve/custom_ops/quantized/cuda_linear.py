"""`cas::quantized_linear` on CUDA: its kernels, and the choice of the fastest.

Shape legend: T tokens, I input features, O output features.

- 1 token: a kernel that streams the weight and quantizes the activations itself (`triton_gemv`), or tiles as below;
- up to MAX_TILE_TOKENS: tiles of the weight, with the whole epilogue in the same kernel (`triton_matmul`), or a library's
  matrix product between elementwise kernels (`scaled_gemm`), with float8 also one with SiLU-mul in it (`silu_mul_gemm`);
- more: the fastest library product; the tiles where no library takes the operands.

The tuner measures each kernel with its prologue and epilogue, once for each shape and range of token counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import overload

import torch

from compile_and_serve.custom_ops.linear.silu_mul_gemm import SCALED, load_silu_mul_gemms, run_silu_mul_gemm
from compile_and_serve.custom_ops.linear.silu_mul_gemm import unsupported_reason as silu_mul_unsupported_reason
from compile_and_serve.custom_ops.linear.token_chunks import CHUNK_TOKENS, token_chunks
from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import Activations, Quantized, dtype_name
from compile_and_serve.custom_ops.quantized.arguments import check_arguments, pair_of
from compile_and_serve.custom_ops.quantized.cutlass_gemm import load_gemms
from compile_and_serve.custom_ops.quantized.deep_gemm import DEEP, load_deep_gemms
from compile_and_serve.custom_ops.quantized.scaled_gemm import EXPANDED, gemm_names, scaled_gemm
from compile_and_serve.custom_ops.quantized.triton_gemv import gemv
from compile_and_serve.custom_ops.quantized.triton_matmul import matmul
from compile_and_serve.custom_ops.triton_quantize import quantize_rows
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel
from compile_and_serve.custom_ops.tuning.tuner import Problem

GEMV, TILE, SCALED_SILU_MUL = "gemv", "tile", "silu_mul"
MAX_TILE_TOKENS = 256
_MAX_UNMEASURED_TILE_TOKENS = 16  # up to here tiles are the default without a measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLinear:
    """A call of the op over the plain weight [O, I]. The fields are the op's arguments. The host never waits for the device."""

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
    quantized: Quantized | None = None

    def __post_init__(self) -> None:
        check_arguments(self.weight_OI, self.scale, self.activations, self.input_scale, self.quantized)

    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that take this call; the first is the default without a measurement."""
        num_tokens, is_quantized = self.x_TI.shape[0], self.activations != "none"
        if num_tokens == 1 and self.scale.dim() == 1:
            return (GEMV, TILE) if self.weight_OI.shape[1] % 4 == 0 else (TILE,)
        gemms = gemm_names(num_tokens, self.weight_OI, self.scale, self.x_TI.dtype, is_quantized=is_quantized) + self._silu_mul_gemm()
        if num_tokens > MAX_TILE_TOKENS and gemms:
            return gemms
        tile_first = num_tokens <= _MAX_UNMEASURED_TILE_TOKENS or gemms == (EXPANDED,)
        return (TILE, *gemms) if tile_first else (*gemms, TILE)

    def problem(self) -> Problem:
        """What the fastest kernel depends on."""
        kept = ("norm_weight_I", "bias_O", "residual_TO")
        parts = (
            f"{dtype_name(self.weight_OI.dtype)} {'x'.join(map(str, self.weight_OI.shape))}",
            "by_row" if self.scale.dim() == 1 else "by_block",
            f"{dtype_name(self.x_TI.dtype)} {self.activations}",
            *(name.rpartition("_")[0] for name in kept if getattr(self, name) is not None),
            *(("silu_mul",) if self.silu_mul else ()),
            *(("quantized_input",) if self.quantized is not None else ()),
            *self._libraries(),  # measured again once another one is built
        )
        return Problem(kind="quantized_linear", name=" ".join(parts), num_tokens=self.x_TI.shape[0])

    def _libraries(self) -> tuple[str, ...]:
        """The libraries that are built and may have products for this call. The others are not asked for, since that would build them."""
        device = self.weight_OI.device
        is_float8 = self.weight_OI.dtype == torch.float8_e4m3fn and self.activations != "none"
        if not is_float8 or self.x_TI.dtype != torch.bfloat16 or not platform_of(device).runs_cuda_kernels:
            return ()
        libraries = {
            "cutlass": load_gemms(device),
            "cutlass_silu_mul": self._silu_mul_gemm(),
            "deep_gemm": load_deep_gemms(device) if self.scale.dim() == 2 else None,
        }
        return tuple(name for name, library in libraries.items() if library)

    def _silu_mul_gemm(self) -> tuple[str, ...]:
        """Name of the product with SiLU-mul in it, if it takes this call and is built."""
        is_plain = self.silu_mul and self.bias_O is None and self.residual_TO is None and self.x_TI.dtype == torch.bfloat16
        is_scaled_by_rows = self.activations != "none" and self.scale.dim() == 1 and platform_of(self.weight_OI.device).runs_cuda_kernels
        # Quantized activations have the weight's layout, contiguous rows of I.
        if not (is_plain and is_scaled_by_rows) or silu_mul_unsupported_reason(self.weight_OI, self.weight_OI, torch.float8_e4m3fn):
            return ()
        return (SCALED_SILU_MUL,) if load_silu_mul_gemms(self.weight_OI.device) is not None else ()

    def fastest(self, max_tokens: int = 1) -> str:
        """Name of the kernel to run. max_tokens: the most tokens that another call may have."""
        runs = {kernel: partial(self.run, kernel) for kernel in self.kernels()}
        return fastest_kernel(self.problem(), runs, self.weight_OI, max_tokens=max_tokens)

    def run(self, kernel: str, weight_OI: torch.Tensor | None = None, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        """The result by one of `kernels`. weight_OI: replaces the weight while measuring. out_TO: contiguous, receives the result."""
        weight_OI = self.weight_OI if weight_OI is None else weight_OI
        is_silu_mul_last = kernel not in (GEMV, TILE) and self.silu_mul and self.residual_TO is None
        if out_TO is not None and not is_silu_mul_last:
            return out_TO.copy_(self.run(kernel, weight_OI))
        if kernel == GEMV:
            return gemv(
                self.x_TI,
                weight_OI,
                self.scale,
                self.norm_weight_I,
                self.eps,
                self.bias_O,
                self.silu_mul,
                self.residual_TO,
                self.activations,
                self.input_scale,
            )
        x_TI, x_scale = self.operand(group_major=kernel in DEEP)
        if kernel == TILE:
            return matmul(x_TI, x_scale, weight_OI, self.scale, self.bias_O, self.silu_mul, self.residual_TO, self.x_TI.dtype)
        if kernel == SCALED_SILU_MUL:
            library = load_silu_mul_gemms(x_TI.device)
            assert library is not None, "kernels() named a product that is not built"
            assert x_scale is not None
            return run_silu_mul_gemm(library, SCALED, x_TI, weight_OI, out_TO, (x_scale, self.scale))
        if self.bias_O is None and not self.silu_mul:
            return scaled_gemm(kernel, x_TI, x_scale, weight_OI, self.scale, self.x_TI.dtype, self.residual_TO)
        y_TO = scaled_gemm(kernel, x_TI, x_scale, weight_OI, self.scale, self.x_TI.dtype)
        if self.bias_O is not None:
            y_TO = y_TO + self.bias_O
        if self.silu_mul:
            y_TO = silu_mul_rows(y_TO, out_TO)
        return y_TO if self.residual_TO is None else y_TO + self.residual_TO

    def operand(self, *, group_major: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x after the norm, quantized with its scales where activations are quantized.

        group_major: as in `quantize_rows`, for scales that are made here.
        """
        if self.quantized is not None:
            return self.quantized
        if self.activations != "none":
            return quantize_rows(
                self.x_TI,
                self.weight_OI.dtype,
                norm_weight_I=self.norm_weight_I,
                eps=self.eps,
                per_group=self.scale.dim() == 2,
                input_scale=self.input_scale,
                group_major=group_major,
            )
        if self.norm_weight_I is not None:
            return rms_norm(self.x_TI, self.norm_weight_I, self.eps), None
        return self.x_TI, None


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
    quantized_TI: torch.Tensor | None = None,
    quantized_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `compile_and_serve.custom_ops.quantized.quantized_linear.quantized_linear`, over the plain weight [O, I].

    With SiLU-mul, long prompts run in `token_chunks`, so that the product before it takes the memory of one chunk.
    """
    num_tokens, stored_features = x_TI.shape[0], out_features // 2 if silu_mul else out_features
    x_TI, residual_TO, quantized = _rows(x_TI), _rows(residual_TO), pair_of(quantized_TI, quantized_scale)
    chunks = token_chunks(num_tokens, CHUNK_TOKENS) if silu_mul else [slice(0, num_tokens)]
    max_tokens = min(num_tokens, CHUNK_TOKENS) if silu_mul else num_tokens

    def run(at: slice, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        linear = QuantizedLinear(
            x_TI=x_TI[at],
            weight_OI=weight_OI,
            scale=scale,
            norm_weight_I=norm_weight_I,
            eps=eps,
            bias_O=bias_O,
            silu_mul=silu_mul,
            residual_TO=None if residual_TO is None else residual_TO[at],
            activations=activations,
            input_scale=input_scale,
            quantized=None if quantized is None else (quantized[0][at], quantized[1][at]),
        )
        return linear.run(linear.fastest(max_tokens), out_TO=out_TO)

    if num_tokens and len(chunks) == 1:
        return run(chunks[0])
    result_TO = x_TI.new_empty(num_tokens, stored_features)
    for at in chunks if num_tokens else ():
        run(at, result_TO[at])
    return result_TO


@overload
def _rows(x_TI: torch.Tensor) -> torch.Tensor: ...
@overload
def _rows(x_TI: None) -> None: ...
def _rows(x_TI: torch.Tensor | None) -> torch.Tensor | None:
    return x_TI if x_TI is None or x_TI.stride(1) == 1 else x_TI.contiguous()
