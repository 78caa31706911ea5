"""`cas::group_linear` on CUDA: its kernels, and the choice of the fastest.

Shape legend: T tokens, I input features, O output features.

- CUDA: the weight is dequantized inside the product, in CUDA C++ (`group_gemm`), where it is built and takes the operands;
- TILE: the same in Triton (`triton_group_matmul`);
- EXPANDED: the weight is dequantized to x's dtype in scratch memory, then `fused_linear`'s kernels run.

Up to 64 tokens CUDA runs, or TILE in its place. Up to MAX_TILE_TOKENS the tuner measures all of them. Above, EXPANDED runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch

from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm, silu_mul_rows
from compile_and_serve.custom_ops.linear.triton_linear import fused_linear
from compile_and_serve.custom_ops.quantization import dtype_name
from compile_and_serve.custom_ops.quantized.group_gemm import load_group_linear, run_group_linear, unsupported_reason
from compile_and_serve.custom_ops.quantized.group_layout import TILE_OUTPUTS
from compile_and_serve.custom_ops.quantized.triton_group_matmul import dequantize, group_matmul
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel
from compile_and_serve.custom_ops.tuning.tuner import Problem

CUDA, TILE, EXPANDED = "cuda", "tile", "expanded"
_MIN_EXPANDED_TOKENS = 65  # with fewer, writing and reading the expanded weight takes longer than either of the others
MAX_TILE_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLinear:
    """A call of the op. The fields are its arguments. The host never waits for the device."""

    x_TI: torch.Tensor
    packed: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    out_features: int
    bits: int
    group_size: int
    norm_weight_I: torch.Tensor | None = None
    eps: float = 1e-6
    bias_O: torch.Tensor | None = None
    silu_mul: bool = False
    residual_TO: torch.Tensor | None = None
    table: str = ""

    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that take this call; the first is the default without a measurement."""
        num_tokens = self.x_TI.shape[0]
        if num_tokens > MAX_TILE_TOKENS:
            return (EXPANDED,)
        cuda = (CUDA,) if self._cuda_library() is not None else ()
        return (*cuda, EXPANDED, TILE) if num_tokens >= _MIN_EXPANDED_TOKENS else cuda or (TILE,)

    def problem(self) -> Problem:
        """What the fastest kernel depends on."""
        kept = ("norm_weight_I", "bias_O", "residual_TO")
        parts = (
            f"{self.bits} bits {self.out_features}x{self.x_TI.shape[1]}",
            f"groups of {self.group_size}",
            f"{dtype_name(self.scale.dtype)} {dtype_name(self.offset.dtype) if self.offset is not None else 'symmetric'}",
            dtype_name(self.x_TI.dtype),
            *(name.rpartition("_")[0] for name in kept if getattr(self, name) is not None),
            *(("silu_mul",) if self.silu_mul else ()),
            *((self.table,) if self.table else ()),
            *((CUDA,) if self._cuda_library() is not None else ()),  # measured again once it can be built
        )
        return Problem(kind="group_linear", name=" ".join(parts), num_tokens=self.x_TI.shape[0])

    def _cuda_library(self) -> ctypes.CDLL | None:
        reason = unsupported_reason(
            self.x_TI, self.scale, self.offset, self.out_features, self.bits, self.group_size, self.silu_mul, self.table
        )
        return load_group_linear(self.x_TI.device) if reason is None else None

    def fastest(self) -> str:
        """Name of the kernel to run."""
        runs = {kernel: partial(self.run, kernel) for kernel in self.kernels()}
        if len(runs) == 1:
            return next(iter(runs))
        return fastest_kernel(self.problem(), runs, self.packed, min_tokens=_MIN_EXPANDED_TOKENS, max_tokens=MAX_TILE_TOKENS)

    def run(self, kernel: str, packed: torch.Tensor | None = None) -> torch.Tensor:
        """The result by one of `kernels`. packed: replaces the weight while measuring."""
        packed = self.packed if packed is None else packed
        if kernel == EXPANDED:
            in_features = self.x_TI.shape[1]
            weight_OI = dequantize(
                packed, self.scale, self.offset, self.out_features, in_features, self.bits, self.group_size, self.x_TI.dtype, self.table
            )
            return fused_linear(
                self.x_TI, weight_OI, self.out_features, self.norm_weight_I, self.eps, self.bias_O, self.silu_mul, self.residual_TO
            )
        x_TI = self.x_TI
        if self.norm_weight_I is not None:
            x_TI = rms_norm(x_TI, self.norm_weight_I, self.eps)
        if kernel == CUDA:
            library = self._cuda_library()
            assert library is not None, "not one of `kernels`"
            return run_group_linear(
                library,
                x_TI,
                packed,
                self.scale,
                self.offset,
                self.out_features,
                self.group_size,
                self.bias_O,
                self.silu_mul,
                self.residual_TO,
            )
        weight = (packed, self.scale, self.offset, self.out_features, self.bits, self.group_size)
        if self.silu_mul and self.out_features // 2 % TILE_OUTPUTS:
            y_TO = silu_mul_rows(group_matmul(x_TI, *weight, self.bias_O, False, None, table=self.table))
            return y_TO if self.residual_TO is None else y_TO + self.residual_TO
        return group_matmul(x_TI, *weight, self.bias_O, self.silu_mul, self.residual_TO, table=self.table)


def group_linear(
    x_TI: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    norm_weight_I: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias_O: torch.Tensor | None = None,
    silu_mul: bool = False,
    residual_TO: torch.Tensor | None = None,
    table: str = "",
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `compile_and_serve.custom_ops.quantized.group_linear.group_linear`, over a weight in the Triton layout, which has no factors."""
    assert factor is None, "only packed weights of the CPU have factors"
    if x_TI.stride(1) != 1:
        x_TI = x_TI.contiguous()
    if residual_TO is not None and residual_TO.stride(1) != 1:
        residual_TO = residual_TO.contiguous()
    if not x_TI.shape[0]:
        return x_TI.new_empty(0, out_features // 2 if silu_mul else out_features)
    linear = GroupLinear(
        x_TI=x_TI,
        packed=packed,
        scale=scale,
        offset=offset,
        out_features=out_features,
        bits=bits,
        group_size=group_size,
        norm_weight_I=norm_weight_I,
        eps=eps,
        bias_O=bias_O,
        silu_mul=silu_mul,
        residual_TO=residual_TO,
        table=table,
    )
    return linear.run(linear.fastest())
