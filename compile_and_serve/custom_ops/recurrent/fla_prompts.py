"""Linear attention of prompts through fla-core's chunked Triton kernels, up to each sequence's next checkpoint.

Shape legend: T tokens of the step, S sequences, P sequences that pass a checkpoint, B their tokens before it, H value heads, G key heads,
K key size, V value size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from compile_and_serve.custom_ops.recurrent.fla_configs import limit_configs
from compile_and_serve.custom_ops.recurrent.layer_state import StatePart, checkpoint_after
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata, scatter_slot

log = logging.getLogger(__name__)


@functools.cache
def kernels(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]] | None:
    """fla's chunked Gated DeltaNet, KDA and simple GLA; None if the package cannot be used, with the reason in the log."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception as error:  # whatever a package of kernels raises on a machine that it does not know
        log.warning("fla-core's kernels for prompts are not in use, a slower kernel runs instead: %s (pip install fla-core einops)", error)
        return None
    limit_configs(device)
    return chunk_gated_delta_rule, chunk_kda, chunk_simple_gla


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bulk:
    """The tokens of a step before the checkpoints that it passes. token_indices: int64 [B]; None: all tokens, in their order."""

    sequences_P: torch.Tensor
    token_indices: torch.Tensor | None
    starts: torch.Tensor  # int64 [P + 1]
    starts_cpu: torch.Tensor
    ends_P: torch.Tensor  # float32: where the checkpoints lie
    num_tokens: int


def _bulk_of(metadata: SlotMetadata, ring: int, num_step_tokens: int) -> _Bulk:
    starts, lengths = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
    if starts is None or lengths is None:
        starts, lengths = metadata.query_start_loc.cpu().numpy(), metadata.seq_lens.cpu().numpy()
    starts, lengths = starts[: metadata.num_seqs + 1].astype(np.int64), lengths[: metadata.num_seqs].astype(np.int64)
    computed = lengths - np.diff(starts)
    ends = np.array([checkpoint_after(int(c), int(n), ring) for c, n in zip(computed, lengths, strict=True)], dtype=np.int64)
    passing = np.flatnonzero((ends > computed) & (lengths > 0))
    counts = (ends - computed)[passing]
    bulk_starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(bulk_starts[-1])
    indices = np.repeat(starts[passing] - bulk_starts[:-1], counts) + np.arange(total)
    device = metadata.seq_lens.device

    def upload(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return _Bulk(
        sequences_P=upload(passing),
        token_indices=None if total == num_step_tokens else upload(indices),
        starts=upload(bulk_starts),
        starts_cpu=torch.from_numpy(bulk_starts),
        ends_P=upload(ends[passing].astype(np.float32)),
        num_tokens=total,
    )


# The last step's, which its layers share.
_last: tuple[SlotMetadata, _Bulk] | None = None


class Operands(NamedTuple):
    """The arguments of `cas::linear_attention`, and where its result goes, which is contiguous."""

    q_TGK: torch.Tensor
    k_TGK: torch.Tensor
    v_THV: torch.Tensor
    log_decay: torch.Tensor
    beta_TH: torch.Tensor | None
    state: Sequence[StatePart]
    metadata: SlotMetadata
    out_THV: torch.Tensor


def linear_attention(operands: Operands, begin: Callable[[torch.Tensor], None]) -> bool:
    """Compute the tokens before each sequence's next checkpoint, and that checkpoint. → False: nothing was done

    begin: writes the states that the step begins with, float32 [S, H, K, V].
    """
    global _last
    q_TGK, k_TGK, v_THV, log_decay, beta_TH, state, metadata, out_THV = operands
    found = kernels(q_TGK.device)
    if found is None or q_TGK.dtype == torch.float32:  # fla's kernels round products to tf32
        return False
    gated_delta_rule, kda, simple_gla = found
    bulk = _last[1] if _last is not None and _last[0] is metadata else _bulk_of(metadata, state[1][0].shape[2], len(q_TGK))
    _last = metadata, bulk
    if not bulk.num_tokens:
        return True
    num_heads, value_dim = v_THV.shape[1:]
    key_dim = q_TGK.shape[2]
    states_SHKV = torch.zeros(len(metadata.seq_lens), num_heads, key_dim, value_dim, dtype=torch.float32, device=q_TGK.device)
    begin(states_SHKV)

    def bulk_of(x: torch.Tensor) -> torch.Tensor:
        return (x if bulk.token_indices is None else x[bulk.token_indices])[None].contiguous()

    q, k, v, g = bulk_of(q_TGK), bulk_of(k_TGK), bulk_of(v_THV), bulk_of(log_decay)
    options = {
        "scale": 1.0,
        "initial_state": states_SHKV[bulk.sequences_P],
        "output_final_state": True,
        "cu_seqlens": bulk.starts,
        "cu_seqlens_cpu": bulk.starts_cpu,
    }
    if beta_TH is None:
        repeats = num_heads // q.shape[2]
        q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        out, final_PHKV = simple_gla(q, k, v, g, **options)
    elif log_decay.dim() == 3:
        out, final_PHKV = kda(q, k, v, g, bulk_of(beta_TH), **options)
    else:
        out, final_PHKV = gated_delta_rule(q, k, v, g, bulk_of(beta_TH), **options)
    if bulk.token_indices is None:
        out_THV.copy_(out[0])
    else:
        out_THV[bulk.token_indices] = out[0].to(out_THV.dtype)
    _write_checkpoints(final_PHKV, bulk, state, metadata)
    return True


def _write_checkpoints(final_PHKV: torch.Tensor, bulk: _Bulk, state: Sequence[StatePart], metadata: SlotMetadata) -> None:
    pages_PM = metadata.write_pages[bulk.sequences_P]
    scatter_slot(final_PHKV, *state[0], pages_PM)
    values, columns = state[2]
    units_H = torch.arange(final_PHKV.shape[1], device=values.device)
    pages_PH = pages_PM[:, columns[units_H // values.shape[1]].long()].long()
    values[pages_PH, units_H % values.shape[1], values.shape[2] - 1] = bulk.ends_P[:, None, None]
