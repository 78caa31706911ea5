"""What a captured step of decodes does besides running the model: it takes the tokens that were chosen last, chooses the next, and advances
the step's inputs, so that the same step can follow without a word from the host.
"""

from __future__ import annotations

import torch

from compiler.cudagraphs import StepInputs
from runtime.sampling_ops import SAMPLING_FIELDS, sample_rows

_SAMPLE_POSITIONS = list(SAMPLING_FIELDS).index("sample_positions")


def begin_step(inputs: StepInputs) -> None:
    """Fill in the input ids and the slots of the cache that the step writes."""
    from custom_ops.triton_step import begin_decodes

    assert inputs.slots is not None
    assert inputs.last_tokens is not None
    metadata, block_size = inputs.metadata, inputs.kv_caches[0].shape[3]
    begin_decodes(
        inputs.last_tokens, inputs.slots, inputs.positions, metadata.seq_lens, metadata.block_table, inputs.input_ids,
        metadata.slot_mapping, block_size,
    )  # fmt: skip


def end_step(logits_SV: torch.Tensor, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens as `sample_rows` does, and turn the inputs into the next step's. → tokens int64 [S], scores [S]"""
    from custom_ops.triton_step import end_decodes

    assert inputs.slots is not None
    assert inputs.last_tokens is not None
    tokens_S, best_S = sample_rows(logits_SV, inputs.sampling)
    end_decodes(
        tokens_S, inputs.last_tokens, inputs.slots, inputs.positions, inputs.metadata.seq_lens,
        inputs.sampling[_SAMPLE_POSITIONS],
    )  # fmt: skip
    return tokens_S, best_S
