"""Tiny random encoder-decoders of text, and their tokens by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.whisper_models import SIZES

VOCAB_SIZE, MAX_LEN = 200, 64


def write_bart(folder: Path) -> Any:
    """→ transformers' model"""
    import transformers

    config = transformers.BartConfig(
        vocab_size=VOCAB_SIZE,
        **SIZES,
        max_position_embeddings=MAX_LEN,
        scale_embedding=True,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_bos_token_id=0,
    )
    return _write(lambda: transformers.BartForConditionalGeneration(config), folder)


def write_t5(folder: Path, *, gated: bool = False) -> Any:
    """→ transformers' model. gated: as T5 1.1"""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        feed_forward_proj="gated-gelu" if gated else "relu",
        n_positions=MAX_LEN,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        **({"tie_word_embeddings": False} if gated else {}),
    )
    return _write(lambda: transformers.T5ForConditionalGeneration(config), folder)


def _write(make: Callable[[], Any], folder: Path) -> Any:
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 or name == "final_logits_bias" or "relative_attention_bias" in name:
                tensor.add_((1.0 if "relative" in name else 0.2) * torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return model.eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens behind those with which the decoder must begin."""
    given = model.generation_config
    ids = [one for one in (given.decoder_start_token_id, given.forced_bos_token_id) if one is not None]
    begin = len(ids)
    with torch.no_grad():
        read = model.get_encoder()(torch.tensor([prompt]))
        for _ in range(count):
            logits = model(encoder_outputs=read, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[begin:]
