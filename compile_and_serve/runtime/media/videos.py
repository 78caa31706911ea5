"""Frames of videos from files and arrays. PyAV is an extra: without it, a sentence names it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.images import MAX_PIXELS, Image, as_image, pillow
from compile_and_serve.runtime.media.prepared import MediaError, content_key

MISSING = 'Videos need the extra "vision": pip install "compile-and-serve[vision]".'
DEFAULT_FPS = 24.0  # of frames that come without a rate, as transformers has it
MAX_FRAMES = 50_000  # of a file

Sample = Callable[[int, float], np.ndarray]  # (frames, frames per second) → numbers of the frames that are taken, ascending


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames that were taken of a video. numbers: of each, in the whole video. fps: of the video. total: frames that it has."""

    images: Sequence[Image]
    numbers: np.ndarray
    fps: float
    total: int


def decode_video(data: bytes, sample: Sample) -> Frames:
    """The frames of a file that `sample` takes. Raises `MediaError`."""
    try:
        import av
    except ImportError:
        raise MediaError(MISSING) from None
    pillow()
    try:
        container: Any
        with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
            if not container.streams.video:
                raise MediaError("The data have no video.")
            stream = container.streams.video[0]
            if (stream.width or 0) * (stream.height or 0) > MAX_PIXELS:
                raise MediaError(f"A video of {stream.width} × {stream.height} pixels is too large: {MAX_PIXELS} pixels are the limit.")
            total = sum(packet.size > 0 for packet in container.demux(stream))
            if not 1 <= total <= MAX_FRAMES:
                raise MediaError(f"A video may have 1 to {MAX_FRAMES} frames, this one has {total}.")
            fps = float(stream.average_rate or DEFAULT_FPS)
            numbers = sample(total, fps)
        with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
            images = list(_taken(container.decode(video=0), numbers))
    except MediaError:
        raise
    except Exception as error:  # a decoder may raise anything on a damaged file
        raise MediaError(f"The video cannot be decoded: {str(error) or type(error).__name__:.200}.") from None
    if not images:
        raise MediaError("The video has no frame that can be decoded.")
    images += images[-1:] * (len(numbers) - len(images))  # of a file that was cut off
    return Frames(images, numbers, fps, total)


def _taken(frames: Iterator[Any], numbers: np.ndarray) -> Iterator[Image]:
    wanted = list(numbers)
    for number, frame in enumerate(frames):
        while wanted and wanted[0] == number:
            wanted.pop(0)
            if frame.width * frame.height > MAX_PIXELS:
                raise MediaError("A frame of the video is too large.")
            yield pillow().fromarray(frame.to_ndarray(format="rgb24"))
        if not wanted:
            return


def as_frames(given: Any, sample: Sample) -> Frames:
    """Frames of an array uint8 [frames, height, width, 3] or of a list of images; with their rate: (frames, {"fps": …}).

    Raises `MediaError`.
    """
    fps = DEFAULT_FPS
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        given, fps = given[0], float(given[1].get("fps") or DEFAULT_FPS)
    if hasattr(given, "numpy"):
        given = given.numpy()
    if not (isinstance(given, list) or (isinstance(given, np.ndarray) and given.ndim == 4)) or not len(given):
        raise MediaError(f"A video must be a file, an array [frames, height, width, 3] or a list of images, got a {type(given).__name__}.")
    numbers = sample(len(given), fps)
    return Frames([as_image(given[number]) for number in numbers], numbers, fps, len(given))


def frames_key(frames: Frames, settings: str) -> bytes:
    """The key of the frames' pixels."""
    parts = (part for image in frames.images for part in (str(image.size), image.tobytes()))
    return content_key("frames", str((frames.numbers.tolist(), frames.fps)), *parts, settings)


def spread_frames(total: int, fps: float, *, rate: float, least: int, most: int) -> np.ndarray:
    """Qwen3-VL's choice: `rate` frames a second, from the first to the last. → int64"""
    count = min(max(int(total / fps * rate), least), most, total)
    return np.linspace(0, total - 1, count).round().astype(np.int64)


def stepped_frames(total: int, fps: float, *, rate: float, least: int, most: int, multiple: int) -> np.ndarray:
    """Qwen2.5-VL's choice: as many as a multiple of a patch's frames, at equal steps from the first on. → int64"""
    if total < multiple:
        return np.arange(total)
    count = min(max(total / fps * rate, least), min(most, total) // multiple * multiple, total)
    count = max(multiple, math.floor(count / multiple) * multiple)
    return np.arange(0, total, total / count).astype(np.int64)[:count]
