"""Prompts that an encoder reads: they become an item beside the tokens with which the decoder begins."""

from __future__ import annotations

from hashlib import sha256

import msgspec
import numpy as np

from compile_and_serve.custom_ops.step_data import SOURCE_IDS, MediaItem, StepArray
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.scheduler.step_messages import EncoderInfo


def for_encoder(request: EngineRequest, encoder: EncoderInfo | None) -> EngineRequest:
    """The request as the scheduler of a model with this encoder takes it. Raises `ValueError` with one sentence."""
    aligned, most = request.sampling_params.aligned_rows, 0 if encoder is None else encoder.max_aligned_rows
    if aligned > most:
        raise ValueError(f"The request asks for aligned rows, {aligned} of them, but the model has {most}.")
    if encoder is None or not encoder.decoder_start:
        return request
    if request.sampling_params.prompt_logprobs is not None:
        raise ValueError("The model's encoder reads the prompt, whose tokens have no log-probabilities: leave out prompt_logprobs.")
    if request.media or request.step_arrays:
        raise ValueError("The model's encoder reads text alone: leave out media and step_arrays.")
    prompt = request.prompt_token_ids
    if not 1 <= len(prompt) <= encoder.max_item_tokens:
        raise ValueError(f"The prompt has {len(prompt)} tokens, but the model's encoder reads 1 to {encoder.max_item_tokens}.")
    ids = np.array(prompt, dtype=np.int64)
    arrays = {SOURCE_IDS: StepArray.of(ids)}
    item = MediaItem(key=sha256(ids.tobytes()).digest(), position=0, length=len(prompt), is_beside=True, arrays=arrays)
    return msgspec.structs.replace(request, prompt_token_ids=list(encoder.decoder_start), media=[item])
