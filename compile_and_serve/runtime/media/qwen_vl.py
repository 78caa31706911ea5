"""Media for Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import BLOCK_ORDER, GRID, PATCHES, WINDOW_END
from compile_and_serve.models.vision.patch_config import PatchConfig, VideoConfig, window_blocks
from compile_and_serve.runtime.media.images import Image, resize
from compile_and_serve.runtime.media.patches import blocks_of, grid_of, resized, windows_of
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia
from compile_and_serve.runtime.media.videos import Frames, spread_frames, stepped_frames


class QwenVLProcessor(NoMedia):
    """Resizes images as the model's image processor does, and cuts them into blocks of patches.

    config: the model's config.json, with `image_processor` and `video_processor`. encode: ids of a text; None: no videos. has_windows:
    layers of the encoder attend within windows (Qwen2.5-VL).
    """

    three_rows, sees_ahead = True, False

    def __init__(self, config: Mapping[str, Any], encode: Callable[[str], list[int]] | None = None, *, has_windows: bool) -> None:
        self.patches, self.video, self.encode = PatchConfig.read(config), VideoConfig.read(config), encode
        self.around = (config.get("vision_start_token_id", -1), config.get("vision_end_token_id", -1))
        self._window = window_blocks(config["vision_config"], self.patches) if has_windows else 0
        self.tokens: dict[MediaKind, int] = {"image": config["image_token_id"], "video": config["video_token_id"]}

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {token: kind for kind, token in self.tokens.items()}

    @property
    def merged_patches(self) -> int:
        """Patches along a side of what one token stands for."""
        return self.patches.merge

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return f"{self.patches} {self.video} {self._window}"

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

    def sample(self, total: int, fps: float) -> np.ndarray:
        """The numbers of the frames that are taken of a video."""
        video = self.video
        if self._window:
            multiple = self.patches.frames
            return stepped_frames(total, fps, rate=video.rate, least=video.min_frames, most=video.max_frames, multiple=multiple)
        return spread_frames(total, fps, rate=video.rate, least=video.min_frames, most=video.max_frames)

    def frames(self, frames: Frames, key: bytes) -> PreparedMedia:
        """A video. Raises `MediaError`."""
        patches, video, count = self.patches, self.video, len(frames.images)
        width, height = frames.images[0].size
        per_frame = video.max_pixels if self._window else video.max_pixels // count
        least = video.min_pixels if self._window else video.min_pixels // count
        most = max(patches.block_pixels**2, min(per_frame, patches.max_pixels))
        new_height, new_width = resized(height, width, patches.block_pixels, least if least < most else 0, most)
        pixels = [resize(image, new_width, new_height) for image in frames.images]
        pixels += pixels[-1:] * (-count % patches.frames)
        numbers = np.concatenate((frames.numbers, np.repeat(frames.numbers[-1:], -count % patches.frames)))
        groups = [np.stack(pixels[i : i + patches.frames]) for i in range(0, len(pixels), patches.frames)]
        token, items, tokens = self.tokens["video"], list[PreparedItem](), list[int]()
        if self._window:
            rate = count / frames.total * frames.fps  # of the frames that were taken
            interval = video.tokens_per_second * int(patches.frames / rate)
            for number, group in enumerate(groups):
                is_last = number + 1 == len(groups)
                items.append(self.item(group, len(tokens), time=number * interval, advance=None if is_last else 0))
                tokens += [token] * items[-1].length
            return PreparedMedia(kind="video", key=key, tokens=tokens, items=items)
        assert self.encode is not None, "videos of Qwen3-VL have texts"
        for number, group in enumerate(groups):
            begin, end = numbers[number * patches.frames], numbers[(number + 1) * patches.frames - 1]
            tokens += [*self.encode(f"<{(begin + end) / 2 / frames.fps:.1f} seconds>"), self.around[0]]
            items.append(self.item(group, len(tokens)))
            tokens += [token] * items[-1].length + [self.around[1]]
        return PreparedMedia(kind="video", key=key, tokens=tokens, items=items, around=self.around)

    def item(self, frames_NHWC: np.ndarray, offset: int, *, time: int = 0, advance: int | None = None) -> PreparedItem:
        """The item of a patch's frames, whose sides are multiples of a block's."""
        patches = self.patches
        height, width = (size // patches.patch_size for size in frames_NHWC.shape[1:3])
        rows, columns = height // patches.merge, width // patches.merge
        grid, order, arrays = grid_of(height, width, patches.merge), None, dict[str, StepArray]()
        if self._window:
            order, ends = windows_of(rows, columns, self._window)
            grid = grid[order]
            arrays = {WINDOW_END: StepArray.of(ends), BLOCK_ORDER: StepArray.of(np.argsort(order).astype(np.int32))}
        blocks = blocks_of(frames_NHWC, patches.patch_size, patches.merge, order)
        arrays |= {PATCHES: StepArray.holding(blocks), GRID: StepArray.of(grid)}
        return PreparedItem(offset=offset, length=rows * columns, arrays=arrays, time=time, height=rows, width=columns, advance=advance)
