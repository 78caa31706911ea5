"""The checkpoint that several tests quantize."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float16, which the tests of 4-bit formats quantize."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    return folder
