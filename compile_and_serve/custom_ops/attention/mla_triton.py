"""`cas::mla_attention` of the attention backend `triton`: few query tokens absorbed, prompts materialized (terms: `mla.py`).

FlashAttention-3 runs the materialized prompts of larger steps where it has a kernel for the heads' sizes, Triton's kernel the others.
FlashMLA, where it runs, has the absorbed sequences with one query token, and steps in which all have equally few; Triton's kernel the
others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.flash_attention3 import (
    FA3_MIN_QUERY_LEN,
    FA3_MIN_TOKENS,
    FlashAttention3Prompts,
    flash_attention3_unsupported_reason,
)
from compile_and_serve.custom_ops.attention.flash_mla import FlashMlaDecodes, flash_mla_unsupported_reason
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

MAX_ABSORBED = 16  # query tokens of a sequence that is absorbed


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """The three parts of a step whose sequences have different numbers of query tokens. First come `num_single` sequences with one query
    token. Then come `num_few`, which are absorbed too. The first sequence with more than MAX_ABSORBED query tokens and all behind it are
    materialized.

    max_few: the most query tokens of one of the few. first_token: the first query token of the materialized ones. num_keys, max_seq_len:
    the sum of their lengths, and the largest. key_starts: int32 [their number + 1] on the device, sums of their lengths. host_lengths: of
    theirs, where their queries begin, from 0, their lengths, and where their keys begin.
    """

    metadata: AttentionMetadata
    num_single: int
    num_few: int
    max_few: int
    first_token: int
    num_keys: int
    max_seq_len: int
    key_starts: torch.Tensor
    host_lengths: tuple[np.ndarray, np.ndarray, np.ndarray]

    @classmethod
    def of_step(cls, metadata: AttentionMetadata) -> StepParts:
        starts, seq_lens = metadata.host_lengths()
        lengths = np.diff(starts)
        num_single, num_absorbed = (int(np.append(lengths > most, True).argmax()) for most in (1, MAX_ABSORBED))
        key_starts = np.zeros(len(seq_lens) - num_absorbed + 1, dtype=np.int32)
        np.cumsum(seq_lens[num_absorbed:], out=key_starts[1:])
        return cls(
            metadata=metadata,
            num_single=num_single,
            num_few=num_absorbed - num_single,
            max_few=int(lengths[num_single:num_absorbed].max(initial=0)),
            first_token=int(starts[num_absorbed]),
            num_keys=int(key_starts[-1]),
            max_seq_len=int(seq_lens[num_absorbed:].max(initial=0)),
            key_starts=torch.from_numpy(key_starts).to(metadata.seq_lens.device, non_blocking=True),
            host_lengths=(
                (starts[num_absorbed:] - starts[num_absorbed]).astype(np.int32),
                seq_lens[num_absorbed:].astype(np.int32),
                key_starts,
            ),
        )

    @property
    def is_worth_flash_attention3(self) -> bool:
        """Whether the materialized prompts are long or many."""
        starts = self.host_lengths[0]
        return bool(starts[-1] >= FA3_MIN_TOKENS or np.diff(starts).max(initial=0) >= FA3_MIN_QUERY_LEN)


def flash_attention3_reason(operands: LatentOperands) -> str | None:
    """None where FlashAttention-3 runs prompts with these operands, else why it does not, in one sentence."""
    q_THE = operands.q_THE
    nope_size, rope_size, values, _ = operands.sizes
    if nope_size % 8:  # a head's values begin behind its keys
        return f"FlashAttention-3 needs keys of a multiple of 8 before RoPE, not {nope_size}"
    return flash_attention3_unsupported_reason(q_THE.device, q_THE.dtype, nope_size + rope_size, values)


def flash_mla_decodes(operands: LatentOperands, metadata: AttentionMetadata, parts: StepParts | None) -> FlashMlaDecodes | None:
    """FlashMLA's part of a step, planned; None where the step has none for it. parts: as of `triton_mla`."""
    num_seqs, query_len = metadata.num_seqs, metadata.max_query_len
    if parts is not None:
        num_seqs, query_len = parts.num_single, 1
    elif query_len == 1 and num_seqs:
        num_seqs = metadata.seq_lens.shape[0]  # padding, too
    return FlashMlaDecodes(metadata, num_seqs, query_len, operands.q_THE.shape[1]) if num_seqs else None


def flash_mla_reason(operands: LatentOperands) -> str | None:
    """None where FlashMLA runs decodes with these operands, else why it does not, in one sentence."""
    q_THE, cache = operands.q_THE, operands.cache
    _, rope_size, _, latent_size = operands.sizes
    return flash_mla_unsupported_reason(q_THE.device, q_THE.dtype, cache.dtype, latent_size, rope_size, cache.shape[1])


