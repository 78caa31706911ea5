"""Vision-language classes of the transformers package: tiny configs of each, and how its images and texts are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from compile_and_serve.runtime.media.kimi_k25 import KimiK25Processor
from tests.support import kimi_k25_models

SIDE = 24  # pixels of a tile
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_SIZE = {"height": SIDE, "width": SIDE}
_PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
_QWEN_VISION = {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "depth": 2, "mlp_ratio": 2, "patch_size": 4, "initializer_range": 0.3}
_GLM_VISION = {
    "hidden_size": 32,
    "out_hidden_size": 64,
    "intermediate_size": 48,
    "num_heads": 2,
    "depth": 2,
    "patch_size": 4,
    "image_size": SIDE,
    "initializer_range": 0.3,
}
_PIXELS = {"shortest_edge": 256, "longest_edge": 4096}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


@dataclass(frozen=True, kw_only=True)
class Seeing:
    """name: of the class, without its end. text, vision: configs. image: the image processor's class and settings; processor: of the
    whole. by_hand: in place of both, where transformers' need torchvision: (rows, columns) of an image in tiles or patches → its text
    and its tensors. options: of the whole config. tokens: special ones, by the tokenizer's names. row_token: what features replace. video:
    settings of the video processor. native: this project's processor, of config.json. publish: writes the weights as they are published.
    """

    name: str
    text: Callable[[], Any]
    vision: Callable[[], Any]
    image: tuple[str, Mapping[str, Any]] | None = None
    processor: tuple[str, Mapping[str, Any]] = ("", {})
    by_hand: Callable[[int, int], tuple[str, dict[str, np.ndarray]]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)
    image_token: str = "<image>"
    row_token: str = ""
    video: Mapping[str, Any] | None = None
    native: Callable[[Mapping[str, Any]], Any] | None = None
    publish: Callable[[Any, Path], Any] | None = None


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[-1] + 10 * shape[0]).standard_normal(shape, dtype=np.float32)


def _pixtral(merge: int) -> Callable[[int, int], tuple[str, dict[str, np.ndarray]]]:
    def make(rows: int, columns: int) -> tuple[str, dict[str, np.ndarray]]:
        height, width = rows * merge * 4, columns * merge * 4
        lines = [" ".join(["[IMG]"] * columns)] * rows
        return " [IMG_BREAK] ".join(lines) + " [IMG_END]", {
            "pixel_values": _noise(1, 3, height, width),
            "image_sizes": np.array([[height, width]]),
        }

    return make


def _tiles(line: Callable[[int, int], str]) -> Callable[[int, int], tuple[str, dict[str, np.ndarray]]]:
    """Tiles of `SIDE` pixels, beside one of the whole image."""

    def make(rows: int, columns: int) -> tuple[str, dict[str, np.ndarray]]:
        pixels = _noise(rows * columns + 1, 3, SIDE, SIDE)
        return line(rows, columns), {"pixel_values": pixels}

    return make


def _repeated(word: str, times: int = 9) -> str:
    return " ".join([word] * times)


def _of_ovis(rows: int, columns: int) -> str:
    lines = [" <IMG_COL> ".join([_repeated("<IMG_ATOM>")] * columns)] * rows
    return f"<IMG_START> {_repeated('<IMG_ATOM>')} <IMG_GRID> {' <IMG_ROW> '.join(lines)} <IMG_END>"


def _of_gemma(rows: int, columns: int) -> str:
    return f"<start_of_image> {_repeated('<image_soft_token>')} <end_of_image>"


def _of_llama(rows: int, columns: int) -> str:
    lines = [" <|tile_x_separator|> ".join([_repeated("<|patch|>")] * columns)] * rows
    return f"<|image_start|> {' <|tile_y_separator|> '.join(lines)} <|image|> {_repeated('<|patch|>')} <|image_end|>"


def _llama() -> Any:
    return transformers.LlamaConfig(**TINY)


def _siglip() -> Any:
    return transformers.SiglipVisionConfig(**_VISION)


_IDEFICS_TILES = {f"tile{i}{j}": f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)}
CLASSES: dict[str, Seeing] = {
    "llava": Seeing(
        name="Llava",
        text=_llama,
        vision=lambda: transformers.CLIPVisionConfig(**_VISION, projection_dim=32),
        image=("CLIPImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": _SIZE}),
        processor=("LlavaProcessor", {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
    ),
    "llava_next": Seeing(
        name="LlavaNext",
        text=lambda: transformers.MistralConfig(**TINY, sliding_window=None),
        vision=lambda: transformers.CLIPVisionConfig(**_VISION, projection_dim=32),
        image=("LlavaNextImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": _SIZE, "image_grid_pinpoints": _PINPOINTS}),
        processor=("LlavaNextProcessor", {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}),
        options={"image_grid_pinpoints": _PINPOINTS},
    ),
    "llava_onevision": Seeing(
        name="LlavaOnevision",
        text=lambda: transformers.Qwen2Config(**TINY),
        vision=_siglip,
        image=("LlavaOnevisionImageProcessorPil", {"size": _SIZE, "image_grid_pinpoints": _PINPOINTS}),
        processor=("LlavaOnevisionProcessor", {"num_image_tokens": 36, "vision_feature_select_strategy": "full"}),
        options={
            "image_grid_pinpoints": _PINPOINTS,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "video_token_id": 12,
        },
        tokens={"video_token": "<video>"},
        video={"size": _SIZE, "num_frames": 3},
    ),
    "llava_next_video": Seeing(
        name="LlavaNextVideo",
        text=_llama,
        vision=lambda: transformers.CLIPVisionConfig(**_VISION, projection_dim=32),
        image=("LlavaNextImageProcessorPil", {"size": {"shortest_edge": SIDE}, "crop_size": _SIZE, "image_grid_pinpoints": _PINPOINTS}),
        processor=(
            "LlavaNextVideoProcessor",
            {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ),
        options={"image_grid_pinpoints": _PINPOINTS, "image_seq_length": 36, "video_seq_length": 9, "video_token_id": 12},
        tokens={"video_token": "<video>"},
        video={"size": {"shortest_edge": SIDE}, "crop_size": _SIZE, "num_frames": 3},
    ),
    "internvl": Seeing(
        name="InternVL",
        text=lambda: transformers.Qwen2Config(**TINY),
        vision=lambda: transformers.InternVLVisionConfig(**(_VISION | {"image_size": [SIDE, SIDE], "patch_size": [4, 4]})),
        image=("GotOcr2ImageProcessorPil", {"size": _SIZE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}),
        processor=("InternVLProcessor", {"image_seq_length": 9}),
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        options={"image_seq_length": 9},
        image_token="<IMG_CONTEXT>",
        video={"size": _SIZE, "num_frames": 3},
    ),
    "mistral3": Seeing(
        name="Mistral3",
        text=lambda: transformers.MistralConfig(**TINY, sliding_window=None),
        vision=lambda: transformers.PixtralVisionConfig(**(_VISION | {"image_size": 96, "head_dim": 16})),
        by_hand=_pixtral(2),
        options={"spatial_merge_size": 2, "vision_feature_layer": -1},
        image_token="[IMG]",
        tokens={"break": "[IMG_BREAK]", "end": "[IMG_END]"},
    ),
    "pixtral": Seeing(
        name="Llava",
        text=lambda: transformers.MistralConfig(**TINY, sliding_window=None),
        vision=lambda: transformers.PixtralVisionConfig(**(_VISION | {"image_size": 96, "head_dim": 16})),
        by_hand=_pixtral(1),
        options={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        image_token="[IMG]",
        tokens={"break": "[IMG_BREAK]", "end": "[IMG_END]"},
    ),
    "idefics3": Seeing(
        name="Idefics3",
        text=_llama,
        vision=lambda: transformers.models.idefics3.Idefics3VisionConfig(**_VISION),
        image=("Idefics3ImageProcessorPil", {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}),
        processor=("Idefics3Processor", {"image_seq_len": 9}),
        options={"scale_factor": 2},
        tokens={"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>", **_IDEFICS_TILES},
    ),
    "smolvlm": Seeing(
        name="SmolVLM",
        text=_llama,
        vision=lambda: transformers.models.smolvlm.SmolVLMVisionConfig(**_VISION),
        image=("SmolVLMImageProcessorPil", {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}),
        processor=("SmolVLMProcessor", {"image_seq_len": 9}),
        options={"scale_factor": 2},
        tokens={
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "video_token": "<video>",
            **_IDEFICS_TILES,
        },
        video={"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}, "max_frames": 5, "fps": 1},
    ),
    "qwen2_vl": Seeing(
        name="Qwen2VL",
        text=lambda: TINY | _MROPE,
        vision=lambda: _QWEN_VISION,
        image=("Qwen2VLImageProcessorPil", {"size": _PIXELS, "patch_size": 4}),
        processor=("Qwen2VLProcessor", {}),
        tokens={"video_token": "<video>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"},
        options={"video_token_id": 12, "vision_start_token_id": 13, "vision_end_token_id": 14},
        video={"size": _PIXELS, "patch_size": 4},
    ),
    "glm4v": Seeing(
        name="Glm4v",
        text=lambda: (
            TINY
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}}
        ),
        vision=lambda: _GLM_VISION,
        image=("Glm4vImageProcessorPil", {"size": _PIXELS, "patch_size": 4}),
        processor=("Glm4vProcessor", {}),
        tokens={
            "video_token": "<|video|>",
            "start": "<|begin_of_image|>",
            "end": "<|end_of_image|>",
            "video_start": "<|begin_of_video|>",
            "video_end": "<|end_of_video|>",
        },
        options={
            "video_token_id": 12,
            "image_start_token_id": 13,
            "image_end_token_id": 14,
            "video_start_token_id": 15,
            "video_end_token_id": 16,
        },
        video={"size": _PIXELS, "patch_size": 4},
    ),
    "ovis2": Seeing(
        name="Ovis2",
        text=lambda: transformers.Qwen2Config(**TINY),
        vision=lambda: transformers.models.ovis2.Ovis2VisionConfig(
            **_VISION, hidden_stride=2, vocab_size=40, num_visual_indicator_tokens=5
        ),
        by_hand=_tiles(_of_ovis),
        tokens={
            "atom": "<IMG_ATOM>",
            "start": "<IMG_START>",
            "grid": "<IMG_GRID>",
            "col": "<IMG_COL>",
            "row": "<IMG_ROW>",
            "end": "<IMG_END>",
        },
        options={"visual_indicator_token_ids": [13, 14, 15, 16, 17], "vocab_size": 320, "hidden_size": 64},
        row_token="<IMG_ATOM>",
    ),
    "gemma3": Seeing(
        name="Gemma3",
        text=lambda: transformers.Gemma3TextConfig(
            **{**TINY, "num_hidden_layers": 4},
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=16,
        ),
        vision=_siglip,
        by_hand=lambda rows, columns: (_of_gemma(rows, columns), {"pixel_values": _noise(1, 3, SIDE, SIDE) + rows - columns}),
        options={"mm_tokens_per_image": 9},
        tokens={"soft": "<image_soft_token>", "end": "<end_of_image>"},
        image_token="<start_of_image>",
        row_token="<image_soft_token>",
    ),
    "paligemma": Seeing(
        name="PaliGemma",
        text=lambda: transformers.GemmaConfig(**TINY),
        vision=_siglip,
        image=("SiglipImageProcessorPil", {"size": _SIZE, "image_seq_length": 36}),
        processor=("PaliGemmaProcessor", {}),
        options={"projection_dim": 64},
        tokens={"image_token": "<image>"},
    ),
    "paligemma2": Seeing(
        name="PaliGemma",
        text=lambda: transformers.Gemma2Config(**TINY, sliding_window=256, query_pre_attn_scalar=16),
        vision=_siglip,
        image=("SiglipImageProcessorPil", {"size": _SIZE, "image_seq_length": 36}),
        processor=("PaliGemmaProcessor", {}),
        options={"projection_dim": 64},
        tokens={"image_token": "<image>"},
    ),
    "deepseek_vl": Seeing(
        name="DeepseekVL",
        text=_llama,
        vision=_siglip,
        image=("DeepseekVLImageProcessorPil", {"size": _SIZE}),
        processor=("DeepseekVLProcessor", {"num_image_tokens": 36}),
        tokens={"image_token": "<image>"},
    ),
    "janus": Seeing(
        name="Janus",
        text=_llama,
        vision=lambda: transformers.JanusVisionConfig(
            **{name: value for name, value in _VISION.items() if name != "intermediate_size"}, projection_dim=64, num_image_tokens=36
        ),
        image=("JanusImageProcessorPil", {"size": _SIZE}),
        processor=("JanusProcessor", {"num_image_tokens": 36}),
        options={"vq_config": {"base_channels": 32, "channel_multiplier": [1], "projection_dim": 64, "num_embeddings": 16}},
        tokens={"image_token": "<image>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "llama4": Seeing(
        name="Llama4",
        text=lambda: transformers.Llama4TextConfig(
            **TINY, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=64, use_qk_norm=False, interleave_moe_layer_step=1
        ),
        vision=lambda: transformers.Llama4VisionConfig(
            **(_VISION | {"intermediate_size": 128}),
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
            pixel_shuffle_ratio=0.5,
        ),
        by_hand=_tiles(_of_llama),
        tokens={
            "patch": "<|patch|>",
            "start": "<|image_start|>",
            "end": "<|image_end|>",
            "x": "<|tile_x_separator|>",
            "y": "<|tile_y_separator|>",
        },
        image_token="<|image|>",
        row_token="<|patch|>",
    ),
    "kimi_k25": Seeing(
        name="Kimi_K25",
        text=lambda: kimi_k25_models.text_config(TINY),
        vision=kimi_k25_models.vision_config,
        native=KimiK25Processor,
        publish=kimi_k25_models.publish,
        options={"projection_hidden_size": 32, "video_token_id": 12, "initializer_range": 0.3},
        tokens={"video": "<video>"},
    ),
}
