"""LLaVA with a SigLIP tower: tiny random checkpoints give the tokens and logits of transformers' class."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.media.llava import LlavaProcessor
from compile_and_serve.runtime.media.prepared import place_media
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support.engines import request, run_requests, tiny_config
from tests.support.vision_models import PROMPTS, picture

pytest.importorskip("PIL")

from PIL.Image import Resampling, fromarray

IMAGE, SIDE = 7, 24
TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
    "initializer_range": 0.3,
}


def write_llava(folder: Path, text: type[Any]) -> Any:
    config = transformers.LlavaConfig(
        text_config=text(**TEXT),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        image_token_id=IMAGE,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def rename_tower(folder: Path) -> None:
    """The tower's names in checkpoints of transformers before version 5."""
    file = folder / "model.safetensors"
    tensors = {
        re.sub(r"vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name): one for name, one in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("text", ["LlamaConfig", "Qwen2Config"])
def test_tokens_and_logits_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    """0, 1 and 3 images, first, last and in the middle; chunks cut them; all at once."""
    model = write_llava(tmp_path, getattr(transformers, text))
    if text == "Qwen2Config":
        rename_tower(tmp_path)
    processor = LlavaProcessor(read_folder_config(tmp_path))
    requests, pixels = [], []
    for name, parts in PROMPTS.items():
        prompt = [token for part in parts for token in (part if isinstance(part, list) else [IMAGE])]
        images = [fromarray(picture(*part)) for part in parts if isinstance(part, tuple)]
        media = [processor.image(image, repr((name, i)).encode()) for i, image in enumerate(images)]
        tokens, items = place_media(prompt, media, processor.placeholders, three_rows=False)
        one = request(name, tokens, max_tokens=32, ignore_eos=True, logprobs=0)
        one.media = items
        requests.append(one)
        resized = [np.asarray(image.resize((SIDE, SIDE), Resampling.BICUBIC), np.float32) for image in images]
        pixels.append(torch.from_numpy(np.stack(resized) / 127.5 - 1).permute(0, 3, 1, 2) if images else None)
    options = {"load_format": "auto", "skip_tokenizer_init": True, "max_num_batched_tokens": 20, "max_encoder_tokens": 80}
    core = EngineCore(tiny_config(tmp_path, **options))
    assert core.info.media is not None
    outputs = run_requests(core, requests)
    core.shutdown()
    for one, values in zip(requests, pixels, strict=True):
        ids = torch.tensor([one.prompt_token_ids])
        options = {} if values is None else {"pixel_values": values}
        options |= {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), output_logits=True, return_dict_in_generate=True, **options)
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        steps = outputs[one.request_id]
        assert [token for step in steps for token in step.new_token_ids] == tokens, one.request_id
        expected = [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, tokens, strict=True)]
        assert [entry.logprobs[0] for step in steps for entry in step.new_logprobs or ()] == pytest.approx(expected, abs=1e-3)
