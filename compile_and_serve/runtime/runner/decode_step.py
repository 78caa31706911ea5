"""What a captured step of decodes does besides running the model: it takes the tokens that were chosen last, chooses the next, and advances
the step's inputs, so that the same step can follow without a word from the host (the kernels: `custom_ops/sampling/decode_inputs.py`).
"""

from __future__ import annotations

import torch

from compile_and_serve.compiler.cudagraphs.runner import StepInputs
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS, sample_rows

_SAMPLE_POSITIONS = list(SAMPLING_FIELDS).index("sample_positions")


def begin_step(inputs: StepInputs) -> None:
    """Make the inputs the next step's, where a step has run with them, and take the tokens that were chosen last."""
    from compile_and_serve.custom_ops.sampling.decode_inputs import begin_decodes

    rows = inputs.rows
    assert rows is not None
    metadata, block_size = inputs.metadata, inputs.kv_caches[0].shape[3]
    begin_decodes(
        rows.last_tokens, rows.slots, rows.has_run, inputs.positions, metadata.seq_lens, rows.sampling[_SAMPLE_POSITIONS],
        metadata.block_table, inputs.input_ids, metadata.slot_mapping, block_size,
    )  # fmt: skip


def end_step(logits_SV: torch.Tensor, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens as `sample_rows` does, and keep them for the next step. → tokens int64 [S], scores [S]"""
    from compile_and_serve.custom_ops.sampling.decode_inputs import end_decodes

    rows = inputs.rows
    assert rows is not None
    tokens_S, best_S = sample_rows(logits_SV, rows.sampling)
    end_decodes(tokens_S, rows.last_tokens, rows.slots, rows.has_run, inputs.metadata.seq_lens)
    return tokens_S, best_S
