"""How images become blocks of patches. This file imports no torch, for processes that prepare media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compile_and_serve.models.config import ModelConfigError, number, positive_int

_HALF = (0.5, 0.5, 0.5)
_OPENAI_MEAN, _OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchConfig:
    """From config.json and the settings of the checkpoint's image processor.

    patch_size: pixels of a side. frames: of a patch. merge: patches of a block's side. mean, std: of each channel, of values from 0 to 1.
    min_pixels, max_pixels: of an image after resizing.
    """

    patch_size: int
    frames: int
    merge: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_pixels: int
    max_pixels: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> PatchConfig:
        """config: the whole config.json; `image_processor` in it has the processor's settings. Raises `ModelConfigError`."""
        vision, processor = vision_config(config), config.get("image_processor") or {}
        is_third = str(config.get("model_type")).startswith("qwen3")
        size = processor.get("size") or {}
        limits = {
            "min_pixels": processor.get("min_pixels", size.get("shortest_edge", 65536 if is_third else 56 * 56)),
            "max_pixels": processor.get("max_pixels", size.get("longest_edge", 16777216 if is_third else 28 * 28 * 1280)),
        }
        return cls(
            patch_size=positive_int(vision, "patch_size", 14),
            frames=positive_int(vision, "temporal_patch_size", 2),
            merge=positive_int(vision, "spatial_merge_size", 2),
            channels=positive_int(vision, "in_channels", positive_int(vision, "in_chans", 3)),
            mean=tuple(processor.get("image_mean") or (_HALF if is_third else _OPENAI_MEAN)),
            std=tuple(processor.get("image_std") or (_HALF if is_third else _OPENAI_STD)),
            min_pixels=int(number(limits, "min_pixels", 0)),
            max_pixels=positive_int(limits, "max_pixels"),
        )

    @property
    def block_pixels(self) -> int:
        """Pixels of a block's side."""
        return self.patch_size * self.merge

    @property
    def values(self) -> int:
        """Of a patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """Of the largest image, or of the two frames of a video that one row of blocks stands for."""
        return max(1, self.max_pixels // self.block_pixels**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedPatchConfig(PatchConfig):
    """How images of any size become patches without being enlarged: black pixels fill up the last blocks (Kimi-K2.5).

    max_pixels: of as many patches as an image may have before its sides are filled up. max_side: patches of an image's side.
    """

    max_side: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> PaddedPatchConfig:
        """As `PatchConfig.read`. The settings may also have the names of Kimi's own processor, in `media_proc_cfg`."""
        vision, given = vision_config(config), config.get("image_processor") or {}
        settings = {**(given.get("media_proc_cfg") or {}), **given}
        if settings.get("fixed_output_tokens") is not None:
            raise ModelConfigError("fixed_output_tokens in the settings of the image processor is not supported: set it to null.")
        size, merge = settings.get("size") or {}, vision.get("merge_kernel_size", (2, 2))
        if not isinstance(merge, list | tuple) or len(merge) != 2 or merge[0] != merge[1]:
            raise ModelConfigError(f"merge_kernel_size in the model's config must be two equal numbers, got {merge!r:.100}.")
        limits = {
            "max_patches": settings.get("max_patches", settings.get("in_patch_limit")),
            "max_side": size.get("max_height", settings.get("patch_limit_on_one_side")),
        }
        patch = positive_int(vision, "patch_size", 14)
        return cls(
            patch_size=patch,
            frames=1,
            merge=positive_int({"merge_kernel_size": merge[0]}, "merge_kernel_size"),
            channels=3,
            mean=tuple(settings.get("image_mean") or _HALF),
            std=tuple(settings.get("image_std") or _HALF),
            min_pixels=0,
            max_pixels=positive_int(limits, "max_patches", 16384) * patch**2,
            max_side=positive_int(limits, "max_side", 512),
        )

    @property
    def max_patches(self) -> int:
        """Of an image, before its sides are filled up."""
        return self.max_pixels // self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """No image has more. The limit is on whole patches, so that each side may have almost one patch more, and then a block."""
        longest = -(-self.max_side // self.merge)
        # An image is made smaller by its number of whole patches, of which a side has at least as many as here.
        least = max(1, self.max_patches // self.max_side)
        patches = self.max_patches * (least + 1) ** 2 // least**2
        rows = ((count, min(self.max_side, patches // count)) for count in range(1, self.max_side + 1))
        return max(min(longest, a // self.merge + 1) * min(longest, b // self.merge + 1) for a, b in rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerConfig:
    """How images of a fixed size become patches (SigLIP). rows, columns: of patches. The other fields are as in `PatchConfig`."""

    patch_size: int
    channels: int
    rows: int
    columns: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> TowerConfig:
        """As `PatchConfig.read`."""
        vision, processor = vision_config(config), config.get("image_processor") or {}
        patch, side = positive_int(vision, "patch_size", 16), positive_int(vision, "image_size", 224)
        return cls(
            patch_size=patch,
            channels=positive_int(vision, "num_channels", 3),
            rows=side // patch,
            columns=side // patch,
            mean=tuple(processor.get("image_mean") or _HALF),
            std=tuple(processor.get("image_std") or _HALF),
        )

    @property
    def values(self) -> int:
        """Of a patch."""
        return self.channels * self.patch_size**2

    @property
    def num_patches(self) -> int:
        """Of an image."""
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """How frames of a video are taken, from the settings of the checkpoint's video processor.

    rate: frames a second. min_frames, max_frames: of a video. min_pixels, max_pixels: of a frame (Qwen2.5-VL), or of all frames together
    (Qwen3-VL). tokens_per_second: positions of a second (Qwen2.5-VL).
    """

    rate: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    tokens_per_second: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> VideoConfig:
        """As `PatchConfig.read`; `video_processor` has the settings."""
        processor = config.get("video_processor") or {}
        is_third = str(config.get("model_type")).startswith("qwen3")
        size = processor.get("size") or {}
        limits = {
            "min_pixels": processor.get("min_pixels", size.get("shortest_edge", 128 * 32 * 32 if is_third else 128 * 28 * 28)),
            "max_pixels": processor.get("max_pixels", size.get("longest_edge", 32 * 32 * 768 if is_third else 28 * 28 * 768)),
        }
        return cls(
            rate=number(processor, "fps", 2.0),
            min_frames=positive_int(processor, "min_frames", 4),
            max_frames=positive_int(processor, "max_frames", 768),
            min_pixels=int(number(limits, "min_pixels", 0)),
            max_pixels=positive_int(limits, "max_pixels"),
            tokens_per_second=positive_int(vision_config(config), "tokens_per_second", 2),
        )


def vision_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises `ModelConfigError`."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ModelConfigError(f"vision_config in the model's config must be a JSON object, got {vision!r:.100}.")
    return vision


def window_blocks(vision: Mapping[str, Any], patches: PatchConfig) -> int:
    """Blocks of a side of a window of Qwen2.5-VL's encoder. vision: its config."""
    return max(1, positive_int(vision, "window_size", 112) // patches.block_pixels)
