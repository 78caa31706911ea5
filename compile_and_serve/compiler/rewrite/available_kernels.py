"""Which fused ops have a kernel on a device. Passes that insert other ops do not run."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from compile_and_serve.compiler.rewrite.graph_pass import FLOAT32_NORM_WEIGHT, GELU_LINEAR, NORM_ADDS
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.attention.triton_backend import triton_unsupported_reason
from compile_and_serve.custom_ops.linear.elementwise import elementwise_unsupported_reason
from compile_and_serve.custom_ops.linear.fused_linear import packed_linear_unsupported_reason
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantized.quantized_linear import cuda_unsupported_reason


def available_kernels(*, device: torch.device, dtype: torch.dtype, attention_backends: Iterable[AttentionBackend]) -> frozenset[str]:
    """Names of the `cas` ops that passes may insert for a model on this device, with these attention backends."""
    kernels = set()
    if all(backend.fuses_rope for backend in attention_backends):
        kernels.add("rope_attention")
    has_triton = platform_of(device).runs_triton_kernels
    if has_triton:
        linear_reason = triton_unsupported_reason(device)
    else:
        linear_reason = packed_linear_unsupported_reason(device=device, dtype=dtype)
    if linear_reason is None:
        kernels |= {"fused_linear", "quantized_experts" if has_triton else "packed_experts"}
        if has_triton:
            kernels |= {"allreduce_add_rms_norm", FLOAT32_NORM_WEIGHT, GELU_LINEAR, NORM_ADDS}
            if cuda_unsupported_reason(device, torch.float8_e4m3fn) is None:
                kernels.add("allreduce_add_rms_norm_quantize")
    has_elementwise = elementwise_unsupported_reason(device=device, dtype=dtype) is None
    if has_elementwise or (has_triton and linear_reason is None):
        kernels |= {"add_rms_norm", "silu_mul"}
    return frozenset(kernels)
