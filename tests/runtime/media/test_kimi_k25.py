"""Sizes of Kimi-K2.5's images are those of transformers, and its published files say the same as those of transformers' class."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from compile_and_serve.models.registry import build_model
from compile_and_serve.models.vision.patch_config import PaddedPatchConfig
from compile_and_serve.runtime.media.kimi_k25 import KimiK25Processor
from compile_and_serve.runtime.media.patches import padded
from compile_and_serve.runtime.media.prepared import MediaError
from tests.support.kimi_k25_models import INT4, MERGE, PATCH, SETTINGS, text_config, their_resize, vision_config, with_published_config
from tests.support.seeing_classes import TINY


def config_of_class() -> dict[str, Any]:
    config = transformers.models.kimi_k25.Kimi_K25Config(
        text_config=text_config(TINY),
        vision_config=vision_config(),
        projection_hidden_size=32,
        image_token_id=11,
        tie_word_embeddings=False,
    )
    return {**config.to_dict(), "architectures": ["Kimi_K25ForConditionalGeneration"], "image_processor": SETTINGS}


@pytest.mark.parametrize(("patch", "max_patches", "max_side"), [(14, 16384, 512), (PATCH, 200, 20), (4, 7, 20)])
def test_sizes(patch: int, max_patches: int, max_side: int) -> None:
    config = {
        "vision_config": {"patch_size": patch, "merge_kernel_size": [MERGE, MERGE]},
        "image_processor": {"max_patches": max_patches, "size": {"max_height": max_side, "max_width": max_side}},
    }
    patches, theirs, numbers = PaddedPatchConfig.read(config), their_resize(), random.Random(0)
    assert (patches.max_patches, patches.max_side) == (max_patches, max_side)
    most = 0
    for _ in range(3000):
        height, width = (round(2 ** numbers.uniform(0, 14)) for _ in range(2))
        found = padded(height, width, patch, MERGE, max_patches, max_side)
        assert found == theirs(height, width, patch, MERGE, max_patches, max_side), (height, width)
        most = max(most, found[1][0] * found[1][1] // (patch * MERGE) ** 2)
    assert 0.6 * patches.max_tokens <= most <= patches.max_tokens


def test_options_of_a_request() -> None:
    from PIL import Image

    processor, image = KimiK25Processor(config_of_class()), Image.new("RGB", (60, 60))
    assert processor.image(image, b"").items[0].length == 49
    assert processor.with_options({"max_patches": 36}).image(image, b"").items[0].length == 9
    for wrong in ({"max_patches": 201}, {"max_patches": 0}, {"max_pixels": 4}):
        with pytest.raises(MediaError, match="max_patches"):
            processor.with_options(wrong)


def test_published_names() -> None:
    own = config_of_class()
    published = with_published_config(own)
    of_class, spec = (build_model(config, dtype=torch.float32) for config in (own, published))
    assert of_class.encoder is not None
    assert spec.encoder is not None
    assert spec.encoder.max_model_len == of_class.encoder.max_model_len
    for one, other in ((spec.module, of_class.module), (spec.encoder.module, of_class.encoder.module)):
        assert {n: p.shape for n, p in one.named_parameters()} == {n: p.shape for n, p in other.named_parameters()}
    assert KimiK25Processor(published).settings == KimiK25Processor(own).settings
    assert KimiK25Processor(published).placeholders == {11: "image"}


def test_experts_in_4_bits() -> None:
    published = with_published_config(config_of_class())
    published["text_config"]["quantization_config"] = INT4
    spec = build_model(published, dtype=torch.float32)
    assert spec.quantized_weights.keys() == {f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert {"weight_packed", "weight_scale"} == {
        name.rpartition(".")[2] for name in spec.parts if name.startswith("language_model.model.layers.1.mlp.experts.7.up_proj.weight_")
    }
