"""Which processor prepares the media of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compile_and_serve.runtime.media.audio import AudioLimits
from compile_and_serve.runtime.media.by_transformers import TransformersProcessor
from compile_and_serve.runtime.media.images import Image
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.media.kimi_k25 import KimiK25Processor
from compile_and_serve.runtime.media.llava import LlavaProcessor
from compile_and_serve.runtime.media.mllama import MllamaProcessor
from compile_and_serve.runtime.media.openvla import OpenVLAProcessor
from compile_and_serve.runtime.media.paligemma import PaliGemmaProcessor
from compile_and_serve.runtime.media.prepared import MediaKind, PreparedMedia
from compile_and_serve.runtime.media.qwen_vl import QwenVLProcessor
from compile_and_serve.runtime.media.speech import SpeechProcessor
from compile_and_serve.runtime.media.transformers_files import prepares_audio
from compile_and_serve.runtime.media.videos import Frames


class MediaProcessor(Protocol):
    """Turns media into tokens and arrays for one model.

    placeholders: token of a prompt → the kind of media that it stands for. three_rows: the model's positions have three rows.
    settings: what the arrays depend on besides the content. sees_ahead: tokens of an image attend to later ones of it. takes_rows: of the
    encoder, in place of an image.
    """

    three_rows: bool
    sees_ahead: bool
    takes_rows: bool

    @property
    def merged_patches(self) -> int:
        """Patches along a side of what one token stands for, of models whose grids count patches."""
        ...

    @property
    def placeholders(self) -> Mapping[int, MediaKind]: ...

    @property
    def settings(self) -> str: ...

    def with_options(self, options: Mapping[str, Any]) -> MediaProcessor:
        """The same with a request's mm_processor_kwargs. Raises `MediaError`."""
        ...

    def with_placeholders(self, prompt: Sequence[int], media: Sequence[PreparedMedia]) -> Sequence[int]:
        """A prompt's token ids with the placeholders and other tokens that the model expects around these media."""
        ...

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        ...

    def sample(self, total: int, fps: float) -> np.ndarray:
        """The numbers of the frames that are taken of a video of `total` frames."""
        ...

    def frames(self, frames: Frames, key: bytes) -> PreparedMedia:
        """A video. Raises `MediaError`."""
        ...

    @property
    def audio_limits(self) -> AudioLimits:
        """Of one audio. Raises `MediaError`."""
        ...

    def audio(self, samples: np.ndarray, key: bytes) -> PreparedMedia:
        """samples: float32 [N], mono, at the rate of `audio_limits`. Raises `MediaError`."""
        ...


Encode = Callable[[str], list[int]]
PROCESSORS: dict[str, Callable[[Mapping[str, Any], Encode | None], MediaProcessor]] = {
    "KimiK25ForConditionalGeneration": KimiK25Processor,
    "Kimi_K25ForConditionalGeneration": KimiK25Processor,
    "LlavaForConditionalGeneration": LlavaProcessor,
    "OpenVLAForActionPrediction": OpenVLAProcessor,
    "Qwen2_5_VLForConditionalGeneration": partial(QwenVLProcessor, has_windows=True),
    "Qwen3VLForConditionalGeneration": partial(QwenVLProcessor, has_windows=False),
    "Qwen3VLMoeForConditionalGeneration": partial(QwenVLProcessor, has_windows=False),
}


def media_processor(info: MediaInfo | None, encode: Encode | None = None) -> MediaProcessor | None:
    """None for a model that reads only text. encode: ids of a text. Raises `MediaError` for files that cannot be used."""
    if info is None:
        return None
    config = json.loads(info.config)
    if info.by_transformers:
        folder = Path(info.folder)
        if prepares_audio(folder):
            return SpeechProcessor(config, folder, info.max_audio_seconds)
        if config.get("model_type") == "mllama":
            return MllamaProcessor(config, folder)
        if config.get("model_type") == "paligemma":
            return PaliGemmaProcessor(config, folder)
        return TransformersProcessor(config, folder, sees_ahead=info.sees_ahead)
    make = PROCESSORS.get((config.get("architectures") or [""])[0])
    return None if make is None else make(config, encode)
