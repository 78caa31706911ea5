"""Tiny random vision-language checkpoints of the transformers package's classes, with their processors, and what they generate."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.vision.whole_items import packed, unpacked
from compile_and_serve.runtime.media.by_transformers import TransformersProcessor, tokens_ahead
from compile_and_serve.runtime.media.kimi_k25 import KimiK25Processor
from compile_and_serve.runtime.media.paligemma import PaliGemmaProcessor
from compile_and_serve.runtime.media.prepared import PreparedItem, PreparedMedia, place_media
from compile_and_serve.runtime.media.videos import as_frames
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support import kimi_k25_models
from tests.support.engines import request
from tests.support.media_reference import greedy_by_transformers
from tests.support.seeing_classes import CLASSES, Seeing
from tests.support.vision_models import Parts, picture


class HandProcessor:
    """Makes images by `Seeing.by_hand`: of one tile or patch for each 20 pixels."""

    three_rows = False

    def __init__(self, seeing: Seeing) -> None:
        self._seeing = seeing
        self.sees_ahead = seeing.name == "Gemma3"
        self._tokenizer = _tokenizer(seeing)
        self.placeholders = {self._tokenizer.convert_tokens_to_ids(seeing.image_token): "image"}

    def made(self, image: Any) -> tuple[list[int], dict[str, np.ndarray]]:
        """The tokens and tensors of an image."""
        assert self._seeing.by_hand is not None
        rows, columns = (min(3, max(1, size // 20)) for size in reversed(image.size))
        text, tensors = self._seeing.by_hand(rows, columns)
        return self._tokenizer(text, add_special_tokens=False)["input_ids"], tensors

    def image(self, image: Any, key: bytes) -> PreparedMedia:
        ids, tensors = self.made(image)
        arrays = {"processed": packed({"input_ids": np.array([ids]), **tensors})}
        if self.sees_ahead:
            row_token = self._tokenizer.convert_tokens_to_ids(self._seeing.row_token)
            arrays["ahead"] = StepArray.of(tokens_ahead(np.array(ids) == row_token))
        return PreparedMedia(kind="image", key=key, tokens=ids, items=[PreparedItem(offset=0, length=len(ids), arrays=arrays)])


def _tokenizer(seeing: Seeing) -> Any:
    specials = [seeing.image_token, *seeing.tokens.values()]
    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(8)), *specials]  # the placeholder is token 11
    words += [f"w{i}" for i in range(8, 328 - len(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"image_token": seeing.image_token, **{name: token for name, token in seeing.tokens.items() if name.endswith("_token")}}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={**named, **{name: token for name, token in seeing.tokens.items() if name not in named}},
    )


def _image_class(name: str, model: str) -> Any:
    """A class that transformers may say needs torchvision, although it does not."""
    module = f"transformers.models.{model.lower()}.image_processing_pil_{model.lower()}"
    found = importlib.import_module(module) if model in ("SmolVLM", "Idefics3") else transformers
    return getattr(found, name)


def write_seeing(name: str, folder: Path) -> Any:
    """A checkpoint of a name in `CLASSES`, with its processor. → transformers' model"""
    seeing = CLASSES[name]
    tokenizer = _tokenizer(seeing)
    if seeing.image is not None:
        image_class, image_settings = seeing.image
        _image_class(image_class, seeing.name)(**image_settings).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        class_name, settings = seeing.processor
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": class_name, **settings}))
    if seeing.video is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(seeing.video))
    config = getattr(transformers, f"{seeing.name}Config")(
        text_config=seeing.text(),
        vision_config=seeing.vision(),
        image_token_id=tokenizer.convert_tokens_to_ids(seeing.row_token or seeing.image_token),
        tie_word_embeddings=False,
        **seeing.options,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{seeing.name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    if seeing.publish is not None:
        return seeing.publish(model, folder)
    if config.get_text_config().model_type == "gemma2":
        model.set_attn_implementation("eager")  # torch's attention would leave out the soft cap
    return model


def processor_of(name: str, folder: Path) -> Any:
    """What prepares the images of a checkpoint."""
    seeing = CLASSES[name]
    if seeing.native is not None:
        return seeing.native(read_folder_config(folder))
    if seeing.image is None:
        return HandProcessor(seeing)
    make = PaliGemmaProcessor if seeing.name == "PaliGemma" else TransformersProcessor
    return make(read_folder_config(folder), folder)


def seeing_request(name: str, parts: Parts, processor: Any, **params: Any) -> tuple[EngineRequest, list[Any]]:
    """A greedy request, and its images."""
    from PIL.Image import fromarray

    token = next(token for token, kind in processor.placeholders.items() if kind == "image")
    prompt, media, images = [], [], []
    for part in parts:
        prompt += [40 + word % 240 for word in part] if isinstance(part, list) else [token]
        if isinstance(part, tuple) and processor.three_rows:
            prompt.append(41)  # behind a last image, transformers' `generate` counts on from its last row, and not from its largest
        if isinstance(part, tuple):
            images.append(fromarray(picture(*part)))
            media.append(processor.image(images[-1], repr(part).encode()))
    tokens, items = place_media(prompt, media, processor.placeholders, three_rows=processor.three_rows)
    one = request(name, tokens, **{"max_tokens": 32, "ignore_eos": True, "logprobs": 0} | params)
    one.media = items
    return one, images


def video_request(processor: Any, frames: np.ndarray, **params: Any) -> tuple[EngineRequest, dict[str, torch.Tensor]]:
    """A greedy request with a video of two frames a second between texts, and transformers' inputs of it."""
    token = next(token for token, kind in processor.placeholders.items() if kind == "video")
    prepared = processor.frames(as_frames((frames, {"fps": 2.0}), processor.sample), b"video")
    tokens, items = place_media([40, 41, 42, token, 43, 44], [prepared], processor.placeholders, three_rows=processor.three_rows)
    one = request("video", tokens, **{"max_tokens": 32, "ignore_eos": True, "logprobs": 0} | params)
    one.media = items
    inputs = unpacked(items[0].arrays["processed"], torch.device("cpu"))
    del inputs["input_ids"]
    return one, inputs


def reference(
    model: Any, processor: Any, one: EngineRequest, images: Sequence[Any], inputs: dict[str, torch.Tensor] | None = None
) -> tuple[list[int], list[float]]:
    """transformers' greedy tokens for a request, and their log-probabilities. inputs: of a video."""
    ids = torch.tensor([one.prompt_token_ids])
    kinds = (ids == model.config.image_token_id).int()
    if inputs is not None:
        kinds = 2 * (kinds | (ids == model.config.video_token_id).int()) if hasattr(model.config, "video_token_id") else kinds
    inputs = dict(inputs or {})
    if images and isinstance(processor, HandProcessor):
        every = [{name: torch.from_numpy(tensor) for name, tensor in processor.made(image)[1].items()} for image in images]
        shape = [max(one["pixel_values"].shape[dim] for one in every) for dim in (-2, -1)]
        for one_image in every:
            pixels = one_image["pixel_values"]
            padding = (0, shape[1] - pixels.shape[-1], 0, shape[0] - pixels.shape[-2])
            one_image["pixel_values"] = torch.nn.functional.pad(pixels, padding)
        inputs = {name: torch.cat([one[name] for one in every], dim=int(every[0][name].dim() == 5)) for name in every[0]}
    elif images and isinstance(processor, KimiK25Processor):
        inputs = kimi_k25_models.image_inputs(images)
    elif images:
        theirs = processor.transformers_processor
        made = theirs(images=list(images), text=[theirs.image_token * len(images)], return_tensors="pt", add_special_tokens=False)
        unused = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "labels")
        inputs = {name: one for name, one in made.items() if name not in unused}
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None
        inputs["mm_token_type_ids"] = kinds
    if model.config.model_type == "janus":
        model.generation_config.eos_token_id = None  # its `generate` takes this one
    if model.config.model_type == "gemma3":
        inputs["token_type_ids"] = kinds
    if model.config.model_type == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)  # all of it is the prefix
    assert one.sampling_params.max_tokens is not None
    return greedy_by_transformers(model, ids, one.sampling_params.max_tokens, inputs)
