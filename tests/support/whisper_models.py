"""Tiny random Whisper checkpoints, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.messages import EngineRequest
from tests.support.engines import request

ROWS, BANDS, VOCAB_SIZE, MAX_LEN = 30, 16, 200, 96
ALIGNMENT_HEADS = [[0, 1], [1, 0], [1, 3]]
SIZES: dict[str, Any] = {  # of BART's models, too
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.3,
}


def write_whisper(folder: Path) -> Any:
    """A checkpoint of two layers, which hears `ROWS` rows of 20 ms. → transformers' model"""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        **SIZES,
        num_mel_bins=BANDS,
        max_source_positions=ROWS,
        max_target_positions=MAX_LEN,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.generation_config.alignment_heads = ALIGNMENT_HEADS
    model.save_pretrained(folder)
    return model


def mel_of(number: int) -> np.ndarray:
    """float32 [2 · ROWS, BANDS]"""
    return np.random.default_rng(number).standard_normal((2 * ROWS, BANDS)).astype(np.float32)


def item_of(number: int) -> MediaItem:
    mel = StepArray.of(mel_of(number).reshape(ROWS, 2, BANDS))
    return MediaItem(key=b"%d" % number, position=0, length=ROWS, is_beside=True, arrays={"mel": mel})


def speech_request(name: str, prompt: list[int], number: int, **params: Any) -> EngineRequest:
    one = request(name, prompt, ignore_eos=True, **params)
    one.media = [item_of(number)]
    return one


def _attended(model: Any, tokens: list[int], number: int) -> tuple[torch.Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        heard = model.model.encoder(torch.from_numpy(mel_of(number).T[None].copy()))
        given: Any = model(encoder_outputs=heard, decoder_input_ids=torch.tensor([tokens]), output_attentions=True)
    return tuple(given.cross_attentions)


def cross_attention(model: Any, tokens: list[int], number: int) -> torch.Tensor:
    """float32 [tokens, alignment heads, ROWS]: the weights of transformers' model"""
    given = _attended(model, tokens, number)
    return torch.stack([given[layer][0, head] for layer, head in ALIGNMENT_HEADS], dim=1)


def token_times(model: Any, tokens: list[int], number: int, *, begin: int, num_rows: int) -> np.ndarray:
    """float32: the times in seconds that transformers gives the tokens from `begin` on, of a recording of `num_rows` rows"""
    from transformers.generation.utils import GenerateEncoderDecoderOutput

    given = GenerateEncoderDecoderOutput(sequences=torch.tensor([tokens]), cross_attentions=(_attended(model, tokens, number),))
    times = model._extract_token_timestamps(given, ALIGNMENT_HEADS, num_frames=2 * num_rows, num_input_ids=begin)
    return times[0, begin:-1].numpy()


def greedy(model: Any, prompt: list[int], number: int, count: int) -> list[int]:
    """The next `count` tokens by transformers' model."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        heard = model.model.encoder(torch.from_numpy(mel_of(number).T[None].copy()))
        for _ in range(count):
            logits = model(encoder_outputs=heard, decoder_input_ids=ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    return ids[0, len(prompt) :].tolist()
