"""Images and videos for vision-language classes of the transformers package, prepared by their own processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import AHEAD_ARRAY
from compile_and_serve.runtime.media.images import Image, pillow
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia
from compile_and_serve.runtime.media.transformers_files import changed_settings, first_line, load_processor, packed_arrays
from compile_and_serve.runtime.media.video_pixels import video_pixels
from compile_and_serve.runtime.media.videos import Frames

_NOT_OF_IMAGES = ("attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
_PLAIN = {"do_rescale": False, "do_normalize": False}
_CLOSE = 1e-4  # of normalized values


class TransformersProcessor(NoMedia):
    """One item is the whole text of an image or a video: placeholders, and the separators between and around its parts.

    config: the model's config.json, with `image_processor`. folder: of the checkpoint. sees_ahead: as in `MediaProcessor`.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, *, sees_ahead: bool = False) -> None:
        """Raises `MediaError` if the folder has no processor that can be used."""
        pillow()
        import torch
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        of_videos = config.get("video_processor") or _of_videos(config.get("image_processor") or {})
        self._videos = video_pixels(of_videos, str(config.get("model_type")))
        loaded = load_processor(folder, self._videos)
        try:
            self._config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for files that it cannot use
            raise MediaError(f"transformers cannot load the config of {folder.name}: {first_line(error)}.") from None
        if not hasattr(loaded, "image_processor") or getattr(loaded, "image_token", None) is None:
            raise MediaError(f"{type(loaded).__name__} of {folder.name} prepares no images that a prompt has placeholders for.")
        self.transformers_processor, self._torch, self.sees_ahead = loaded, torch, sees_ahead
        self._options = changed_settings(loaded.image_processor, config.get("image_processor") or {})
        self._token = int(loaded.tokenizer.convert_tokens_to_ids(loaded.image_token))
        self._video_token = None if self._videos is None else loaded.tokenizer.get_vocab().get(getattr(loaded, "video_token", None))
        base = MODEL_MAPPING.get(type(self._config), None)
        self._base: Any = base if hasattr(base, "get_rope_index") else None
        self.three_rows = self._base is not None
        self._moments = self._usual_moments()

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {self._token: "image", **({} if self._video_token is None else {self._video_token: "video"})}

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return f"{type(self.transformers_processor).__name__} {sorted(self._options.items())}"

    @property
    def merged_patches(self) -> int:
        """Patches along a side of what one token stands for."""
        return int(getattr(self.transformers_processor.image_processor, "merge_size", 1))

    def with_options(self, options: Mapping[str, Any]) -> TransformersProcessor:
        """There are none. Raises `MediaError`."""
        raise MediaError(
            f"mm_processor_kwargs has {min(options)!r:.100}, but this model takes them for the whole server alone (--mm-processor-kwargs)."
        )

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        return self._prepared("image", key, self._run(image, is_plain=self._moments is not None), self._moments)

    def sample(self, total: int, fps: float) -> np.ndarray:
        """The numbers of the frames that are taken. Raises `MediaError`."""
        return super().sample(total, fps) if self._videos is None else self._videos.sample(total, fps)

    def frames(self, frames: Frames, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        if self._videos is None or self._video_token is None:
            return super().frames(frames, key)
        from transformers.video_utils import VideoMetadata

        numbers = frames.numbers.tolist()
        known = VideoMetadata(total_num_frames=frames.total, fps=frames.fps, duration=frames.total / frames.fps, frames_indices=numbers)
        made = self._made(videos=[frames.images], text=[self.transformers_processor.video_token], video_metadata=[known])
        if "mm_token_type_ids" in made:
            made["mm_token_type_ids"] = 2 * (made["mm_token_type_ids"] > 0)  # where frames have the token of images
        return self._prepared("video", key, made, self._videos.moments)

    def _prepared(
        self, kind: MediaKind, key: bytes, made: dict[str, np.ndarray], moments: tuple[np.ndarray, np.ndarray] | None
    ) -> PreparedMedia:
        """The one item of an image or a video. moments: of pixels that are bytes."""
        ids = made.pop("input_ids")
        types = made.pop("mm_token_type_ids", None)
        tensors = {name: one.astype(np.uint8) if moments is not None and _has_pixels(name, one) else one for name, one in made.items()}
        arrays = {"processed": packed_arrays({"input_ids": ids, **tensors}, *(moments or (None, None)))}
        if self.sees_ahead:
            arrays[AHEAD_ARRAY] = StepArray.of(tokens_ahead(ids[0] == self._config.image_token_id))
        positions, advance = (None, None) if self._base is None else self._positions(ids, types, made)
        item = PreparedItem(offset=0, length=ids.shape[1], arrays=arrays, relative=positions, advance=advance)
        return PreparedMedia(kind=kind, key=key, tokens=ids[0].tolist(), items=[item])

    def _run(self, image: Image, *, is_plain: bool) -> dict[str, np.ndarray]:
        """The processor's tensors of one image and of its text. is_plain: pixels stay bytes."""
        options = {**self._options, **(_PLAIN if is_plain else {})}
        return self._made(images=[image], text=[self.transformers_processor.image_token], **options)

    def _made(self, **given: Any) -> dict[str, np.ndarray]:
        try:
            made = self.transformers_processor(
                add_special_tokens=False, return_tensors="pt", return_mm_token_type_ids=self._base is not None, **given
            )
        except Exception as error:  # of media that the processor cannot take
            kind = "image" if "images" in given else "video"
            raise MediaError(f"The model's processor cannot take the {kind}: {first_line(error)}.") from None
        tensors = {name: one for name, one in made.items() if isinstance(one, self._torch.Tensor)}
        if lost := sorted(made.keys() - tensors.keys() - set(_NOT_OF_IMAGES)):
            raise MediaError(f"The model's processor gives {lost[0]!r}, which is no tensor.")
        left = set(_NOT_OF_IMAGES) - ({"mm_token_type_ids"} if self._base is not None else set())
        return {name: one.numpy() for name, one in tensors.items() if name not in left}

    def _usual_moments(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and deviation of the channels, if the processor's pixels are bytes normalized with them; None: pixels cross as floats."""
        from compile_and_serve.models.vision.whole_items import normalized

        mean, std = (
            np.array(getattr(self.transformers_processor.image_processor, name, None), np.float32) for name in ("image_mean", "image_std")
        )
        if mean.ndim != 1 or mean.shape != std.shape:
            return None
        noise = np.random.default_rng(0)
        for height, width in ((200, 330), (700, 64)):
            image = pillow().fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
            given, plain = self._run(image, is_plain=False), self._run(image, is_plain=True)
            for name in (name for name, one in given.items() if _has_pixels(name, one)):
                pixels, torch = plain[name], self._torch
                if pixels.min() < 0 or pixels.max() > 255 or (pixels != np.round(pixels)).any():
                    return None
                ours = normalized(torch.from_numpy(pixels.astype(np.uint8)), torch.from_numpy(mean), torch.from_numpy(std))
                if ours.shape != given[name].shape or np.abs(ours.numpy() - given[name]).max() > _CLOSE:
                    return None
        return mean, std

    def _positions(self, ids: np.ndarray, types: np.ndarray | None, made: Mapping[str, np.ndarray]) -> tuple[np.ndarray, int]:
        """Positions of three rows as the class numbers them, from 0 on: int32 [tokens, 3], and what the positions gain."""
        tensors = {name: self._torch.from_numpy(one) for name, one in made.items() if name.endswith("_grid_thw")}
        shell = SimpleNamespace(config=self._config)
        for name in ("get_vision_position_ids",):
            if hasattr(self._base, name):
                setattr(shell, name, getattr(self._base, name).__get__(shell))
        types = ids == self._config.image_token_id if types is None else types
        rows, deltas = self._base.get_rope_index(
            shell, self._torch.from_numpy(ids), mm_token_type_ids=self._torch.from_numpy(types).int(), **tensors
        )
        return rows[:, 0].t().numpy().astype(np.int32), int(deltas.reshape(-1)[0]) + ids.shape[1]


def _of_videos(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What settings of images say of videos, where no file has those of videos (SmolVLM)."""
    return {name: settings[name] for name in ("video_sampling", "max_image_size") if "video_sampling" in settings and name in settings}


def tokens_ahead(is_seen_T: np.ndarray) -> np.ndarray:
    """int32 [T]: how many tokens come behind each one in its run of those that are true; 0 for the others."""
    ends_T = np.where(is_seen_T, len(is_seen_T), np.arange(len(is_seen_T)))  # the next one that is false
    ends_T = np.minimum.accumulate(ends_T[::-1])[::-1]
    return np.where(is_seen_T, ends_T - np.arange(len(is_seen_T)) - 1, 0).astype(np.int32)


def _has_pixels(name: str, tensor: np.ndarray) -> bool:
    return name.startswith("pixel") and (tensor.dtype.kind == "f" or tensor.dtype == np.uint8)
