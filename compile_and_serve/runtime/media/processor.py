"""`NoMedia`: what a processor of media answers for the kinds that its model does not read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compile_and_serve.runtime.media.audio import AudioLimits
from compile_and_serve.runtime.media.images import Image
from compile_and_serve.runtime.media.prepared import MediaError, PreparedMedia
from compile_and_serve.runtime.media.videos import Frames


class NoMedia:
    """Reads nothing. A `MediaProcessor` inherits from it, and has methods of its own for the kinds that its model reads."""

    three_rows = sees_ahead = False
    takes_rows = True

    @property
    def merged_patches(self) -> int:
        """Patches along a side of what one token stands for, of models whose grids count patches."""
        return 1

    def with_placeholders(self, prompt: Sequence[int], media: Sequence[PreparedMedia]) -> Sequence[int]:
        """The prompt as it is."""
        return prompt

    def image(self, image: Image, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        raise MediaError("This model reads no images here.")

    def sample(self, total: int, fps: float) -> np.ndarray:
        """Raises `MediaError`."""
        raise MediaError("This model reads no videos here.")

    def frames(self, frames: Frames, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        raise MediaError("This model reads no videos here.")

    @property
    def audio_limits(self) -> AudioLimits:
        """Raises `MediaError`."""
        raise MediaError("This model reads no audio here.")

    def audio(self, samples: np.ndarray, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        raise MediaError("This model reads no audio here.")
