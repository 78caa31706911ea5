"""Media for Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import BLOCK_ORDER, GRID, PATCHES, WINDOW_END
from compile_and_serve.models.vision.patch_config import PatchConfig, window_blocks
from compile_and_serve.runtime.media.images import Image, resize
from compile_and_serve.runtime.media.patches import blocks_of, grid_of, resized, windows_of
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia


class QwenVLProcessor:
    """Resizes images as the model's image processor does, and cuts them into blocks of patches.

    config: the model's config.json, with `image_processor`. has_windows: layers of the encoder attend within windows.
    """

    three_rows = True

    def __init__(self, config: Mapping[str, Any], *, has_windows: bool) -> None:
        self.patches = PatchConfig.read(config)
        self._window = window_blocks(config["vision_config"], self.patches) if has_windows else 0
        self.tokens: dict[MediaKind, int] = {"image": config["image_token_id"], "video": config["video_token_id"]}

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {token: kind for kind, token in self.tokens.items()}

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return f"{self.patches} {self._window}"

    def with_options(self, options: Mapping[str, Any]) -> QwenVLProcessor:
        """The same with other `min_pixels` and `max_pixels`, which cannot exceed the server's. Raises `MediaError`."""
        patches, size = self.patches, options.get("size")
        given = {name: options[name] for name in options if name != "size"}
        if isinstance(size, Mapping):
            given |= {
                ours: size[theirs] for theirs, ours in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")) if theirs in size
            }
        if unknown := given.keys() - {"min_pixels", "max_pixels"}:
            raise MediaError(f"mm_processor_kwargs has {min(unknown)!r:.100}, but this model knows min_pixels, max_pixels and size.")
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= patches.max_pixels:
                raise MediaError(f"{name} of mm_processor_kwargs must be 1 to {patches.max_pixels}, got {value!r:.100}.")
        changed = copy(self)
        changed.patches = replace(patches, **given)
        if changed.patches.min_pixels > changed.patches.max_pixels:
            changed.patches = replace(changed.patches, min_pixels=changed.patches.max_pixels)
        return changed

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        patches = self.patches
        width, height = image.size
        new_height, new_width = resized(height, width, patches.block_pixels, patches.min_pixels, patches.max_pixels)
        pixels_HWC = resize(image, new_width, new_height)
        item = self.item(np.broadcast_to(pixels_HWC, (patches.frames, *pixels_HWC.shape)), offset=0)
        return PreparedMedia(kind="image", key=key, tokens=[self.tokens["image"]] * item.length, items=[item])

    def item(self, frames_NHWC: np.ndarray, offset: int, *, time: int = 0, advance: int | None = None) -> PreparedItem:
        """The item of a patch's frames, whose sides are multiples of a block's."""
        patches = self.patches
        height, width = (size // patches.patch_size for size in frames_NHWC.shape[1:3])
        rows, columns = height // patches.merge, width // patches.merge
        blocks, grid = blocks_of(frames_NHWC, patches.patch_size, patches.merge), grid_of(height, width, patches.merge)
        arrays = {}
        if self._window:
            order, ends = windows_of(rows, columns, self._window)
            blocks, grid = blocks[order], grid[order]
            arrays = {WINDOW_END: StepArray.of(ends), BLOCK_ORDER: StepArray.of(np.argsort(order).astype(np.int32))}
        arrays |= {PATCHES: StepArray.of(blocks), GRID: StepArray.of(grid)}
        return PreparedItem(offset=offset, length=rows * columns, arrays=arrays, time=time, height=rows, width=columns, advance=advance)
