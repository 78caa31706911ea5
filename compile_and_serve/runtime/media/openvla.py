"""Images for OpenVLA: of a fixed size, a token for each patch, behind the beginning of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import PATCHES
from compile_and_serve.models.vision.openvla_config import OpenVLAConfig
from compile_and_serve.runtime.media.images import Image, pillow, resize
from compile_and_serve.runtime.media.patches import blocks_of
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia

_EMPTY_TOKEN = 29871  # of Llama's tokenizer: a space; prompts end with it in training


class OpenVLAProcessor(NoMedia):
    """config: the model's config.json."""

    def __init__(self, config: Mapping[str, Any], encode: Callable[[str], list[int]] | None = None) -> None:
        self._config = OpenVLAConfig.read(config)
        text = config.get("text_config") or {}
        self._bos: int = config.get("bos_token_id") or text.get("bos_token_id") or 1

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {self._config.image_token: "image"}

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return f"{self._config.resize} {self._config.patches}"

    def with_options(self, options: Mapping[str, Any]) -> OpenVLAProcessor:
        """There are none. Raises `MediaError`."""
        raise MediaError(f"mm_processor_kwargs has {min(options)!r:.100}, but images of this model have a fixed size.")

    def with_placeholders(self, prompt: Sequence[int], media: Sequence[PreparedMedia]) -> Sequence[int]:
        """With images behind the beginning-of-sequence token, unless placeholders stand elsewhere, and Llama's empty token at the end."""
        ids = list(prompt)
        if not media:
            return ids
        if self._config.image_token not in ids:
            begin = int(ids[:1] == [self._bos])
            ids[begin:begin] = [self._config.image_token] * len(media)
        return ids if ids[-1:] == [_EMPTY_TOKEN] else [*ids, _EMPTY_TOKEN]

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """The image stretched to the model's size; with the strategy "letterbox", after it was filled up to a square."""
        patches = self._config.patches
        if self._config.resize == "letterbox":
            image = _squared(image, tuple(int(255 * value) for value in patches.mean))
        pixels_HWC = resize(image, patches.columns * patches.patch_size, patches.rows * patches.patch_size)
        array = StepArray.of(blocks_of(pixels_HWC[None], patches.patch_size, 1)[:, 0])
        item = PreparedItem(offset=0, length=patches.num_patches, arrays={PATCHES: array})
        return PreparedMedia(kind="image", key=key, tokens=[self._config.image_token] * item.length, items=[item])


def _squared(image: Image, fill: tuple[int, ...]) -> Image:
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    square = pillow().new("RGB", (image.width + 2 * left, image.height + 2 * top), fill)
    square.paste(image, (left, top))
    return square
