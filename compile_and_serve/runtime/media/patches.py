"""Images as blocks of patches, in the layout of the encoders of Qwen's models. Pixels stay bytes: the encoder's graph normalizes them.

Shape legend: N frames, H height, W width, C channels; P pixels of a patch's side, F frames of a patch, M blocks' side in patches.
"""

from __future__ import annotations

import math

import numpy as np

from compile_and_serve.runtime.media.pixels import pixel_library
from compile_and_serve.runtime.media.prepared import MediaError

MAX_ASPECT = 200  # of an image that these models were made for


def resized(height: int, width: int, block: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size nearest to the image's whose sides are multiples of `block` and which has min_pixels to max_pixels.

    Raises `MediaError` for an image whose longer side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(
            f"An image of {width} × {height} pixels is too narrow: its longer side may be at most {MAX_ASPECT} times the other."
        )
    new_height, new_width = round(height / block) * block, round(width / block) * block
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return max(block, math.floor(height / shrink / block) * block), max(block, math.floor(width / shrink / block) * block)
    if new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / block) * block, math.ceil(width * grow / block) * block
    return new_height, new_width


def padded(height: int, width: int, patch: int, merge: int, max_patches: int, max_side: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size of an image that is made smaller if it must be, and never larger; and that size filled up to whole blocks.

    max_patches: whole patches before it is filled up. max_side: patches of a side.
    """
    whole_patches = max(1, height // patch) * max(1, width // patch)
    longest = max_side * patch
    scale = min(1.0, math.sqrt(max_patches / whole_patches), longest / height, longest / width)
    new_height, new_width = (min(longest, max(1, int(side * scale))) for side in (height, width))
    block = merge * patch
    return (new_height, new_width), (-(-new_height // block) * block, -(-new_width // block) * block)


def blocks_of(frames_NHWC: np.ndarray, patch: int, merge: int, order: np.ndarray | None = None) -> np.ndarray:
    """The blocks of a patch's frames: uint8 [blocks, merge², C · N · patch²]. order: of the blocks; None: row by row."""
    frames, height, width, channels = frames_NHWC.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    is_repeated = frames_NHWC.strides[0] == 0  # one image stands for all frames
    if is_repeated and channels == 3 and (library := pixel_library()) is not None:
        return library.patch_blocks(frames_NHWC[0], patch, merge, frames, order)
    distinct = 1 if is_repeated else frames
    planes_CNHW = np.ascontiguousarray(frames_NHWC[:distinct].transpose(3, 0, 1, 2))
    # A patch's row is one element, so that numpy copies whole rows.
    line = np.dtype(f"V{patch}")
    lines = planes_CNHW.view(line).reshape(channels, distinct, rows, merge, patch, columns, merge)
    blocks = np.empty((rows, columns, merge, merge, channels, frames, patch), dtype=line)
    blocks[...] = lines.transpose(2, 5, 3, 6, 0, 1, 4)
    in_rows = blocks.view(np.uint8).reshape(rows * columns, merge * merge, channels * frames * patch * patch)
    return in_rows if order is None else in_rows[order]


def grid_of(height: int, width: int, merge: int) -> np.ndarray:
    """int32 [blocks, 4]: y and x of each block's first patch, and the image's height and width, which are given in patches."""
    ys, xs = np.arange(0, height, merge, dtype=np.int32), np.arange(0, width, merge, dtype=np.int32)
    grid = np.empty((len(ys), len(xs), 4), dtype=np.int32)
    grid[..., 0], grid[..., 1], grid[..., 2], grid[..., 3] = ys[:, None], xs[None], height, width
    return grid.reshape(-1, 4)


def windows_of(height: int, width: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of an image in the order of its windows of side × side blocks, and where each block's window ends.

    height, width: in blocks. → int64 [blocks] numbers of blocks, int32 [blocks]
    """
    window = (np.arange(height) // side)[:, None] * -(-width // side) + (np.arange(width) // side)[None]
    order = np.argsort(window.reshape(-1), kind="stable")
    sizes = np.unique(window, return_counts=True)[1]
    return order, np.repeat(np.cumsum(sizes), sizes).astype(np.int32)
