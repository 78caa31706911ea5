"""Tiny random Mllama checkpoints, and what transformers generates from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compile_and_serve.runtime.media.mllama import MllamaProcessor
from compile_and_serve.runtime.media.prepared import place_media
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support.engines import request
from tests.support.media_reference import greedy_by_transformers
from tests.support.vision_models import Parts, picture

VOCAB_SIZE, IMAGE, SIDE, MAX_TILES = 320, 321, 24, 4


def write_mllama(folder: Path) -> Any:
    """A checkpoint of two layers that read images, among five. → transformers' model, whose tokens before images read none"""
    import transformers
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "cross_attention_layers": [1, 3],
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_global_layers": 2,
        "attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 4,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 96,
        "initializer_range": 0.3,
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_((0.7 if "gate" in name else 0.2) * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    MllamaImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_image_tiles=MAX_TILES).save_pretrained(folder)
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(_mask_attention, with_kwargs=True)
    return model


def _mask_attention(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a layer's attention give zeros to tokens that read no image, as in Meta's code."""
    is_masked = kwargs.get("full_text_row_masked_out_mask")

    def hook(attention: Any, given: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        handle.remove()
        return (output[0] if is_masked is None else output[0] * is_masked[:, 0], *output[1:])

    handle = layer.cross_attn.register_forward_hook(hook)


def mllama_request(name: str, parts: Parts, processor: Any, **params: Any) -> tuple[EngineRequest, list[Any]]:
    """A greedy request, and its images."""
    from PIL.Image import fromarray

    prompt, media, images = [], [], []
    for part in parts:
        prompt += part if isinstance(part, list) else [IMAGE]
        if isinstance(part, tuple):
            images.append(fromarray(picture(*part)))
            media.append(processor.image(images[-1], repr(part).encode()))
    tokens, items = place_media(prompt, media, processor.placeholders, three_rows=False)
    one = request(name, tokens, **{"max_tokens": 32, "ignore_eos": True, "logprobs": 0} | params)
    one.media = items
    return one, images


def processor_of(folder: Path) -> MllamaProcessor:
    return MllamaProcessor(read_folder_config(folder), folder)


def reference(model: Any, folder: Path, one: EngineRequest, images: Sequence[Any]) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens for a request, and their log-probabilities."""
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
    from transformers.models.mllama.processing_mllama import convert_sparse_cross_attention_mask_to_dense, get_cross_attention_token_mask

    inputs: Mapping[str, Any] = {}
    if images:
        made = MllamaImageProcessorPil.from_pretrained(folder)(images=[list(images)], return_tensors="pt")
        mask = convert_sparse_cross_attention_mask_to_dense(
            [get_cross_attention_token_mask(one.prompt_token_ids, IMAGE)], made.pop("num_tiles"), MAX_TILES, len(one.prompt_token_ids)
        )
        inputs = {**made, "cross_attention_mask": torch.from_numpy(np.asarray(mask))}
    ids = torch.tensor([one.prompt_token_ids])
    assert one.sampling_params.max_tokens is not None
    return greedy_by_transformers(model, ids, one.sampling_params.max_tokens, inputs)
