"""The library that resizes images and cuts them into patches, beside Pillow and numpy."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

import PIL.Image

from compile_and_serve.custom_ops.jit.cpp import BuildError, find_compiler
from compile_and_serve.custom_ops.jit.sources import CSRC
from compile_and_serve.runtime.media import patches, pixels
from compile_and_serve.runtime.media.images import resize
from compile_and_serve.runtime.media.pixels import PixelLibrary, pixel_library
from tests.support.vision_models import picture

SIZES = [
    (64, 48, 84, 56),
    (1024, 300, 1036, 308),
    (61, 90, 84, 56),
    (90, 61, 56, 84),
    (640, 48, 84, 28),
    (5, 3, 56, 28),
    (1, 1, 28, 28),
    (56, 30, 56, 28),
]


@pytest.fixture(scope="module")
def library() -> PixelLibrary:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    found = pixel_library(waits=True)
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_of_pillow(library: PixelLibrary, size: tuple[int, int, int, int]) -> None:
    """Rows and columns grow and shrink, by little and by much."""
    width, height, *new = size
    image = PIL.Image.fromarray(picture(width, width, height))
    expected = np.asarray(image.resize((new[0], new[1]), PIL.Image.Resampling.BICUBIC))
    if library.resizes(image.size, (new[0], new[1])):
        assert np.array_equal(library.resize(np.asarray(image), *new), expected)
    else:
        assert new[0] < width
        assert new[1] < height
    assert np.array_equal(resize(image, *new), expected)


def test_edges_and_extremes(library: PixelLibrary) -> None:
    """Sharp edges between black and white overshoot, which is cut off."""
    board = np.zeros((40, 60, 3), dtype=np.uint8)
    board[::2, ::3] = 255
    expected = PIL.Image.fromarray(board).resize((91, 84), PIL.Image.Resampling.BICUBIC)
    assert np.array_equal(library.resize(board, 91, 84), np.asarray(expected))
    strided = np.repeat(board, 2, axis=1)[:, ::2]
    assert np.array_equal(library.resize(strided, 91, 84), np.asarray(expected))


@pytest.mark.parametrize(("patch", "merge", "frames"), [(14, 2, 2), (16, 2, 2), (14, 1, 1), (5, 3, 3)])
def test_patches_are_those_of_numpy(library: PixelLibrary, patch: int, merge: int, frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 3, 5
    image = picture(1, columns * patch * merge, rows * patch * merge)
    repeated = np.broadcast_to(image, (frames, *image.shape))
    order = np.random.default_rng(0).permutation(rows * columns)
    ours = [patches.blocks_of(repeated, patch, merge, one) for one in (None, order)]
    monkeypatch.setattr(patches, "pixel_library", lambda: None)
    theirs = [patches.blocks_of(repeated, patch, merge, one) for one in (None, order)]
    assert np.array_equal(ours[0], theirs[0])
    assert np.array_equal(ours[1], theirs[1])


@pytest.mark.slow_cases
@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3"])
def test_every_instruction_set_gives_the_same_bytes(architecture: str, tmp_path: Path) -> None:
    """Without SSE4.1, with AVX2, and with what this CPU has."""
    if platform.machine() != "x86_64" or (architecture == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text()):
        pytest.skip("for other CPUs")
    target = tmp_path / "pixels.so"
    flags = [
        "-std=c++20",
        "-O2",
        f"-march={architecture}",
        "-fPIC",
        "-shared",
        "-fsanitize=undefined",
        "-fsanitize-undefined-trap-on-error",
    ]
    subprocess.run([find_compiler(), *flags, str(CSRC / "media" / "pixels.cpp"), "-o", str(target)], check=True)
    library = pixels.as_pillow(ctypes.CDLL(str(target)))
    assert library is not None
    image = picture(1, 140, 84)
    expected = patches.blocks_of(np.stack([image, image]), 14, 2)
    assert np.array_equal(library.patch_blocks(image, 14, 2, 2, None), expected)


def test_other_bytes_than_pillows_are_not_used(
    library: PixelLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pixels, "_library", None)
    monkeypatch.setattr(pixels, "_cubic", lambda x: np.maximum(0.0, 1.0 - np.abs(x)))
    pixels.weights_of.cache_clear()
    pixels._load()
    pixels.weights_of.cache_clear()
    assert pixels._library is None
    assert "Images are resized by Pillow" in caplog.text


def test_it_is_loaded_without_torch(library: PixelLibrary) -> None:
    code = (
        "import sys\n"
        "from compile_and_serve.runtime.media import images\n"
        "assert images.pixel_library(waits=True) is not None\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