def triton_mla(
    operands: LatentOperands,
    metadata: AttentionMetadata,
    parts: StepParts | None,
    prompts: FlashAttention3Prompts | None = None,
    decodes: FlashMlaDecodes | None = None,
) -> torch.Tensor:
    """As `LatentAttention.mla_forward`. parts: the step's; None: all sequences have equally many query tokens, which are absorbed.

    prompts: planned for the materialized ones; None: Triton's kernel runs them. decodes: planned for the sequences with one query token,
    without `parts` for all; None: Triton's kernel runs them.
    """
    from compile_and_serve.custom_ops.attention.triton_mla_decode import absorbed_attention, multiply_heads, write_latents
    from compile_and_serve.custom_ops.attention.triton_mla_prefill import flash_materialized_attention, materialized_attention

    q_THE, kv_a_TE, kv_b, cache, scale = operands.q_THE, operands.kv_a_TE, operands.kv_b, operands.cache, operands.scale
    num_tokens, num_heads, head_size = q_THE.shape
    nope_size, _, values, _ = operands.sizes
    if q_THE.stride(2) != 1 or q_THE.stride(1) != head_size:
        q_THE = q_THE.contiguous()
    kv_a_TE = kv_a_TE if kv_a_TE.stride(1) == 1 else kv_a_TE.contiguous()
    out_THV = q_THE.new_empty(num_tokens, num_heads, values)
    # Tokens of no sequence get zeros here. A decode step is padded with sequences of length 0, which get zeros in the decode kernel.
    num_covered = metadata.seq_lens.shape[0] if metadata.max_query_len == 1 else metadata.num_tokens
    if num_covered < num_tokens:
        out_THV[num_covered:].zero_()
    heads = kv_b.view(num_heads, nope_size + values, -1)
    latent_size = heads.shape[2]
    entries = operands.norm_weight_C, operands.cos_TR, operands.sin_TR, cache, metadata.slot_mapping, operands.eps, operands.interleaved
    if decodes is not None and parts is None:
        ours = slice(0, decodes.num_tokens)
        # In one buffer, as FlashMLA reads it. The entries are written last, because its kernel does not wait for the one before it.
        q_joined_THE = q_THE.new_empty(num_tokens, num_heads, cache.shape[2])
        q_latent_HTC = q_joined_THE[ours, :, :latent_size].transpose(0, 1)
        multiply_heads(q_THE[ours, :, :nope_size].transpose(0, 1), heads[:, :nope_size], q_latent_HTC)
        write_latents(q_THE, kv_a_TE, *entries, q_joined_THE[:, :, latent_size:], lets_next_start=False)
        summed_HTC = decodes.run(q_joined_THE[ours], cache, scale).transpose(0, 1)
        multiply_heads(summed_HTC, heads[:, nope_size:].transpose(1, 2), out_THV[ours].transpose(0, 1), starts_early=False)
        if not is_compiling_ahead():
            return out_THV
        # The kernels below run decodes beside prompts, and sequences with unequal numbers of query tokens.
        decodes = decodes if metadata.max_query_len == 1 else None
    q_rope_THR = write_latents(q_THE, kv_a_TE, *entries)
    # Ranges of absorbed sequences: (first, number, most query tokens). Apart, decodes run as in a step of their own.
    absorbed, absorbed_tokens = [(0, metadata.seq_lens.shape[0], metadata.max_query_len)], num_covered
    if parts is not None:
        absorbed = [(0, parts.num_single, 1), (parts.num_single, parts.num_few, parts.max_few)]
        absorbed_tokens = parts.first_token
    if absorbed_tokens:
        ours = slice(0, absorbed_tokens)
        q_latent_HTC = q_THE.new_empty(num_heads, absorbed_tokens, latent_size)
        summed_HTC = torch.empty_like(q_latent_HTC)
        multiply_heads(q_THE[ours, :, :nope_size].transpose(0, 1), heads[:, :nope_size], q_latent_HTC)
        if decodes is not None:
            first = slice(0, decodes.num_tokens)
            q_joined_THE = torch.cat((q_latent_HTC[:, first].transpose(0, 1), q_rope_THR[first]), dim=2)
            summed_HTC[:, first] = decodes.run(q_joined_THE, cache, scale).transpose(0, 1)
            absorbed = absorbed[1:]
        for first_seq, num_seqs, max_query_len in absorbed:
            if num_seqs:
                absorbed_attention(
                    q_latent_HTC,
                    q_rope_THR,
                    cache,
                    scale,
                    metadata.query_start_loc,
                    metadata.seq_lens,
                    metadata.block_table,
                    summed_HTC,
                    first_seq,
                    num_seqs,
                    max_query_len,
                )
        multiply_heads(summed_HTC, heads[:, nope_size:].transpose(1, 2), out_THV[ours].transpose(0, 1))
    if parts is None or not parts.num_keys:
        return out_THV
    first_seq = parts.num_single + parts.num_few
    if prompts is None or is_compiling_ahead():  # either kernel may run steps of these sizes
        materialized_attention(
            q_THE,
            q_rope_THR,
            kv_b,
            cache,
            scale,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            parts.key_starts,
            out_THV,
            first_seq=first_seq,
            num_queries=metadata.num_tokens - parts.first_token,
            num_keys=parts.num_keys,
            max_seq_len=parts.max_seq_len,
        )
    if prompts is not None:
        theirs = slice(parts.first_token, metadata.num_tokens)
        flash_materialized_attention(
            q_THE[theirs],
            q_rope_THR[theirs],
            kv_b,
            cache,
            prompts,
            metadata.seq_lens,
            metadata.block_table,
            parts.key_starts,
            out_THV[theirs],
            first_seq=first_seq,
            num_keys=parts.num_keys,
            max_seq_len=parts.max_seq_len,
        )
    return out_THV
