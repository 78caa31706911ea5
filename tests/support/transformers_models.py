"""Tiny random models of the transformers package, as folders, and their greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough that greedy choices are not near ties
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    """A config.json that our registry and transformers read alike."""
    return {"architectures": [architecture], **SIZES, **changes}


def write_random_model(folder: Path, architecture: str, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A folder with a random float32 model whose biases are not 0 and whose norm weights are not 1.

    without: names of `SIZES` that the class's config does not have.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    torch.manual_seed(sum(architecture.encode()))
    sizes = {name: value for name, value in (SIZES | changes).items() if name not in without}
    model = model_class(model_class.config_class(**sizes))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * (0.3 if name.endswith("bias") else 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.randn_like(buffer) * 0.1
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    return folder


def greedy_tokens(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Tokens of transformers' own `generate` in float32, each prompt alone; an end-of-text token does not end the text."""
    from transformers import AutoModelForCausalLM

    # transformers' SDPA attention ignores Gemma 2's soft cap.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens)
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model; an end-of-text token does not end its texts, as with `ignore_eos`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model
