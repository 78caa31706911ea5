"""Resizing and patches of images by csrc/media/pixels.cpp, which gives Pillow's bytes in less time.

The library is built once on a machine, in a thread, while images go Pillow's way. It is used where its bytes are those of the installed
Pillow. They depend on which sides are resized first, because each pass rounds to bytes: rows, up to Pillow 12. From 13 on, columns where
they shrink and rows do not; where both shrink, it depends on the sizes, and such images go Pillow's way.

Shape legend: H height, W width, O pixels of a side after resizing, K taps of a pixel.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import lru_cache
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.jit.cpp import BuildError, build_library
from compile_and_serve.custom_ops.jit.sources import CSRC

log = logging.getLogger(__name__)

_FRACTION = 22  # bits of a weight
_SUPPORT, _SHARPNESS = 2.0, -0.5  # of the cubic (Keys 1981)
# Width and height, before and after, that are compared with Pillow.
_ROWS_FIRST = ((23, 17, 31, 29), (40, 20, 24, 37), (64, 48, 61, 48), (3, 5, 70, 6))
_ONLY_COLUMNS_SHRINK, _BOTH_SHRINK = (40, 37, 48, 24), (64, 90, 60, 30)


class PixelLibrary:
    """The built library. Calls release Python's lock. rows_first: always; else as Pillow 13 does."""

    def __init__(self, library: ctypes.CDLL, *, rows_first: bool = True) -> None:
        self._rows_first = rows_first
        pointer, integer, side = ctypes.c_void_p, ctypes.c_int, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._resize, self._blocks = library.cas_resize, library.cas_patch_blocks
        self._resize.argtypes = (pointer, integer, integer, pointer, integer, integer, *side, *side)
        self._blocks.argtypes = (pointer, integer, integer, pointer, integer, integer, integer, pointer, ctypes.c_int64)
        self._resize.restype = self._blocks.restype = None

    def resizes(self, before: tuple[int, int], after: tuple[int, int]) -> bool:
        """Whether `resize` gives Pillow's bytes for these widths and heights."""
        return self._rows_first or after[0] >= before[0] or after[1] >= before[1]

    def resize(self, pixels_HW3: np.ndarray, width: int, height: int) -> np.ndarray:
        """uint8 [height, width, 3], by bicubic interpolation. pixels: uint8."""
        if not self._rows_first and height < pixels_HW3.shape[0] and width != pixels_HW3.shape[1]:
            pixels_HW3 = self._in_one_order(pixels_HW3, pixels_HW3.shape[1], height)
        return self._in_one_order(pixels_HW3, width, height)

    def _in_one_order(self, pixels_HW3: np.ndarray, width: int, height: int) -> np.ndarray:
        """Rows first."""
        pixels_HW3 = np.ascontiguousarray(pixels_HW3)
        before = pixels_HW3.shape[1], pixels_HW3.shape[0]
        out = np.empty((height, width, 3), dtype=np.uint8)
        sides = [(size, new, *weights_of(size, new)) for size, new in zip(before, (width, height), strict=True)]
        arguments: list[Any] = []  # addresses: `sides` keeps the arrays, which other threads may drop from the cache
        for size, new, begins_O, weights_OK in sides:
            arguments += [begins_O.ctypes.data, weights_OK.ctypes.data, weights_OK.shape[1] if size != new else 0]
        self._resize(pixels_HW3.ctypes.data, *before, out.ctypes.data, width, height, *arguments)
        return out

    def patch_blocks(self, pixels_HW3: np.ndarray, patch: int, merge: int, frames: int, order: np.ndarray | None) -> np.ndarray:
        """As `patches.blocks_of` of an image that stands for all frames, in this order of its blocks (int64; None: row by row)."""
        pixels_HW3 = np.ascontiguousarray(pixels_HW3)
        height, width = pixels_HW3.shape[:2]
        count = height // (patch * merge) * (width // (patch * merge))
        order = np.arange(count) if order is None else np.ascontiguousarray(order, dtype=np.int64)
        out = np.empty((count, merge * merge, 3 * frames * patch * patch), dtype=np.uint8)
        self._blocks(pixels_HW3.ctypes.data, width, height, out.ctypes.data, patch, merge, frames, order.ctypes.data, count)
        return out


@lru_cache(maxsize=64)
def weights_of(size: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each pixel's window begins, int32 [O], and the weights of its pixels in units of 2^-22, int32 [O, K].

    size, new: pixels of a side before and after.
    """
    scale = size / new
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    center_O = (np.arange(new) + 0.5) * scale
    begin_O = np.maximum((center_O - support + 0.5).astype(np.int64), 0)
    end_O = np.minimum((center_O + support + 0.5).astype(np.int64), size)
    taps = min(int((end_O - begin_O).max()), size)
    # All windows have as many pixels, those at the end too: pixels beyond a window's own weigh nothing.
    first_O = np.minimum(begin_O, size - taps)
    places_OK = first_O[:, None] + np.arange(taps)
    weights_OK = _cubic((places_OK - center_O[:, None] + 0.5) * (1.0 / stretch))
    weights_OK[(places_OK < begin_O[:, None]) | (places_OK >= end_O[:, None])] = 0.0
    sums_O = np.zeros(new)
    for k in range(taps):  # one after another, because the order decides the last bit
        sums_O += weights_OK[:, k]
    scaled_OK = weights_OK / sums_O[:, None] * (1 << _FRACTION)
    return first_O.astype(np.int32), np.trunc(scaled_OK + np.copysign(0.5, scaled_OK)).astype(np.int32)


def _cubic(x: np.ndarray) -> np.ndarray:
    a, x = _SHARPNESS, np.abs(x)
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0, (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_lock = threading.Lock()
_library: PixelLibrary | None = None
_loading: threading.Thread | None = None


def pixel_library(*, waits: bool = False) -> PixelLibrary | None:
    """None while it is built, and where it cannot be: the reason is logged once. waits: until it is built."""
    global _loading
    if _library is None and _loading is None:
        with _lock:
            if _loading is None:
                _loading = threading.Thread(target=_load, name="pixel-library", daemon=True)
                _loading.start()
    if waits and _loading is not None:
        _loading.join()
    return _library


def _load() -> None:
    global _library
    try:
        path = build_library("pixels", [CSRC / "media" / "pixels.cpp"], uses_torch=False)
        _library = as_pillow(ctypes.CDLL(str(path)))
    except (BuildError, OSError, ImportError) as error:
        log.warning("Images are resized by Pillow, which takes several times as long: %s", error)
        return
    if _library is None:
        log.warning("Images are resized by Pillow, which takes several times as long: this version's bytes are not those of our library.")


def as_pillow(library: ctypes.CDLL) -> PixelLibrary | None:
    """In the order of the installed Pillow; None if its bytes are others. Raises `ImportError` without it."""
    for rows_first, sizes in ((True, (_ONLY_COLUMNS_SHRINK, _BOTH_SHRINK)), (False, (_ONLY_COLUMNS_SHRINK,))):
        ours = PixelLibrary(library, rows_first=rows_first)
        if all(_equals_pillow(ours, *size) for size in (*_ROWS_FIRST, *sizes)):
            return ours
    return None


def _equals_pillow(library: PixelLibrary, width: int, height: int, new_width: int, new_height: int) -> bool:
    import PIL.Image

    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    theirs = PIL.Image.fromarray(pixels).resize((new_width, new_height), PIL.Image.Resampling.BICUBIC)
    return np.array_equal(library.resize(pixels, new_width, new_height), np.asarray(theirs))
