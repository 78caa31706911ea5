"""Tokens of an image that attend to later ones of the same image (Gemma 3): an input says how far, which attention takes."""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import ArrayInfo
from compile_and_serve.models.vision.names import AHEAD_ARRAY


def _fill(batch: TokenBatch) -> np.ndarray | None:
    ahead_T = np.zeros(len(batch.token_ids), dtype=np.int32)
    filled_T = batch.with_rows_of(AHEAD_ARRAY, ahead_T)
    return None if filled_T is ahead_T else filled_T


TOKENS_AHEAD = StepInput(
    name="tokens_ahead", dtype=torch.int32, dims=(TOKENS,), fill=_fill, advance="same", optional=True, arrays=(ArrayInfo(name=AHEAD_ARRAY),)
)
