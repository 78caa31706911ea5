"""Images for LLaVA: of a fixed size, a token for each patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import GRID, PATCHES
from compile_and_serve.models.vision.patch_config import TowerConfig
from compile_and_serve.runtime.media.images import Image, resize
from compile_and_serve.runtime.media.patches import blocks_of, grid_of
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia


class LlavaProcessor(NoMedia):
    """config: the model's config.json, with `image_processor`."""

    def __init__(self, config: Mapping[str, Any], encode: Callable[[str], list[int]] | None = None) -> None:
        self._tower = TowerConfig.read(config)
        self._token: int = config["image_token_id"] if "image_token_id" in config else config["image_token_index"]

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {self._token: "image"}

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return str(self._tower)

    def with_options(self, options: Mapping[str, Any]) -> LlavaProcessor:
        """There are none. Raises `MediaError`."""
        raise MediaError(f"mm_processor_kwargs has {min(options)!r:.100}, but images of this model have a fixed size.")

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """The image stretched to the model's size."""
        tower = self._tower
        pixels_HWC = resize(image, tower.columns * tower.patch_size, tower.rows * tower.patch_size)
        patches = blocks_of(pixels_HWC[None], tower.patch_size, 1)[:, 0]
        arrays = {PATCHES: StepArray.holding(patches), GRID: StepArray.of(grid_of(tower.rows, tower.columns, 1))}
        item = PreparedItem(offset=0, length=tower.num_patches, arrays=arrays)
        return PreparedMedia(kind="image", key=key, tokens=[self._token] * item.length, items=[item])
