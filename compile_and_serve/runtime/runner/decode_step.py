"""What a captured decode step does besides running the model: it takes the tokens sampled last, samples the next, and advances the
step's inputs, so that the host can replay it without writing anything (the kernels: `custom_ops/sampling/decode_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compile_and_serve.custom_ops.attention.attention import AttentionMetadata
from compile_and_serve.custom_ops.step import LOGITS, TOKENS, Step, StepInput
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS, sample_rows

_SAMPLE_POSITIONS = list(SAMPLING_FIELDS).index("sample_positions")


@dataclass(kw_only=True, slots=True)
class DecodeStep(Step):
    """A step of decodes in persistent buffers. S sequences, R batch slots.

    declared: the step's inputs. sampling: what tokens are sampled with (`SAMPLING_FIELDS`), each [S]. slots: int64 [S], batch slots.
    last_tokens: int64 [R], sampled last. has_run: int32 [S], 1 where a step has run with these inputs, which are then advanced first.
    seq_lens: int32 [S], 0 for padding. block_sizes: tokens per page of each paged group.
    """

    declared: Sequence[StepInput]
    sampling: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    last_tokens: torch.Tensor
    has_run: torch.Tensor
    seq_lens: torch.Tensor
    scratch_positions: torch.Tensor
    block_sizes: dict[str, int]


def advances_on_device(inputs: Sequence[StepInput]) -> bool:
    """Whether the device can make every input of a decode step from the step before."""
    return all(one.advance is not None for one in inputs)


def begin_step(step: Step) -> None:
    """Advance the inputs where a step has run with them, and take the tokens that were sampled last."""
    from compile_and_serve.custom_ops.sampling.decode_inputs import begin_decodes

    assert isinstance(step, DecodeStep)
    if step.max_query_len > 1:
        for name in step.block_sizes:
            if step.metadata[name].row_seq_lens is not None:
                step.metadata[name].fill_rows(step.max_query_len)
        return  # the host fills the inputs of steps with guessed tokens
    positions, input_ids = step.scratch_positions, None
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
    assert input_ids is not None, "no input takes the sampled tokens"
    paged = [(step.metadata[name], size) for name, size in step.block_sizes.items()]
    first, size = paged[0]
    begin_decodes(
        step.last_tokens, step.slots, step.has_run, positions, step.seq_lens, step.sampling[_SAMPLE_POSITIONS],
        first.block_table, input_ids, first.slot_mapping, size,
    )  # fmt: skip
    for metadata, size in paged[1:]:
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
        return tokens_S, best_S  # the host compares them with the guesses
    end_decodes(tokens_S, step.last_tokens, step.slots, step.has_run, step.seq_lens)
    return tokens_S, best_S
