"""Linear attention of prompts through fla-core's chunked Triton kernels, up to each sequence's next checkpoint.

fla's kernels read segments that lie one behind the other. They run on the step's own tensors: a segment up to the checkpoint of each
sequence, and between two of them a segment of what lies there, mostly the last tokens of the first sequence. Of the latter nothing is
used. Copies of the tokens would take longer, except for prompts of a few tokens.

Shape legend: T tokens of the step, S sequences, N segments, C chunks of them, B tokens up to the checkpoints, R rows of states, H value
heads, G key heads, K key size, V value size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.recurrent.fla_configs import limit_configs
from compile_and_serve.custom_ops.recurrent.layer_state import StatePart, checkpoint_after
from compile_and_serve.custom_ops.state.recurrent import SlotMetadata

log = logging.getLogger(__name__)

_CHUNK = 64  # tokens, of fla's kernels


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
    """The tokens of a step before the checkpoints that it passes, as segments. Tensors are on the device unless they say otherwise.

    first_seq: the first sequence that passes a checkpoint. segments_per_seq: of the sequences from there on; the first of them is up to the
    checkpoint, and empty where none is passed. token_indices: int64 [B], the tokens of the segments; None: they lie in the step as
    `starts` says.
    """

    first_seq: int
    segments_per_seq: int
    num_segments: int
    starts: torch.Tensor  # int64 [N + 1]
    starts_cpu: torch.Tensor
    chunks: torch.Tensor  # int64 [C, 2]: the segment of each chunk, and its number in that
    token_indices: torch.Tensor | None


def _bulk_of(metadata: SlotMetadata, ring: int) -> _Bulk | None:
    """None: no sequence of the step passes a checkpoint."""
    starts, lengths = metadata.query_start_loc_cpu, metadata.seq_lens_cpu
    if starts is None or lengths is None:
        starts, lengths = metadata.query_start_loc.cpu().numpy(), metadata.seq_lens.cpu().numpy()
    starts, lengths = starts[: metadata.num_seqs + 1].astype(np.int64), lengths[: metadata.num_seqs].astype(np.int64)
    computed = lengths - np.diff(starts)
    ends = np.array([checkpoint_after(int(c), int(n), ring) for c, n in zip(computed, lengths, strict=True)], dtype=np.int64)
    counts = np.where(lengths > 0, np.maximum(ends - computed, 0), 0)
    passing = np.flatnonzero(counts)
    if not len(passing):
        return None
    first, last = int(passing[0]), int(passing[-1])
    # A sequence that passes none, between others, has an empty segment where the next begins.
    bounds = np.stack([starts[first : last + 1], starts[first : last + 1] + counts[first : last + 1]], axis=1)
    for seq in range(last - first - 1, -1, -1):
        if counts[first + seq] == 0:
            bounds[seq] = bounds[seq + 1, 0]
    in_place = bounds.ravel()
    between = -(-(bounds[1:, 0] - bounds[:-1, 1]) // _CHUNK)
    inside = -(-counts // _CHUNK)
    indices = np.empty(0, dtype=np.int64)
    is_in_place = 2 * between.sum() <= inside.sum()
    if is_in_place:
        segment_starts = in_place
    else:
        segment_starts = np.concatenate([[0], np.cumsum(counts[first : last + 1])])
        indices = np.concatenate([np.arange(begin, end) for begin, end in bounds])
    chunks = _chunks_of(segment_starts)
    # One upload for all. Each part begins at a multiple of 16 bytes, which Triton compiles kernels for.
    parts = [segment_starts, np.zeros(len(segment_starts) % 2, dtype=np.int64), chunks.ravel(), indices]
    uploaded = platform_of(metadata.seq_lens.device).upload(np.concatenate(parts), through_pinned=True)
    begin = len(segment_starts) + len(segment_starts) % 2
    end = begin + chunks.size
    return _Bulk(
        first_seq=first,
        segments_per_seq=2 if is_in_place else 1,
        num_segments=len(segment_starts) - 1,
        starts=uploaded[: len(segment_starts)],
        starts_cpu=torch.from_numpy(segment_starts),
        chunks=uploaded[begin:end].view(-1, 2),
        token_indices=None if is_in_place else uploaded[end:],
    )


def _chunks_of(starts: np.ndarray) -> np.ndarray:
    """int64 [C, 2], as `_Bulk.chunks`. fla's own function waits for the device."""
    counts = -(-np.diff(starts) // _CHUNK)
    segments = np.repeat(np.arange(len(counts)), counts)
    return np.stack([segments, np.arange(len(segments)) - np.repeat(np.cumsum(counts) - counts, counts)], axis=1)


# The last step's, which its layers share.
_last: tuple[SlotMetadata, _Bulk | None] | None = None


class Operands(NamedTuple):
    """The arguments of `cas::linear_attention`."""

    q_TGK: torch.Tensor
    k_TGK: torch.Tensor
    v_THV: torch.Tensor
    log_decay: torch.Tensor
    beta_TH: torch.Tensor | None
    state: Sequence[StatePart]
    metadata: SlotMetadata


class States(NamedTuple):
    """A state of each sequence from `first_seq` on that passes a checkpoint, float32 [R, H, K, V]. Other rows may have any values."""

    states_RHKV: torch.Tensor
    first_seq: int


def linear_attention(operands: Operands, begin: Callable[[States], None]) -> tuple[torch.Tensor, States] | None:
    """The output [T, H, V], which is computed up to each sequence's next checkpoint, and the states there. None: nothing was done.

    begin: writes the states that the step begins with.
    """
    global _last
    q_TGK, k_TGK, v_THV, log_decay, beta_TH, state, metadata = operands
    found = kernels(q_TGK.device)
    if found is None or q_TGK.dtype == torch.float32:  # fla's kernels round products to tf32
        return None
    gated_delta_rule, kda, simple_gla = found
    bulk = _last[1] if _last is not None and _last[0] is metadata else _bulk_of(metadata, state[1][0].shape[2])
    _last = metadata, bulk
    num_heads, value_dim = v_THV.shape[1:]
    shape = num_heads, q_TGK.shape[2], value_dim
    if bulk is None:
        return metadata.new_output(v_THV), States(torch.empty(0, *shape, dtype=torch.float32, device=q_TGK.device), 0)
    initial_NHKV = torch.empty(bulk.num_segments, *shape, dtype=torch.float32, device=q_TGK.device)
    begin(States(initial_NHKV[:: bulk.segments_per_seq], bulk.first_seq))
    indices = bulk.token_indices

    def bulk_of(x: torch.Tensor) -> torch.Tensor:
        return (x if indices is None else x[indices])[None]

    q, k, v, g = bulk_of(q_TGK), bulk_of(k_TGK), bulk_of(v_THV), bulk_of(log_decay)
    options = {
        "scale": 1.0,
        "initial_state": initial_NHKV,
        "output_final_state": True,
        "cu_seqlens": bulk.starts,
        "cu_seqlens_cpu": bulk.starts_cpu,
    }
    if beta_TH is None:
        repeats = num_heads // q.shape[2]
        q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
        out, final_NHKV = simple_gla(q, k, v, g, **options)
    elif log_decay.dim() == 3:
        out, final_NHKV = kda(q, k, v, g, bulk_of(beta_TH), **options)
    else:
        out, final_NHKV = gated_delta_rule(q, k, v, g, bulk_of(beta_TH), chunk_indices=bulk.chunks, **options)
    if indices is None:
        out_THV = out[0]
        metadata.clear_padding(out_THV)
    else:
        out_THV = metadata.new_output(v_THV)
        out_THV[indices] = out[0]
    return out_THV, States(final_NHKV[:: bulk.segments_per_seq], bulk.first_seq)
