"""Frames of videos become what the image processors of the transformers package make of single images."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

pytest.importorskip("PIL")

from PIL.Image import fromarray

from compile_and_serve.runtime.media.video_pixels import DEFAULTS, MAX_TOKENS, VideoPixels
from tests.support.vision_models import picture

PLAIN = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}


@pytest.mark.parametrize("size", [(90, 70), (50, 130), (20, 20)])
def test_cropped_frames(size: tuple[int, int]) -> None:
    settings = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    frames = [fromarray(picture(i, *size)) for i in range(3)]
    pixels_1FCHW = VideoPixels("VideoLlavaVideoProcessor", settings)([frames])["pixel_values_videos"]
    theirs = transformers.CLIPImageProcessorPil(**settings)(frames, **PLAIN)["pixel_values"]
    assert pixels_1FCHW.shape == (1, 3, 3, 24, 24)
    assert pixels_1FCHW[0].equal(theirs.float())


@pytest.mark.parametrize("size", [(90, 70), (50, 130), (20, 20)])
def test_patches_of_equal_frames(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {"size": {"shortest_edge": 1024, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    image = fromarray(picture(1, *size))
    made = VideoPixels("Qwen2VLVideoProcessor", settings)([[image] * 3])
    theirs = Qwen2VLImageProcessorPil(**settings)([image], **PLAIN)
    times, rows, columns = made["video_grid_thw"][0].tolist()
    assert [1, rows, columns] == theirs["image_grid_thw"][0].tolist()
    assert times == 2  # the last frame stands twice
    assert made["pixel_values_videos"].chunk(2)[1].equal(theirs["pixel_values"].float())


def test_frames_of_smolvlm_become_its_images() -> None:
    """Its image processor takes another way to the same size, so that pixels differ by rounding."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    settings = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}}
    sampling = {"video_sampling": {"max_frames": 4, "fps": 2, "video_size": {"longest_edge": 48}}, **settings}
    videos = VideoPixels("SmolVLMVideoProcessor", sampling)
    frames = [fromarray(picture(i, 90, 70)) for i in range(3)]
    made = videos([frames])
    given = {**settings, "resample": 3, "do_image_splitting": False, **PLAIN}
    theirs = SmolVLMImageProcessorPil()([frames], **given)
    assert made["pixel_values"].shape == theirs["pixel_values"].shape == (1, 3, 3, 24, 24)
    assert (made["pixel_values"] - theirs["pixel_values"]).abs().max() <= 2
    assert made["pixel_attention_mask"].equal(theirs["pixel_attention_mask"].long())
    assert videos.sample(10, 5.0).tolist() == [0, 3, 6, 9]
    assert videos.sample(240, 24.0).tolist() == [0, 79, 159, 239]
    assert videos.sample(2400, 24.0).tolist() == [24, 808, 1592, 2376]  # without a second at both ends
    assert videos.sample(1, 24.0).tolist() == [0]


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "SmolVLMVideoProcessor"])
def test_long_videos_have_few_tokens(name: str) -> None:
    videos = VideoPixels(name, {})
    numbers = videos.sample(100_000, 24.0)
    assert numbers[0] == 0
    assert numbers[-1] == 99_999
    assert (np.diff(numbers) > 0).all()
    made = videos([[fromarray(picture(1, 320, 240))] * len(numbers)])
    if "video_grid_thw" in made:
        assert made["video_grid_thw"].prod() // 4 <= MAX_TOKENS
    assert len(videos.sample(3, 24.0)) <= 3
