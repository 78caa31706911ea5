"""Rows of a model's encoder that come in place of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.names import AHEAD_ARRAY, EMBEDDED
from compile_and_serve.runtime.media.prepared import MediaError, PreparedItem, PreparedMedia
from compile_and_serve.runtime.media.sources import from_base64
from compile_and_serve.runtime.media.tensor_files import tensor_of_file

if TYPE_CHECKING:
    from compile_and_serve.runtime.media.registry import MediaProcessor

_FLAG = "--enable-mm-embeds"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedImage:
    """array: floating [tokens, width]. grid: height and width of the image in tokens, patches: in patches; None: it was not given."""

    array: StepArray
    grid: tuple[int, int] | None
    patches: tuple[int, int] | None = None

    def prepared(self, processor: MediaProcessor, key: bytes) -> PreparedMedia:
        """Raises `MediaError`."""
        if not processor.takes_rows:
            raise MediaError("This model takes no rows in place of an image.")
        length, grid = self.array.end, self.grid
        if grid is None and self.patches is not None:
            merged = processor.merged_patches
            grid = (self.patches[0] // merged, self.patches[1] // merged)
        if processor.three_rows and grid is None:
            raise MediaError(
                'Rows of this model need the grid of the image: {"image_embeds": rows, "grid": (height, width)}, or image_grid_thw.'
            )
        height, width = grid or (1, length)
        if height * width != length:
            raise MediaError(f"The grid {height} × {width} does not have the {length} tokens of the rows.")
        token = next(token for token, kind in processor.placeholders.items() if kind == "image")
        arrays = {EMBEDDED: self.array}
        if processor.sees_ahead:
            arrays[AHEAD_ARRAY] = StepArray.of(np.arange(length - 1, -1, -1, dtype=np.int32))
        item = PreparedItem(offset=0, length=length, arrays=arrays, height=height, width=width)
        return PreparedMedia(kind="image", key=key, tokens=[token] * length, items=[item])


def embedded_image(given: Any, *, reads_files: bool = False) -> EmbeddedImage | None:
    """Of a floating tensor or array [tokens, width], or of {"image_embeds": …, "grid": (height, width)}; None: it is something else.

    In place of "grid", "image_grid_thw" may have the numbers of patches, [1, height, width]. reads_files: tensors may be files in base64.
    Raises `MediaError`.
    """
    grid = patches = None
    is_named = isinstance(given, Mapping) and "image_embeds" in given
    if is_named:
        grid, patches, given = given.get("grid"), given.get("image_grid_thw"), given["image_embeds"]
    if is_named and isinstance(given, str):
        array = _of_file(given, "image_embeds", reads_files=reads_files)
        if "float" not in array.dtype or len(array.row_shape) != 1 or not array.data:
            raise MediaError(
                f"image_embeds must be floating rows [tokens, width], got {array.dtype} rows of shape {list(array.row_shape)}."
            )
    else:
        found = _array_of(given)
        if found is None and is_named:
            raise MediaError("image_embeds must be a floating tensor [tokens, width].")
        if found is None:
            return None
        array = found
    if grid is not None and (not isinstance(grid, (tuple, list)) or len(grid) != 2 or any(not isinstance(n, int) or n < 1 for n in grid)):
        raise MediaError(f"grid must be the height and width of the image in tokens, got {grid!r:.100}.")
    return EmbeddedImage(
        array=array,
        grid=None if grid is None else (grid[0], grid[1]),
        patches=None if patches is None else _patches(patches, reads_files=reads_files),
    )


def _array_of(given: Any) -> StepArray | None:
    if hasattr(given, "detach"):
        given = given.detach().cpu()
    dtype = str(getattr(given, "dtype", "")).removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16", "float64") or getattr(given, "ndim", 0) != 2 or not given.shape[0]:
        return None
    return StepArray.of(np.asarray(given, dtype=np.float32) if dtype == "float64" else given)


def _patches(given: Any, *, reads_files: bool) -> tuple[int, int]:
    """Height and width of image_grid_thw."""
    if isinstance(given, str):
        array = _of_file(given, "image_grid_thw", reads_files=reads_files)
        values = np.frombuffer(array.data, array.dtype) if "int" in array.dtype else np.zeros(0)
    else:
        try:
            values = np.asarray(given, dtype=np.int64).reshape(-1)
        except (TypeError, ValueError, OverflowError):
            values = np.zeros(0)
    if len(values) != 3 or values[0] != 1 or values[1:].min() < 1:
        raise MediaError("image_grid_thw must be 1 and the height and width of one image in patches.")
    return int(values[1]), int(values[2])


def _of_file(text: str, name: str, *, reads_files: bool) -> StepArray:
    if not reads_files:
        raise MediaError(f"{name} in requests are taken by servers that were started with {_FLAG} alone.")
    return tensor_of_file(from_base64(text, name), name)
