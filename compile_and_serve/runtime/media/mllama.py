"""Images for Mllama: up to four tiles each, which layers of the decoder read beside the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.images import Image, pillow
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.processor import NoMedia
from compile_and_serve.runtime.media.transformers_files import changed_settings, first_line, packed_arrays


class MllamaProcessor(NoMedia):
    """An image is one token of the prompt, and rows beside it: one for each patch and the class token of each tile.

    config: the model's config.json, with `image_processor`. folder: of the checkpoint.
    """

    takes_rows = False

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        """Raises `MediaError` if the folder has no image processor that can be used."""
        pillow()
        from transformers.models.auto.image_processing_auto import AutoImageProcessor  # without torchvision, the package hides it

        try:
            self._images = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for files that it cannot use
            raise MediaError(f"transformers cannot load the image processor of {folder.name}: {first_line(error)}.") from None
        self._options = changed_settings(self._images, config.get("image_processor") or {})
        self._token = int(config.get("image_token_index") or config.get("image_token_id") or 128256)
        vision = config["vision_config"]
        self._rows_of_tile = (int(vision.get("image_size", 448)) // int(vision.get("patch_size", 14))) ** 2 + 1
        processor = self._images
        self._is_plain = bool(processor.do_rescale and processor.do_normalize and abs(255 * processor.rescale_factor - 1) < 1e-6)

    @property
    def placeholders(self) -> Mapping[int, MediaKind]:
        """Token of a prompt → the kind of media that it stands for."""
        return {self._token: "image"}

    @property
    def settings(self) -> str:
        """What the arrays depend on besides the content."""
        return f"mllama {sorted(self._options.items())}"

    def with_options(self, options: Mapping[str, Any]) -> MllamaProcessor:
        """There are none. Raises `MediaError`."""
        raise MediaError(
            f"mm_processor_kwargs has {min(options)!r:.100}, but this model takes them for the whole server alone (--mm-processor-kwargs)."
        )

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        options = self._options | ({"do_rescale": False, "do_normalize": False} if self._is_plain else {})  # the encoder does it
        try:
            made = self._images(images=[image], return_tensors="np", **options)
        except Exception as error:  # of media that the processor cannot take
            raise MediaError(f"The model's processor cannot take the image: {first_line(error)}.") from None
        count = int(made["num_tiles"][0][0])
        pixels = np.asarray(made["pixel_values"])[0, 0, :count]
        tensors = {
            "pixel_values": np.round(pixels).astype(np.uint8) if self._is_plain else pixels.astype(np.float32),
            "num_tiles": np.array([count]),
            "aspect_ratio_ids": np.asarray(made["aspect_ratio_ids"])[0].astype(np.int64),
        }
        moments = [np.array(getattr(self._images, name), np.float32) for name in ("image_mean", "image_std")] if self._is_plain else []
        arrays = {"processed": packed_arrays(tensors, *moments)}
        item = PreparedItem(offset=0, length=count * self._rows_of_tile, arrays=arrays, is_beside=True)
        return PreparedMedia(kind="image", key=key, tokens=[self._token], items=[item])
