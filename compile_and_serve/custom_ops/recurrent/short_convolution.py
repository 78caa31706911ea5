"""`cas::short_convolution`: a causal convolution of each channel over the last few tokens.

Shape legend: T tokens of the step, S sequences, D channels, W width, R ring entries, B blocks of channels, C channels of a block.

    out_t = bias + Σ_w weight_w x_{t - W + 1 + w}

The state is a ring of inputs: the token at position p has the entry p % R. It serves any position up to R - W + 1 tokens back.
"""

from __future__ import annotations

from typing import Any

import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.library import SHARE_OF_PARTS, OpKind, Sharding, define
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, StatePart
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata, gather_slot, scatter_slot
from compile_and_serve.custom_ops.step import current_metadata


def _reference(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    inputs: torch.Tensor,
    columns: torch.Tensor,
    group: str = RECURRENT_STATES,
) -> torch.Tensor:
    metadata: SlotMetadata = current_metadata(group)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    width, blocks = weight_DW.shape[1], x_TD.shape[1] // inputs.shape[3]
    kept_SBRC = gather_slot(inputs, columns, metadata.read_pages, blocks).to(x_TD.dtype)
    out_TD = torch.zeros_like(x_TD)
    weight_WD = weight_DW.to(wide).T
    starts, computed = metadata.query_start_loc.tolist(), metadata.num_computed.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()[: metadata.num_seqs]):
        if not length:
            continue
        ring_RD = kept_SBRC[s].transpose(0, 1).flatten(1)
        first = computed[s] - width + 1  # of the inputs that the new tokens read
        before_XD = [ring_RD[p % len(ring_RD)] if p >= 0 else torch.zeros_like(ring_RD[0]) for p in range(first, computed[s])]
        x_XD = torch.cat([*(x_D[None] for x_D in before_XD), x_TD[starts[s] : starts[s + 1]]]).to(wide)
        new = length - computed[s]
        sums_XD = torch.stack([x_XD[w : w + new] * weight_WD[w] for w in range(width)]).sum(0)
        out_TD[starts[s] : starts[s + 1]] = (sums_XD if bias_D is None else sums_XD + bias_D.to(wide)).to(x_TD.dtype)
        for position in range(max(computed[s], length - len(ring_RD)), length):
            x_D = x_TD[starts[s] + position - computed[s]]
            kept_SBRC[s, :, position % len(ring_RD)] = x_D.view(blocks, -1).to(kept_SBRC.dtype)
    scatter_slot(kept_SBRC, inputs, columns, metadata.write_pages)
    return out_TD


def _short_convolution(x_TD: torch.Tensor, weight_DW: torch.Tensor, bias_D: torch.Tensor | None, *args: Any) -> torch.Tensor:
    inputs, columns, group = args[0], args[1], args[2] if len(args) > 2 else RECURRENT_STATES
    metadata: SlotMetadata = current_metadata(group)
    if platform_of(x_TD.device).runs_triton_kernels:
        from compile_and_serve.custom_ops.recurrent import triton_short_convolution

        return triton_short_convolution.short_convolution(x_TD, weight_DW, bias_D, (inputs, columns), metadata)
    reason = cpu_unsupported_reason(x_TD.dtype, inputs.shape[3])
    if platform_of(x_TD.device).runs_cpp_kernels and reason is None and inputs.dtype == x_TD.dtype and load_cpu_kernels():
        return torch.ops.cas.cpu_short_convolution.default(x_TD, weight_DW, bias_D, inputs, columns, *metadata.cpu_arguments)
    return _reference(x_TD, weight_DW, bias_D, *args)


def cpu_unsupported_reason(dtype: torch.dtype, block: int) -> str | None:
    """None when the C++ kernel takes a convolution in this dtype, else the reason in one sentence. block: channels of a page."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the CPU kernel of short convolutions takes float32 or bfloat16, not {dtype}"
    return f"the CPU kernel of short convolutions takes a multiple of 16 channels, not {block}" if block % 16 else None


SHORT_CONVOLUTION = define(
    "short_convolution(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) inputs, Tensor columns, "
    f'str group="{RECURRENT_STATES}") -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    reference=_reference,
    sharding=Sharding(inputs={"x": 1}, output=1, weights={"weight": SHARE_OF_PARTS, "bias": SHARE_OF_PARTS}, state={"columns": (0, "x")}),
    CompositeExplicitAutograd=_short_convolution,
)


def short_convolution(
    x_TD: torch.Tensor, weight_DW: torch.Tensor, bias_D: torch.Tensor | None, state: StatePart, group: str = RECURRENT_STATES
) -> torch.Tensor:
    """out_t = bias + Σ_w weight_w x_{t - W + 1 + w}; before a sequence's first token are zeros.

    x_TD: [T, D]. weight_DW: [D, W]. bias_D: [D]; None: 0. state: the tensor of `ConvolutionState` with its columns (mutated).
    → [T, D] in x's dtype.
    """
    return SHORT_CONVOLUTION(x_TD, weight_DW, bias_D, *state, group)
