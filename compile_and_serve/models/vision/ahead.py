"""Tokens that attend to later ones: an input says how far, which attention takes. Of an image, to those of the same image (Gemma 3); or of
a prompt, to all of it (PaliGemma).
"""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import PROMPT_LENGTH, ArrayInfo
from compile_and_serve.models.vision.names import AHEAD_ARRAY


def _fill(batch: TokenBatch) -> np.ndarray | None:
    ahead_T = np.zeros(len(batch.token_ids), dtype=np.int32)
    filled_T = batch.with_rows_of(AHEAD_ARRAY, ahead_T)
    return None if filled_T is ahead_T else filled_T


TOKENS_AHEAD = StepInput(
    name="tokens_ahead", dtype=torch.int32, dims=(TOKENS,), fill=_fill, advance="same", optional=True, arrays=(ArrayInfo(name=AHEAD_ARRAY),)
)


def _fill_prompts(batch: TokenBatch) -> np.ndarray | None:
    if not batch.step_data:
        return None
    ahead_T = batch.data_of_token(PROMPT_LENGTH, 0) - 1 - batch.positions
    return np.maximum(ahead_T, 0).astype(np.int32)


PROMPTS_AHEAD = StepInput(name="tokens_ahead", dtype=torch.int32, dims=(TOKENS,), fill=_fill_prompts, advance="same", optional=True)
