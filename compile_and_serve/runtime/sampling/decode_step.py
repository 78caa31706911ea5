"""What a captured decode step does besides running the model: it takes the tokens sampled last, samples the next, and advances the
step's inputs, so that the host can replay it without writing anything (the kernels: `custom_ops/sampling/decode_inputs.py`).

A step with draft tokens has q tokens of each sequence. It may run ahead: the host launches it before it knows which drafts the step before
accepted, and fills its inputs as if that step had gained no tokens. The device knows what was gained, and advances the inputs by it.

Shape legend: S sequences, q tokens of each, T = S · q, R batch slots, K draft tokens of a sequence at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.step import LOGITS, TOKENS, Step, StepInput
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS, sample_rows

COMPARE, ACCEPT, REJECT = 0, 1, 2  # whether a draft is right: as the sampled token says, or whatever that says
_SAMPLE_POSITIONS = list(SAMPLING_FIELDS).index("sample_positions")


@dataclass(kw_only=True, slots=True)
class DecodeStep(Step):
    """A step of decodes in persistent buffers.

    declared: the step's inputs. sampling: what tokens are sampled with (`SAMPLING_FIELDS`), each [T]. slots: int64 [S], batch slots, R for
    padding. last_tokens: int64 [R + 1], sampled last. has_run: int32 [S], 1 where a step has run with these inputs, which are then advanced
    first. seq_lens: int32 [S], 0 for padding. block_sizes: tokens per page of each group whose pages hold tokens.

    Of steps with drafts: num_new_tokens: int64 [R + 1], accepted drafts + 1 of each slot's sequence in its last such step; 0 for padding.
    drafts: int64 [R + 1, K], what a drafter on the device made, -1 where there is no draft; None: the host fills in the drafts.
    verdicts: int32 [T], of the draft behind each token (`COMPARE`, `ACCEPT`, `REJECT`).
    """

    declared: Sequence[StepInput]
    sampling: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    last_tokens: torch.Tensor
    has_run: torch.Tensor
    seq_lens: torch.Tensor
    block_sizes: dict[str, int]
    num_new_tokens: torch.Tensor
    drafts: torch.Tensor | None
    verdicts: torch.Tensor


def advances_on_device(inputs: Sequence[StepInput]) -> bool:
    """Whether the device can make every input of a decode step: from the step before, or by what fills the inputs of the device."""
    return all(one.source == "device" or one.advance is not None for one in inputs)


def begin_step(step: Step) -> None:
    """Advance the inputs where a step has run with them, and take the tokens that were sampled last."""
    from compile_and_serve.custom_ops.sampling.decode_inputs import begin_decodes

    assert isinstance(step, DecodeStep)
    if step.max_query_len > 1:
        if step.drafts is not None:
            _advance_by_new_tokens(step, step.drafts)
        for name in step.block_sizes:
            if step.metadata[name].row_seq_lens is not None:
                step.metadata[name].fill_rows(step.max_query_len)
        return
    positions = input_ids = None
    for one in step.declared:
        tensor = step.inputs[one.name]
        if one.advance == "sampled":
            assert one.dims == (TOKENS,), f"input {one.name} cannot take the sampled tokens"
            input_ids = tensor
        elif one.advance == "next" and one.dims == (TOKENS,) and one.dtype == torch.int64:
            positions = tensor
        elif one.advance == "next":
            shape = [-1 if dim == TOKENS else 1 for dim in one.dims]
            tensor += (step.has_run * (step.seq_lens > 0)).to(one.dtype).view(shape)
    if input_ids is None:  # only the first stage of a model takes tokens
        input_ids = torch.empty_like(step.slots)
    if positions is None:
        positions = step.seq_lens.long() - 1
    tokens = [(step.metadata[name], size) for name, size in step.block_sizes.items()]
    first, first_size = tokens[0] if tokens else (None, 1)
    begin_decodes(
        step.last_tokens,
        step.slots,
        step.has_run,
        positions,
        step.seq_lens,
        step.sampling[_SAMPLE_POSITIONS],
        None if first is None else first.block_table,
        input_ids,
        None if first is None else first.slot_mapping,
        first_size,
    )
    for metadata, size in tokens[1:]:
        _map_slots(metadata, size)


def _map_slots(metadata: AttentionMetadata, size: int) -> None:
    """slot mapping = block · P + position % P of each sequence's last token; -1 for padding."""
    positions_S = metadata.seq_lens.long() - 1
    blocks_S = metadata.block_table.gather(1, (positions_S // size).clamp_(min=0)[:, None])[:, 0]
    metadata.slot_mapping.copy_(torch.where(positions_S >= 0, blocks_S * size + positions_S % size, -1))


def end_step(outputs: dict[str, torch.Tensor], step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as `sample_rows` does, and keep the tokens for the next step. → tokens int64, scores, one a row"""
    from compile_and_serve.custom_ops.sampling.decode_inputs import end_decodes

    assert isinstance(step, DecodeStep)
    tokens_S, best_S = sample_rows(outputs[LOGITS], step.sampling)
    if step.max_query_len > 1:
        if step.drafts is not None:
            record_new_tokens(tokens_S, step)
        return tokens_S, best_S
    end_decodes(tokens_S, step.last_tokens, step.slots, step.has_run, step.seq_lens)
    return tokens_S, best_S


def _advance_by_new_tokens(step: DecodeStep, drafts_RK: torch.Tensor) -> None:
    """Where sequences run ahead (`has_run`): positions, lengths and sample positions += gained; the tokens are those sampled last and the
    drafts. Draft tokens that are missing are padding: nothing is written for them.
    """
    q, slots_S = step.max_query_len, step.slots
    is_ahead_S1 = step.has_run[:, None] > 0
    new_S1 = torch.where(is_ahead_S1, step.num_new_tokens[slots_S, None], 0)
    tokens_Sq = torch.cat((step.last_tokens[slots_S, None], drafts_RK[slots_S]), dim=1)
    for one in step.declared:
        tensor = step.inputs[one.name]
        if one.advance == "sampled":
            tensor.copy_(torch.where(is_ahead_S1, tokens_Sq.clamp(min=0), tensor.view(-1, q)).flatten())
        elif one.advance == "next":
            shape = [-1 if dim == TOKENS else 1 for dim in one.dims]
            tensor += new_S1.expand(-1, q).reshape(shape).to(one.dtype)
    step.seq_lens += new_S1[:, 0].to(torch.int32)
    step.sampling[_SAMPLE_POSITIONS].view(-1, q).add_(new_S1)
    positions_Sq = step.seq_lens.long()[:, None] + torch.arange(-q, 0, device=slots_S.device)
    is_token_Sq = (tokens_Sq >= 0) & (positions_Sq >= 0)
    for name, size in step.block_sizes.items():
        metadata: AttentionMetadata = step.metadata[name]
        columns_Sq = (positions_Sq // size).clamp(0, metadata.block_table.shape[1] - 1)
        places_Sq = metadata.block_table.gather(1, columns_Sq) * size + positions_Sq % size
        mapped_Sq = torch.where(is_token_Sq, places_Sq, -1)
        metadata.slot_mapping.copy_(torch.where(is_ahead_S1, mapped_Sq, metadata.slot_mapping.view(-1, q)).flatten())


def record_new_tokens(tokens_T: torch.Tensor, step: DecodeStep) -> None:
    """Compare the sampled tokens with the drafts, as `accepted_tokens` does on the host. `num_new_tokens` and `last_tokens` get the result.

    tokens_T: int64, the token of each row.
    """
    assert step.drafts is not None
    q, slots_S = step.max_query_len, step.slots
    tokens_Sq, verdicts_SK, drafts_SK = tokens_T.view(-1, q), step.verdicts.view(-1, q)[:, :-1], step.drafts[slots_S]
    is_right_SK = torch.where(verdicts_SK == COMPARE, tokens_Sq[:, :-1] == drafts_SK, verdicts_SK == ACCEPT)
    is_right_SK &= drafts_SK >= 0
    new_S = 1 + is_right_SK.long().cumprod(dim=1).sum(dim=1)
    step.last_tokens.index_copy_(0, slots_S, tokens_Sq.gather(1, new_S[:, None] - 1)[:, 0])
    step.num_new_tokens.index_copy_(0, slots_S, new_S.masked_fill(step.seq_lens == 0, 0))
