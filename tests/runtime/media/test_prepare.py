"""Pixels as encoders read them, and media that are prepared while others run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

import PIL.Image

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.custom_ops.step import TokenBatch
from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.patches import array_input
from compile_and_serve.runtime.media.images import as_image
from compile_and_serve.runtime.media.patches import blocks_of
from tests.support.vision_models import IMAGE, picture, write_qwen

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("frames", "channels", "patch", "merge"), [(1, 3, 14, 1), (2, 3, 16, 2), (2, 1, 5, 3)])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_blocks_have_the_values_of_their_patches(frames: int, channels: int, patch: int, merge: int, *, is_repeated: bool) -> None:
    rows, columns = 2, 3
    shape = (rows * merge * patch, columns * merge * patch, channels)
    pixels = np.random.default_rng(0).integers(0, 256, (frames, *shape), dtype=np.uint8)
    pixels = np.broadcast_to(pixels[0], (frames, *shape)) if is_repeated else pixels
    blocks = blocks_of(pixels, patch, merge)
    assert (blocks.shape, blocks.dtype) == ((rows * columns, merge * merge, channels * frames * patch * patch), np.uint8)
    for block in range(rows * columns):
        for place in range(merge * merge):
            y = (block // columns * merge + place // merge) * patch
            x = (block % columns * merge + place % merge) * patch
            expected = pixels[:, y : y + patch, x : x + patch].transpose(3, 0, 1, 2)
            assert (blocks[block, place] == expected.reshape(-1)).all()


def test_an_image_that_is_right_already_is_not_copied() -> None:
    image = PIL.Image.fromarray(picture(1, 40, 24))
    assert as_image(image) is image
    turned = image.copy()
    turned.getexif()[0x0112] = 6
    assert as_image(turned).size == (image.height, image.width)
    assert as_image(image.convert("L")).mode == "RGB"


def test_rows_are_written_where_the_step_lies() -> None:
    one = array_input("rows", torch.int32, (2,))
    array = StepArray.of(np.arange(6, dtype=np.int32).reshape(3, 2), start=1)
    batch = TokenBatch(
        token_ids=np.zeros(5, dtype=np.int64),
        positions=np.arange(5),
        query_start_loc=np.array([0, 5], dtype=np.int32),
        row_indices=np.arange(5),
        arrays=[{"rows": [array]}],
    )
    written = np.full((7, 2), 9, dtype=np.int32)
    assert one.write is not None
    one.write(batch, written)
    expected = [[0, 0], [0, 1], [2, 3], [4, 5], [0, 0]]
    assert written.tolist() == [*expected, [0, 0], [0, 0]]
    values = one.values(batch)
    assert values is not None
    assert values.tolist() == expected


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("qwen3")
    write_qwen("qwen3", Path(folder))
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "device": "cpu", "num_kv_blocks": 200}
    with LLM(str(folder), skip_tokenizer_init=True, **options) as llm:
        yield llm


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": [20 + i, IMAGE, 30], "multi_modal_data": {"image": picture(i, 40, 24)}} for i in range(count)]


def test_the_first_requests_run_before_the_last_image_is_prepared(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [one.outputs[0].token_ids for one in llm.generate(prompts(3), GREEDY, use_tqdm=False)]
    processor: Any = llm._prompts._pipeline.processor  # type: ignore[union-attr]
    may_go_on, prepare = threading.Event(), type(processor).image

    def image(self: Any, image: Any, key: bytes) -> Any:
        if np.array_equal(np.asarray(image), picture(2, 40, 24)):
            assert may_go_on.wait(30), "the engine waits for the last image"
        return prepare(self, image, key)

    step = type(llm.engine).step

    def stepped(self: Any) -> Any:
        outputs = step(self)
        if any(one.finish_reason for one in outputs.outputs):
            may_go_on.set()
        return outputs

    monkeypatch.setattr(type(processor), "image", image)
    monkeypatch.setattr(type(llm.engine), "step", stepped)
    assert [one.outputs[0].token_ids for one in llm.generate(prompts(3), GREEDY, use_tqdm=False)] == expected


def test_an_image_that_cannot_be_used_ends_all_prompts(llm: LLM) -> None:
    wrong = {"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": b"no image"}}
    with pytest.raises(ValueError, match="The data are no image"):
        llm.generate([*prompts(2), wrong], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work()
    assert len(llm.generate(prompts(1), GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4
