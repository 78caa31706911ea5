"""Images offline: `LLM.generate` with multi_modal_data, and `LLM.chat` with parts of images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from compile_and_serve import LLM, SamplingParams
from tests.serve.test_media import TEMPLATE, TOKENS, data_url, encoded
from tests.support.tokenizers import byte_level_tokenizer
from tests.support.vision_models import picture, write_qwen

pytest.importorskip("PIL")

from PIL.Image import fromarray
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PICTURE = picture(1, 40, 24)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    tokenizer = byte_level_tokenizer(["the quick brown fox"], vocab_size=280)
    tokenizer.backend.add_special_tokens(list(TOKENS))
    ids = {name: tokenizer.backend.token_to_id(text) for name, text in zip(("start", "image", "video", "end"), TOKENS, strict=True)}
    write_qwen("qwen3", folder, image_token_id=ids["image"], video_token_id=ids["video"])
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(str(folder), dtype="float32", enforce_eager=True, device="cpu", num_kv_blocks=200) as llm:
        yield llm


def text_of(llm: LLM, prompt: Any) -> tuple[list[int], list[int]]:
    """Prompt and generated tokens."""
    [result] = llm.generate(prompt, GREEDY, use_tqdm=False)
    return result.prompt_token_ids, result.outputs[0].token_ids


def test_the_same_image_in_all_forms(llm: LLM) -> None:
    text = f"<|start|>user\n<|vision_start|>{TOKENS[1]}<|vision_end|>What?<|end|>\n<|start|>assistant\n"
    image = fromarray(PICTURE)
    expected = text_of(llm, {"prompt": text, "multi_modal_data": {"image": image}})
    forms = [PICTURE, [image], encoded(image), data_url(encoded(image))]
    for form in forms:
        assert text_of(llm, {"prompt": text, "multi_modal_data": {"image": form}}) == expected
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert text_of(llm, {"prompt_token_ids": ids, "multi_modal_data": {"image": PICTURE}}) == expected
    assert len(expected[0]) == len(ids) + 14
    for part in ({"type": "image", "image": image}, {"type": "image_url", "image_url": {"url": forms[-1]}}):
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
        [result] = llm.chat(messages, GREEDY, use_tqdm=False)
        assert (result.prompt_token_ids, result.outputs[0].token_ids) == expected
    other = text_of(llm, {"prompt": text, "multi_modal_data": {"image": picture(2, 40, 24)}})
    assert other[0] == expected[0]
    assert other[1] != expected[1]


def test_rows_in_place_of_an_image(llm: LLM, folder: Path) -> None:
    """Those that transformers' encoder computes, with the features for the decoder's first layers behind them."""
    model = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder, patch_size=4, merge_size=2, temporal_patch_size=2, **half)
    inputs = processor(images=[fromarray(PICTURE)], return_tensors="pt")
    with torch.no_grad():
        features = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    rows = torch.cat([torch.cat(tuple(features.pooler_output)), *features.deepstack_features], dim=-1)
    expected = text_of(llm, {"prompt": f"{TOKENS[1]}.", "multi_modal_data": {"image": PICTURE}})
    given = {"image_embeds": rows, "grid": (3, 5)}
    assert text_of(llm, {"prompt": f"{TOKENS[1]}.", "multi_modal_data": {"image": given}}) == expected
    for wrong, sentence in (
        (rows, "need the grid"),
        ({**given, "grid": (3, 4)}, "does not have the 15 tokens"),
        ({"image_embeds": 1}, "floating"),
    ):
        with pytest.raises(ValueError, match=sentence):
            llm.generate({"prompt": f"{TOKENS[1]}.", "multi_modal_data": {"image": wrong}}, GREEDY, use_tqdm=False)
    narrow = {**given, "image_embeds": rows[:, :-1]}
    with pytest.raises(ValueError, match="rows of shape"):
        llm.generate({"prompt": f"{TOKENS[1]}.", "multi_modal_data": {"image": narrow}}, GREEDY, use_tqdm=False)


def test_an_image_is_known_by_its_uuid(llm: LLM) -> None:
    text = f"{TOKENS[1]}."
    first = text_of(llm, {"prompt": text, "multi_modal_data": {"image": PICTURE}, "multi_modal_uuids": {"image": ["a"]}})
    again = text_of(llm, {"prompt": text, "multi_modal_data": {"image": picture(2, 40, 24)}, "multi_modal_uuids": {"image": "a"}})
    assert first == again


def test_wrong_prompts_get_a_sentence(llm: LLM) -> None:
    for prompt, sentence in (
        ({"prompt": "no image", "multi_modal_data": {"image": PICTURE}}, "placeholders of 0 images and 0 videos, but the request has 1"),
        ({"prompt": TOKENS[1]}, None),
        ({"prompt": TOKENS[1], "multi_modal_data": {"image": PICTURE.astype(np.float32)}}, "must be uint8"),
        ({"prompt": TOKENS[1], "multi_modal_data": {"image": "https://example.com/a.png"}}, "does not download from"),
        ({"prompt": TOKENS[1], "multi_modal_data": {"audio": PICTURE}}, "reads no audio"),
        ({"prompt": TOKENS[1], "multi_modal_data": {"image": PICTURE}, "mm_processor_kwargs": {"x": 1}}, "knows min_pixels"),
        ({"prompt": TOKENS[1], "multi_modal_data": {"image": PICTURE}, "mm_processor_kwargs": {"max_pixels": 1 << 40}}, "must be 1 to"),
    ):
        if sentence is None:  # a placeholder without an image is a token like others
            assert text_of(llm, prompt)[0] == [llm.get_tokenizer().backend.token_to_id(TOKENS[1])]
            continue
        with pytest.raises(ValueError, match=sentence):
            llm.generate(prompt, GREEDY, use_tqdm=False)
