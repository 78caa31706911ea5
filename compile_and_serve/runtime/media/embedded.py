"""Rows of a model's encoder that come in place of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import AHEAD_ARRAY, EMBEDDED
from compile_and_serve.runtime.media.prepared import MediaError, PreparedItem, PreparedMedia

if TYPE_CHECKING:
    from compile_and_serve.runtime.media.registry import MediaProcessor


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedImage:
    """array: floating [tokens, width]. grid: height and width of the image in tokens; None: it was not given."""

    array: StepArray
    grid: tuple[int, int] | None

    def prepared(self, processor: MediaProcessor, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        length = self.array.end
        if processor.three_rows and self.grid is None:
            raise MediaError('Rows of this model need the grid of the image: {"image_embeds": rows, "grid": (height, width)}.')
        height, width = self.grid or (1, length)
        if height * width != length:
            raise MediaError(f"The grid {height} × {width} does not have the {length} tokens of the rows.")
        token = next(token for token, kind in processor.placeholders.items() if kind == "image")
        arrays = {EMBEDDED: self.array}
        if processor.sees_ahead:
            arrays[AHEAD_ARRAY] = StepArray.of(np.arange(length - 1, -1, -1, dtype=np.int32))
        item = PreparedItem(offset=0, length=length, arrays=arrays, height=height, width=width)
        return PreparedMedia(kind="image", key=key, tokens=[token] * length, items=[item])


def embedded_image(given: Any) -> EmbeddedImage | None:
    """Of a floating tensor or array [tokens, width], or of {"image_embeds": …, "grid": (height, width)}; None: it is something else.

    Raises `MediaError`.
    """
    grid: Any = None
    is_named = isinstance(given, Mapping) and "image_embeds" in given
    if is_named:
        given, grid = given["image_embeds"], given.get("grid")
    if hasattr(given, "detach"):
        given = given.detach().cpu()
    dtype = str(getattr(given, "dtype", "")).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16", "float64") or getattr(given, "ndim", 0) != 2 or not given.shape[0]:
        if is_named:
            raise MediaError("image_embeds must be a floating tensor [tokens, width].")
        return None
    if dtype == "float64":
        given = np.asarray(given, dtype=np.float32)
    if grid is not None and (not isinstance(grid, (tuple, list)) or len(grid) != 2 or any(not isinstance(n, int) or n < 1 for n in grid)):
        raise MediaError(f"grid must be the height and width of the image in tokens, got {grid!r:.100}.")
    return EmbeddedImage(array=StepArray.of(given), grid=None if grid is None else (grid[0], grid[1]))
