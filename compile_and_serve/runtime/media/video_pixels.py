"""What the video processors of the transformers package do, without torchvision, which those need.

Shape legend: F frames, C channels, H height and W width in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.images import Image, pillow, resize
from compile_and_serve.runtime.media.patches import resized

MAX_TOKENS = 8192  # of a video whose frames may have any size: more frames are smaller ones
MAX_FRAMES = 256  # of such a video
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_CROPPED = {**_CLIP, "size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "num_frames": 8}
_WHOLE = {**_CLIP, "size": {"height": 384, "width": 384}, "do_center_crop": False, "num_frames": 32}
_PATCHES = {**_CLIP, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "fps": 2}
_GLM = {**_PATCHES, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}, "max_frames": 600, "counts_frames": True}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_SMOL = {**_HALF, "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}, "max_frames": 64, "fps": 1}
_SKIPPED_SECONDS = 1  # of long videos of SmolVLM, at both ends
# Class of a video processor → its settings where a folder has no others.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlavaNextVideoVideoProcessor": _CROPPED,
    "VideoLlavaVideoProcessor": _CROPPED,
    "LlavaOnevisionVideoProcessor": _WHOLE,
    "InternVLVideoProcessor": {**_WHOLE, "num_frames": 8},
    "Qwen2VLVideoProcessor": {**_PATCHES, "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}, "max_frames": 768},
    "SmolVLMVideoProcessor": _SMOL,
    "Glm4vVideoProcessor": _GLM,
    "Glm46VVideoProcessor": _GLM,
}
# Type of a model → class of its video processor where the folder names none.
_OF_MODELS: Mapping[str, str] = {
    "llava_next_video": "LlavaNextVideoVideoProcessor",
    "video_llava": "VideoLlavaVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "exaone4_5"), "Qwen2VLVideoProcessor"),
    **dict.fromkeys(("glm4v", "glm4v_moe"), "Glm4vVideoProcessor"),
    **dict.fromkeys(("glm46v", "glm_ocr"), "Glm46VVideoProcessor"),
}


class VideoPixels:
    """Takes the place of a video processor in a processor of the transformers package. Pixels of its tensors are bytes, in float32.

    name: of the class that it stands for, in `DEFAULTS`. settings: of the checkpoint.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        given = {key: value for key, value in settings.items() if value is not None}
        if isinstance(size := given.get("size"), int):
            given["size"] = {"shortest_edge": size}
        if isinstance(sampling := given.get("video_sampling"), Mapping):  # SmolVLM's settings of videos, in the file of those of images
            given |= {name: sampling[key] for key, name in (("max_frames", "max_frames"), ("fps", "fps")) if key in sampling}
            given["size"] = sampling.get("video_size") or given.get("size") or DEFAULTS[name]["size"]
        self.__dict__.update({**DEFAULTS[name], **given})
        self.settings: Mapping[str, Any] = dict(self.__dict__)
        self.model_input_names = ["pixel_values_videos"]

    @property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of the channels, of values from 0 to 1."""
        return np.array(self.settings["image_mean"], np.float32), np.array(self.settings["image_std"], np.float32)

    def sample(self, total: int, fps: float) -> np.ndarray:
        """The numbers of the frames that are taken: so many a second, or as many as the settings have. → int64"""
        settings = self.settings
        if "max_image_size" in settings:
            return _spread(total, fps, rate=settings["fps"], most=settings["max_frames"])
        if "patch_size" in settings:
            frames = settings["temporal_patch_size"]
            most = min(settings["max_frames"], MAX_FRAMES)
            wanted = min(max(round(total / fps * settings["fps"]), settings.get("min_frames", 4)), most)
            count = max(frames, wanted // frames * frames)
        else:
            count = settings["num_frames"]
        count = max(1, min(count, total))
        return np.linspace(0, total - 1, count).round().astype(np.int64)

    def __call__(self, videos: Sequence[Sequence[Image]], **options: Any) -> Any:
        """transformers' `BatchFeature` of one video with its frames; options has its `video_metadata`."""
        import torch
        from transformers import BatchFeature

        frames = videos[0]
        once = {id(image): self._resized(image, len(frames)) for image in {id(image): image for image in frames}.values()}
        pixels_FCHW = np.stack([once[id(image)] for image in frames]).transpose(0, 3, 1, 2)
        data: dict[str, Any] = {"video_metadata": options.get("video_metadata")}
        if "patch_size" in self.settings:
            patches, grid = self._patches(pixels_FCHW)
            data |= {"pixel_values_videos": torch.from_numpy(patches).float(), "video_grid_thw": torch.tensor([grid])}
        elif "max_image_size" in self.settings:
            pixels = torch.from_numpy(np.ascontiguousarray(pixels_FCHW[None])).float()
            data |= {"pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, :, 0], dtype=torch.int64)}
        else:
            data |= {"pixel_values_videos": torch.from_numpy(np.ascontiguousarray(pixels_FCHW[None])).float()}
        return BatchFeature(data)

    def _resized(self, image: Image, num_frames: int) -> np.ndarray:
        """uint8 [H, W, C]"""
        settings = self.settings
        height, width = self._size(image.size[1], image.size[0], num_frames)
        pixels_HWC = resize(image, width, height)
        if "max_image_size" in settings:
            side = settings["max_image_size"]["longest_edge"]
            return resize(pillow().fromarray(pixels_HWC), side, side)
        if not settings.get("do_center_crop"):
            return pixels_HWC
        crop = settings["crop_size"]
        rows, columns = (crop, crop) if isinstance(crop, int) else (crop["height"], crop["width"])
        padding = [(max(0, rows - height + 1) // 2,) * 2, (max(0, columns - width + 1) // 2,) * 2, (0, 0)]
        padded = np.pad(pixels_HWC, padding)
        top, left = (padded.shape[0] - rows) // 2, (padded.shape[1] - columns) // 2
        return padded[top : top + rows, left : left + columns]

    def _size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Of a frame after resizing."""
        settings, size = self.settings, self.settings["size"]
        if "patch_size" in settings:
            frames = settings["temporal_patch_size"]
            counted = max(num_frames, frames) if settings.get("counts_frames") else 1
            block = settings["patch_size"] * settings["merge_size"]
            most = min(size["longest_edge"] // counted, MAX_TOKENS * block**2 // -(-num_frames // frames))
            return resized(height, width, block, min(size["shortest_edge"] // counted, most), most)
        if "height" in size:
            return size["height"], size["width"]
        if "longest_edge" in size:
            edge = size["longest_edge"]
            if width >= height:
                return max(1, _even(int(edge * height / width))), edge
            return edge, max(1, _even(int(edge * width / height)))
        edge = size["shortest_edge"]
        return (edge, int(edge * width / height)) if height <= width else (int(edge * height / width), edge)

    def _patches(self, pixels_FCHW: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """[patches, values], blocks of merged patches one after the other, and the grid: times, rows, columns."""
        patch, merge, frames = (self.settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
        if missing := -len(pixels_FCHW) % frames:
            pixels_FCHW = np.concatenate([pixels_FCHW, np.repeat(pixels_FCHW[-1:], missing, axis=0)])
        num_frames, channels, height, width = pixels_FCHW.shape
        times, rows, columns = num_frames // frames, height // patch, width // patch
        split = pixels_FCHW.reshape(times, frames, channels, rows // merge, merge, patch, columns // merge, merge, patch)
        return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * rows * columns, -1), (times, rows, columns)


def _even(size: int) -> int:
    return size + size % 2


def _spread(total: int, fps: float, *, rate: float, most: int) -> np.ndarray:
    """SmolVLM's choice: `rate` frames a second, at most `most`, without the ends of a long video. → int64"""
    duration = total / fps
    count = max(1, min(round(rate * duration), most))
    begin, end = 0, total - 1
    if duration - 2 * _SKIPPED_SECONDS > most * rate:
        begin, end = int(_SKIPPED_SECONDS * fps), min(int(total - _SKIPPED_SECONDS * fps), total - 1)
    if begin >= end:
        begin, end = 0, total - 1
    return np.unique(np.linspace(begin, end, count).astype(np.int64))


def video_pixels(settings: Mapping[str, Any], model_type: str) -> VideoPixels | None:
    """What stands for the video processor of a checkpoint; None for one that is not known here. settings: of its file."""
    name = str(settings.get("video_processor_type") or _OF_MODELS.get(model_type))
    pillow()
    return VideoPixels(name, settings) if name in DEFAULTS else None
