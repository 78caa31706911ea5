"""`cas::linear_attention`: attention through a state of fixed size: Gated DeltaNet, KDA, and Mamba-2 (SSD).

Shape legend: T tokens of the step, S sequences, H value heads, G key heads (H % G == 0), K key size, V value size, R ring entries.

    S_t = exp(log_decay_t) S_{t-1} + k_t ⊗ u_t          out_t = S_tᵀ q_t
    u_t = beta_t (v_t - (exp(log_decay_t) S_{t-1})ᵀ k_t)     with beta (the delta rule, arXiv:2412.06464)
    u_t = v_t                                                without (SSD, arXiv:2405.21060: q = C, k = B, v = x · dt)

The decay is one number per head, or one per channel of the key (KDA, arXiv:2510.26692). `layer_state.py` says what is kept. With u in the
ring, a state follows from the checkpoint and the entries by sums: S_t = exp(Σ) S_c + Σ_j exp(Σ_{>j}) k_j ⊗ u_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.recurrent.fla_prompts import Operands
from compile_and_serve.custom_ops.recurrent.layer_state import RECURRENT_STATES, StatePart, checkpoint_after, checkpoint_before
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata, gather_slot, scatter_slot
from compile_and_serve.custom_ops.step import current_metadata


def _reference(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay: torch.Tensor,
    beta_TH: torch.Tensor | None,
    checkpoint: torch.Tensor,
    checkpoint_columns: torch.Tensor,
    keys: torch.Tensor,
    keys_columns: torch.Tensor,
    values: torch.Tensor,
    values_columns: torch.Tensor,
    decays: torch.Tensor,
    decays_columns: torch.Tensor,
    group: str = RECURRENT_STATES,
) -> torch.Tensor:
    """Token by token, from the checkpoint on."""
    metadata: SlotMetadata = current_metadata(group)
    wide = torch.promote_types(q_TGK.dtype, torch.float32)
    num_heads, num_key_heads = v_THV.shape[1], k_TGK.shape[1]
    parts = [(checkpoint, checkpoint_columns, num_heads), (keys, keys_columns, num_key_heads)]
    parts += [(values, values_columns, num_heads), (decays, decays_columns, num_heads)]
    kept = [gather_slot(tensor, columns, metadata.read_pages, units).to(wide) for tensor, columns, units in parts]
    checkpoint_SHKV, keys_SGRK, values_SHRV, decays_SHR = kept
    ring = keys_SGRK.shape[2]
    repeats = num_heads // num_key_heads
    q_THK, k_THK = (x.to(wide).repeat_interleave(repeats, 1) for x in (q_TGK, k_TGK))
    new_decays = log_decay.to(wide).view(len(q_TGK), num_heads, -1)
    out_THV = torch.zeros_like(v_THV)
    starts, computed = metadata.query_start_loc.tolist(), metadata.num_computed.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()[: metadata.num_seqs]):
        if not length:
            continue
        begin = checkpoint_before(values_SHRV[s, 0, ring, 0].round().item(), computed[s], ring)
        end = checkpoint_after(computed[s], length, ring)
        state_HKV = checkpoint_SHKV[s].clone() if begin else torch.zeros_like(checkpoint_SHKV[s])
        for position in range(begin, length):
            if position == end:
                checkpoint_SHKV[s] = state_HKV
            entry, token = position % ring, starts[s] + position - computed[s]
            is_new = position >= computed[s]
            if is_new:
                keys_SGRK[s, :, entry] = k_TGK[token]
                decays_SHR[s, :, entry] = new_decays[token]
            k_HK = k_THK[token] if is_new else keys_SGRK[s, :, entry].repeat_interleave(repeats, 0)
            state_HKV = state_HKV * decays_SHR[s, :, entry].exp()[:, :, None]
            if is_new:
                u_HV = v_THV[token].to(wide)
                if beta_TH is not None:
                    u_HV = beta_TH[token].to(wide)[:, None] * (u_HV - torch.einsum("hkv,hk->hv", state_HKV, k_HK))
                values_SHRV[s, :, entry] = u_HV
            state_HKV = state_HKV + k_HK[:, :, None] * values_SHRV[s, :, entry][:, None]
            if is_new:
                out_THV[token] = torch.einsum("hkv,hk->hv", state_HKV, q_THK[token]).to(out_THV.dtype)
        values_SHRV[s, :, ring] = end
    for (tensor, columns, _), value in zip(parts, kept, strict=True):
        scatter_slot(value, tensor, columns, metadata.write_pages)
    return out_THV


def _linear_attention(
    q_TGK: torch.Tensor, k_TGK: torch.Tensor, v_THV: torch.Tensor, log_decay: torch.Tensor, beta_TH: torch.Tensor | None, *args: Any
) -> torch.Tensor:
    tensors, group = args[:8], args[8] if len(args) > 8 else RECURRENT_STATES
    platform = platform_of(q_TGK.device)
    metadata: SlotMetadata = current_metadata(group)
    if platform.runs_triton_kernels:
        from compile_and_serve.custom_ops.recurrent import triton_linear_attention

        state = list(zip(tensors[::2], tensors[1::2], strict=True))
        return triton_linear_attention.linear_attention(Operands(q_TGK, k_TGK, v_THV, log_decay, beta_TH, state, metadata))
    reason = cpu_unsupported_reason(q_TGK.dtype, tensors[0].dtype, q_TGK.shape[2], v_THV.shape[2])
    if platform.runs_cpp_kernels and reason is None and load_cpu_kernels():
        return torch.ops.cas.cpu_linear_attention.default(q_TGK, k_TGK, v_THV, log_decay, beta_TH, *tensors, *metadata.cpu_arguments)
    return _reference(q_TGK, k_TGK, v_THV, log_decay, beta_TH, *args)


def cpu_unsupported_reason(dtype: torch.dtype, state_dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """None when the C++ kernel takes linear attention in these dtypes and sizes, else the reason in one sentence."""
    if dtype not in (torch.float32, torch.bfloat16) or state_dtype != torch.float32:
        return (
            f"the CPU kernel of linear attention takes float32 or bfloat16 with a float32 state, not {dtype} with a state in {state_dtype}"
        )
    if key_dim % 16 or value_dim % 16 or max(key_dim, value_dim) > 512:
        return f"the CPU kernel of linear attention takes head sizes that are multiples of 16 up to 512, not {key_dim} and {value_dim}"
    return None


LINEAR_ATTENTION = define(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor log_decay, Tensor? beta, Tensor(a!) checkpoint, Tensor checkpoint_columns, "
    "Tensor(b!) keys, Tensor keys_columns, Tensor(c!) values, Tensor values_columns, Tensor(d!) decays, Tensor decays_columns, "
    f'str group="{RECURRENT_STATES}") -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q, k, v, *_: torch.empty(v.shape, dtype=v.dtype, device=v.device),
    reference=_reference,
    sharding=Sharding(
        inputs={"v": 1, "q": 1, "k": 1, "log_decay": 1, "beta": 1},
        output=1,
        state={f"{name}_columns": (0, "k" if name == "keys" else "v") for name in ("checkpoint", "keys", "values", "decays")},
    ),
    CompositeExplicitAutograd=_linear_attention,
)


def linear_attention(
    q_TGK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay: torch.Tensor,
    beta_TH: torch.Tensor | None,
    state: Sequence[StatePart],
    group: str = RECURRENT_STATES,
) -> torch.Tensor:
    """out_t = S_tᵀ q_t for the state S of each sequence, which the tokens change as the head of this file says.

    q_TGK, k_TGK: [T, G, K], of which every H / G value heads share one; scaled and normalized. v_THV: [T, H, V], in their dtype.
    log_decay: float32 [T, H], or [T, H, K] for a decay per channel; not above 0. beta_TH: float32 [T, H]; None: no delta rule.
    state: the tensors of `LinearAttentionState` with their columns (mutated). group: the state group that they belong to.
    → [T, H, V] in v's dtype.
    """
    tensors = [tensor for part in state for tensor in part]
    return LINEAR_ATTENTION(q_TGK, k_TGK, v_THV, log_decay, beta_TH, *tensors, group)
