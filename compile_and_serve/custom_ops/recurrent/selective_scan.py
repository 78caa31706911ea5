"""`cas::selective_scan`: the scan of Mamba-1 (arXiv:2312.00752), where each channel has a state and decays of its own.

Shape legend: T tokens of the step, S sequences, I channels, N size of a channel's state, U blocks of channels, C channels of a block,
R ring entries.

    dt_t = softplus(dt_t)
    h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t          out_t = Σ_n c_t h_t

`layer_state.py` says what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.library import SHARE_OF_PARTS, OpKind, Sharding, define
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, RING_TOKENS, StatePart, checkpoint_after, checkpoint_before
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata, gather_slot, scatter_slot
from compile_and_serve.custom_ops.step import current_metadata


def _reference(
    x_TI: torch.Tensor,
    dt_TI: torch.Tensor,
    a_IN: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    states: torch.Tensor,
    states_columns: torch.Tensor,
    inputs: torch.Tensor,
    inputs_columns: torch.Tensor,
    keys: torch.Tensor,
    keys_columns: torch.Tensor,
    positions: torch.Tensor,
    positions_columns: torch.Tensor,
    group: str = RECURRENT_STATES,
) -> torch.Tensor:
    """Token by token, from the checkpoint on. It keeps no later state."""
    metadata: SlotMetadata = current_metadata(group)
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    blocks, ring = x_TI.shape[1] // inputs.shape[4], inputs.shape[2]
    parts = [(states, states_columns), (inputs, inputs_columns), (keys, keys_columns), (positions, positions_columns)]
    kept = [gather_slot(tensor, columns, metadata.read_pages, blocks).to(wide) for tensor, columns in parts]
    states_SU2NC, inputs_SUR2C, keys_SURN, positions_SU2 = kept
    a_UNC = a_IN.to(wide).unflatten(0, (blocks, -1)).transpose(1, 2)
    dt_TUC, x_TUC = (part.to(wide).unflatten(1, (blocks, -1)) for part in (dt_TI, x_TI))
    out_TI = torch.zeros_like(x_TI)
    starts, computed = metadata.query_start_loc.tolist(), metadata.num_computed.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()[: metadata.num_seqs]):
        if not length:
            continue
        begin = checkpoint_before(positions_SU2[s, 0, 0].round().item(), computed[s], ring)
        end = checkpoint_after(computed[s], length, RING_TOKENS)
        h_UNC = states_SU2NC[s, :, 0].clone() if begin else torch.zeros_like(states_SU2NC[s, :, 0])
        for position in range(begin, length):
            if position == end:
                states_SU2NC[s, :, 0] = h_UNC
            entry, token = position % ring, starts[s] + position - computed[s]
            if position >= computed[s]:
                inputs_SUR2C[s, :, entry] = torch.stack([dt_TUC[token], x_TUC[token]], 1)
                keys_SURN[s, :, entry] = b_TN[token].to(wide)
            dt_UC, x_UC = F.softplus(inputs_SUR2C[s, :, entry, 0]), inputs_SUR2C[s, :, entry, 1]
            h_UNC = (dt_UC[:, None] * a_UNC).exp() * h_UNC + (dt_UC * x_UC)[:, None] * keys_SURN[s, :, entry, :, None]
            if position >= computed[s]:
                out_TI[token] = (h_UNC * c_TN[token].to(wide)[:, None]).sum(1).flatten().to(out_TI.dtype)
        positions_SU2[s, :, 0], positions_SU2[s, :, 1] = end, -1
    for (tensor, columns), value in zip(parts, kept, strict=True):
        scatter_slot(value, tensor, columns, metadata.write_pages)
    return out_TI


def _selective_scan(
    x_TI: torch.Tensor, dt_TI: torch.Tensor, a_IN: torch.Tensor, b_TN: torch.Tensor, c_TN: torch.Tensor, *args: Any
) -> torch.Tensor:
    tensors, group = args[:8], args[8] if len(args) > 8 else RECURRENT_STATES
    platform = platform_of(x_TI.device)
    metadata: SlotMetadata = current_metadata(group)
    if platform.runs_triton_kernels:
        from compile_and_serve.custom_ops.recurrent import triton_selective_scan

        state = list(zip(tensors[::2], tensors[1::2], strict=True))
        out_TI = torch.zeros_like(x_TI, memory_format=torch.contiguous_format)
        triton_selective_scan.selective_scan(x_TI, dt_TI, a_IN, b_TN, c_TN, state, metadata, out_TI)
        return out_TI
    reason = cpu_unsupported_reason(x_TI.dtype, tensors[0].dtype, tensors[0].shape[4], tensors[0].shape[3])
    if platform.runs_cpp_kernels and reason is None and load_cpu_kernels():
        return torch.ops.cas.cpu_selective_scan.default(x_TI, dt_TI, a_IN, b_TN, c_TN, *tensors, *metadata.cpu_arguments)
    return _reference(x_TI, dt_TI, a_IN, b_TN, c_TN, *args)


def cpu_unsupported_reason(dtype: torch.dtype, state_dtype: torch.dtype, block: int, state_size: int) -> str | None:
    """None when the C++ kernel takes a scan in these dtypes and sizes, else the reason in one sentence. block: channels of a page."""
    if dtype not in (torch.float32, torch.bfloat16) or state_dtype != torch.float32:
        return (
            f"the CPU kernel of selective scans takes float32 or bfloat16 with a float32 state, not {dtype} with a state in {state_dtype}"
        )
    if block % 16 or state_size > 256:
        return f"the CPU kernel of selective scans takes a multiple of 16 channels with up to 256 states, not {block} with {state_size}"
    return None


SELECTIVE_SCAN = define(
    "selective_scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor(a!) states, Tensor states_columns, "
    "Tensor(b!) inputs, Tensor inputs_columns, Tensor(c!) keys, Tensor keys_columns, Tensor(d!) positions, Tensor positions_columns, "
    f'str group="{RECURRENT_STATES}") -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    reference=_reference,
    sharding=Sharding(
        inputs={"x": 1, "dt": 1},
        output=1,
        weights={"a": SHARE_OF_PARTS},
        state={f"{name}_columns": (0, "x") for name in ("states", "inputs", "keys", "positions")},
    ),
    CompositeExplicitAutograd=_selective_scan,
)


def selective_scan(
    x_TI: torch.Tensor,
    dt_TI: torch.Tensor,
    a_IN: torch.Tensor,
    b_TN: torch.Tensor,
    c_TN: torch.Tensor,
    state: Sequence[StatePart],
    group: str = RECURRENT_STATES,
) -> torch.Tensor:
    """out_t = Σ_n c_t h_t for the states h of each sequence, which the tokens change as the head of this file says.

    x_TI, dt_TI: [T, I], dt with its bias and before softplus. b_TN, c_TN: [T, N]. All in one dtype. a_IN: float32 [I, N], contiguous,
    below 0. state: the tensors of `SelectiveScanState` with their columns (mutated). group: the state group that they belong to.
    → [T, I] in x's dtype.
    """
    tensors = [tensor for part in state for tensor in part]
    return SELECTIVE_SCAN(x_TI, dt_TI, a_IN, b_TN, c_TN, *tensors, group)
