"""Why recurrent layers run the slow reference on a CPU."""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.recurrent import linear_attention, selective_scan, short_convolution
from compile_and_serve.custom_ops.recurrent.layer_state import ConvolutionState, JoinedState, LinearAttentionState, SelectiveScanState
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState


def cpu_unsupported_reason(group: StateGroup) -> str | None:
    """None when the C++ kernels take all ops of a group's layers, else the first reason in one sentence."""
    reasons = (_reason(part, group) for layer in group.layers for part in (layer.parts if isinstance(layer, JoinedState) else (layer,)))
    return next((reason for reason in reasons if reason is not None), None)


def _reason(part: LayerState, group: StateGroup) -> str | None:
    tensors = part.tensors(1, torch.float32)
    state_dtype = group.kind.dtype_of(tensors[0], torch.float32)
    if isinstance(part, LinearAttentionState):
        return linear_attention.cpu_unsupported_reason(part.dtype, state_dtype, part.key_dim, part.value_dim)
    if isinstance(part, SelectiveScanState):
        return selective_scan.cpu_unsupported_reason(part.dtype, state_dtype, tensors[0].shape[3], part.state_size)
    if isinstance(part, ConvolutionState):
        return short_convolution.cpu_unsupported_reason(part.dtype, tensors[0].shape[2])
    return None
