"""Images for Kimi-K2.5: of any size, filled up with black to whole blocks of patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import GRID, PATCHES
from compile_and_serve.models.vision.patch_config import PaddedPatchConfig
from compile_and_serve.runtime.media.images import Image, resize
from compile_and_serve.runtime.media.patches import blocks_of, grid_of, padded
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia

_IMAGE_TOKEN = 163605


class KimiK25Processor(NoMedia):
    """config: the model's config.json, with `image_processor`."""

    def __init__(self, config: Mapping[str, Any], encode: Callable[[str], list[int]] | None = None) -> None:
        self.patches = PaddedPatchConfig.read(config)
        self._token = int(config.get("image_token_id") or config.get("media_placeholder_token_id") or _IMAGE_TOKEN)

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {self._token: "image"}

    @property
    def merged_patches(self) -> int:
        """Patches along a side of what one token stands for."""
        return self.patches.merge

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return str(self.patches)

    def with_options(self, options: Mapping[str, Any]) -> KimiK25Processor:
        """The same with fewer `max_patches`. Raises `MediaError`."""
        if unknown := options.keys() - {"max_patches"}:
            raise MediaError(f"mm_processor_kwargs has {min(unknown)!r:.100}, but this model knows max_patches.")
        most, value = self.patches.max_patches, options.get("max_patches", self.patches.max_patches)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise MediaError(f"max_patches of mm_processor_kwargs must be 1 to {most}, got {value!r:.100}.")
        changed = copy(self)
        changed.patches = replace(self.patches, max_pixels=value * self.patches.patch_size**2)
        return changed

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """The image, smaller if it has too many patches, in the upper left corner of its blocks."""
        patches = self.patches
        width, height = image.size
        (new_height, new_width), (rows, columns) = padded(
            height, width, patches.patch_size, patches.merge, patches.max_patches, patches.max_side
        )
        pixels_HWC = np.zeros((rows, columns, 3), dtype=np.uint8)
        pixels_HWC[:new_height, :new_width] = resize(image, new_width, new_height)
        grid = grid_of(rows // patches.patch_size, columns // patches.patch_size, patches.merge)
        blocks = blocks_of(pixels_HWC[None], patches.patch_size, patches.merge)
        arrays = {PATCHES: StepArray.holding(blocks), GRID: StepArray.of(grid)}
        item = PreparedItem(offset=0, length=len(grid), arrays=arrays)
        return PreparedMedia(kind="image", key=key, tokens=[self._token] * item.length, items=[item])
