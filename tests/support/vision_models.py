"""Tiny random vision-language checkpoints, and what transformers generates from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from compile_and_serve.runtime.media.prepared import place_media
from compile_and_serve.runtime.media.qwen_vl import QwenVLProcessor
from compile_and_serve.runtime.media.videos import as_frames
from compile_and_serve.runtime.messages import EngineRequest
from tests.support.engines import prompt_of, request

IMAGE, VIDEO, BEGIN, END = 7, 8, 9, 10  # tokens
MAX_TOKENS = 64  # of an image
_PIXELS = {"min_pixels": 256, "max_pixels": MAX_TOKENS * 64}
_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.3,
}
_SECOND = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
_THIRD = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
_THIRD_VISION = {"depth": 4, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Name → prefix of transformers' classes, and what its configs add.
QWEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5": ("Qwen2_5_VL", _SECOND, {"depth": 3, "window_size": 16, "fullatt_block_indexes": [1], "intermediate_size": 44}),
    "qwen3": ("Qwen3VL", _THIRD, _THIRD_VISION),
    "qwen3_moe": ("Qwen3VLMoe", _THIRD | _EXPERTS, _THIRD_VISION),
}


def write_qwen(
    name: str, folder: Path, *, experts_have_inputs_first: bool = False, image_token_id: int = IMAGE, video_token_id: int = VIDEO
) -> Any:
    """A checkpoint of a name in `QWEN`. → transformers' model"""
    prefix, text, vision = QWEN[name]
    config = getattr(transformers, f"{prefix}Config")(
        text_config=_TEXT | text,
        vision_config=_VISION | vision,
        image_token_id=image_token_id,
        video_token_id=video_token_id,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    with torch.no_grad():  # biases and norms are as good as trained ones
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    if experts_have_inputs_first:
        _swap_experts(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PIXELS))
    return model


def _swap_experts(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def picture(number: int, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: noise."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


Parts = Sequence[list[int] | tuple[int, int, int]]  # texts (token ids) and images (number, width, height)
TEXT = [[token if token not in (2, IMAGE, VIDEO, BEGIN, END) else 20 for token in prompt_of(i, 5 + 4 * i)] for i in range(4)]
FIRST, SECOND, THIRD = (1, 40, 24), (2, 57, 61), (3, 16, 90)
PROMPTS: dict[str, Parts] = {
    "text": [TEXT[3]],
    "first": [FIRST, TEXT[2]],
    "last": [TEXT[1], SECOND],
    "middle": [TEXT[2], THIRD, TEXT[1]],
    "three": [TEXT[0], FIRST, [11, 12], SECOND, THIRD, TEXT[3]],
}


def video_request(name: str, processor: QwenVLProcessor, **params: Any) -> tuple[EngineRequest, dict[str, Any]]:
    """A request with a video between texts, and transformers' inputs of the same frames."""
    frames = np.stack([picture(20 + i, 24, 16) for i in range(7)])
    prepared = processor.frames(as_frames((frames, {"fps": 2.0}), processor.sample), b"video")
    prompt = [*TEXT[0], BEGIN, VIDEO, END, *TEXT[1]]
    tokens, items = place_media(prompt, [prepared], processor.placeholders, three_rows=True)
    one = request("video", tokens, **{"max_tokens": 32, "ignore_eos": True, "logprobs": 0} | params)
    one.media = items
    values, grids = [], set()
    for item in items:
        end = item.position + item.length
        blocks = item.arrays["patches"].rows(item.position, end)
        if "block_order" in item.arrays:
            blocks = blocks[item.arrays["block_order"].rows(item.position, end)]
        values.append(blocks.reshape(-1, blocks.shape[-1]))
        grids.add(tuple(item.arrays["grid"].rows(item.position, end)[0, 2:].tolist()))
    [(height, width)] = grids
    channel = {"mean": processor.patches.mean, "std": processor.patches.std}
    mean, std = (np.repeat(np.array(channel[key], np.float32), processor.patches.values // 3) for key in ("mean", "std"))
    inputs = {
        "pixel_values_videos": torch.from_numpy((np.concatenate(values).astype(np.float32) / 255 - mean) / std),
        "video_grid_thw": torch.tensor([[len(items), height, width]]),
    }
    return one, inputs | ({"second_per_grid_ts": torch.tensor([1.0])} if name == "qwen2_5" else {})


def engine_request(name: str, parts: Parts, processor: QwenVLProcessor, **params: Any) -> EngineRequest:
    """A greedy request of 32 tokens. Images of equal numbers and sizes have equal keys."""
    from PIL.Image import fromarray

    prompt: list[int] = []
    media = []
    for part in parts:
        prompt += part if isinstance(part, list) else [BEGIN, IMAGE, END]
        if isinstance(part, tuple):
            media.append(processor.image(fromarray(picture(*part)), repr(part).encode()))
    tokens, items = place_media(prompt, media, processor.placeholders, three_rows=True)
    one = request(name, tokens, **{"max_tokens": 32, "ignore_eos": True, "logprobs": 0} | params)
    one.media = items
    return one


def generated(
    model: Any, name: str, one: EngineRequest, parts: Parts, inputs: dict[str, Any] | None = None
) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens for a request, and their log-probabilities. name: in `QWEN`. inputs: in place of those of the images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    images = [picture(*part) for part in parts if isinstance(part, tuple)]
    inputs = inputs or {}
    if images:
        half = {} if name == "qwen2_5" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        reference = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, **_PIXELS, **half)
        inputs = dict(reference(images=images, return_tensors="pt"))
        assert [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]] == [item.length for item in one.media]
    ids = torch.tensor([one.prompt_token_ids])
    model.model.rope_deltas = None
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        max_new_tokens=one.sampling_params.max_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs,
    )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    logprobs = [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]
    return tokens, logprobs
