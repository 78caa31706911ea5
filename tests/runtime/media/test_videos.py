"""Frames of videos: which are taken, how large they become, and files that are no videos."""

from __future__ import annotations

import io

import numpy as np
import pytest

from compile_and_serve.models.vision.names import PATCHES
from compile_and_serve.runtime.media.prepared import MediaError
from compile_and_serve.runtime.media.qwen_vl import QwenVLProcessor
from compile_and_serve.runtime.media.videos import as_frames, decode_video, spread_frames, stepped_frames

pytest.importorskip("PIL")
av = pytest.importorskip("av")

VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
CONFIG = {
    "vision_config": VISION,
    "image_token_id": 7,
    "video_token_id": 8,
    "vision_start_token_id": 9,
    "vision_end_token_id": 10,
    "image_processor": {"min_pixels": 64, "max_pixels": 4096},
    "video_processor": {"min_pixels": 64, "max_pixels": 8192},
}


def video_file(count: int, width: int = 32, height: int = 16, rate: int = 8) -> bytes:
    """Frames whose brightness tells their number."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), 10 * number, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def test_frames_are_taken_as_transformers_takes_them() -> None:
    """As `sample_frames` of Qwen3VLVideoProcessor and Qwen2VLVideoProcessor, which need torchvision, gave on 2026-11-25."""
    third = {"rate": 2.0, "least": 4, "most": 768}
    assert spread_frames(24, 8.0, **third).tolist() == [0, 5, 9, 14, 18, 23]
    assert spread_frames(3, 8.0, **third).tolist() == [0, 1, 2]
    assert len(spread_frames(100_000, 25.0, **third)) == 768
    second = {**third, "multiple": 2}
    assert stepped_frames(24, 8.0, **second).tolist() == [0, 4, 8, 12, 16, 20]
    assert stepped_frames(9, 1.0, **second).tolist() == [0, 1, 2, 3, 4, 5, 6, 7] or len(stepped_frames(9, 1.0, **second)) == 8
    assert stepped_frames(1, 1.0, **second).tolist() == [0]


def test_a_file_becomes_items_of_two_frames_with_their_times() -> None:
    processor = QwenVLProcessor(CONFIG | {"model_type": "qwen3_vl"}, lambda text: [len(text)], has_windows=False)
    frames = decode_video(video_file(24), processor.sample)
    assert (frames.total, frames.fps, frames.numbers.tolist()) == (24, 8.0, [0, 5, 9, 14, 18, 23])
    prepared = processor.frames(frames, b"key")
    assert [item.length for item in prepared.items] == [8] * 3
    assert prepared.tokens[:2] == [len("<0.3 seconds>"), 9]
    assert prepared.tokens[2:11] == [8] * 8 + [10]
    brightness = [[int(item.arrays[PATCHES].rows(0, 8)[..., start : start + 16].mean()) for start in (0, 16)] for item in prepared.items]
    assert np.allclose(brightness, [[0, 50], [90, 140], [180, 230]], atol=4)


def test_windows_and_times_of_the_second() -> None:
    processor = QwenVLProcessor(CONFIG | {"model_type": "qwen2_5_vl"}, has_windows=True)
    prepared = processor.frames(decode_video(video_file(24), processor.sample), b"key")
    assert [(item.time, item.advance) for item in prepared.items] == [(0, 0), (2, 0), (4, None)]
    assert prepared.tokens == [8] * sum(item.length for item in prepared.items)


def test_arrays_of_frames() -> None:
    array = np.zeros((5, 16, 16, 3), np.uint8)
    assert as_frames((array, {"fps": 1.0}), lambda total, fps: np.arange(total)).fps == 1.0
    with pytest.raises(MediaError, match="A video must be a file"):
        as_frames(np.zeros((16, 16, 3), np.uint8), lambda total, fps: np.arange(total))


def test_what_is_no_video_gets_a_sentence() -> None:
    for data in (b"", b"no video", video_file(9)[:300], video_file(9)[:-500]):
        with pytest.raises(MediaError, match="cannot be decoded|have no video|no frame|may have 1 to"):
            decode_video(data, lambda total, fps: np.arange(total))
