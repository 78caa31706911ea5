"""A small model that sees: SmolLM2-135M, unchanged, with an image encoder and a projector that this script trains, in LLaVA's layout.

    python -m tests.support.seeing_model train OUT [--steps 4000] [--device cuda]
    python -m tests.support.seeing_model check OUT [--images 100] [--device auto]

`train` writes OUT/encoder.safetensors (bfloat16, less than 4 MB) and puts the model's folder together in OUT/model. `check` asks that
model about images through `LLM.chat`, and prints how many answers are right, as one JSON line.

The images have one shape or digit in one colour on a light ground, drawn by PIL.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save_file

from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.runtime.weights import iter_tensors, read_config, resolve_model

SIDE, PATCH, IMAGE = 64, 8, "<file_sep>"  # a token of SmolLM2 that chats do not use stands for the image
VISION: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 5,  # the last one is not read
    "num_attention_heads": 6,
    "image_size": SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 60, 220),
    "yellow": (235, 205, 30),
    "black": (20, 20, 20),
    "orange": (240, 130, 20),
    "purple": (130, 40, 160),
}
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = {"colour": "What colour is it?", "shape": "What shape is it?", "digit": "Which digit is it?"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def drawn(rng: random.Random) -> tuple[Image.Image, str, str]:
    """An image, a question about it, and the answer."""
    ground = tuple(rng.randint(215, 255) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), ground)
    draw, colour = ImageDraw.Draw(image), rng.choice(list(COLOURS))
    fill = tuple(min(255, max(0, value + rng.randint(-15, 15))) for value in COLOURS[colour])
    size = rng.randint(24, 46)
    x, y = (rng.randint(4, SIDE - 4 - size) for _ in range(2))
    kind = rng.choice(("shape", "digit"))
    if kind == "digit":
        name = rng.choice(DIGITS)
        draw.text((x + size / 2, y + size / 2), str(DIGITS.index(name)), fill=fill, font=ImageFont.load_default(size + 8), anchor="mm")
    else:
        name = rng.choice(SHAPES)
        box, third = (x, y, x + size, y + size), size // 3
        if name == "circle":
            draw.ellipse(box, fill=fill)
        elif name == "square":
            draw.rectangle(box, fill=fill)
        elif name == "triangle":
            draw.polygon([(x + size / 2, y), (x, y + size), (x + size, y + size)], fill=fill)
        else:
            draw.rectangle((x + third, y, x + size - third, y + size), fill=fill)
            draw.rectangle((x, y + third, x + size, y + size - third), fill=fill)
    asked = rng.choice(("colour", kind))
    return image, QUESTIONS[asked], colour if asked == "colour" else name


def base_model() -> tuple[dict[str, Any], dict[str, torch.Tensor], Tokenizer]:
    """SmolLM2's config, weights in bfloat16 and tokenizer."""
    path = resolve_model("smollm2-135m")
    return read_config(path), {name: tensor.to(torch.bfloat16) for name, tensor in iter_tensors(path)}, load_tokenizer(path)


def whole_model(config: dict[str, Any], weights: dict[str, torch.Tensor], image_token: int) -> Any:
    """transformers' LLaVA with SmolLM2's weights; its encoder and projector are new."""
    llava = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{name: config[name] for name in config if name != "quantization_config"}),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        image_token_id=image_token,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = transformers.LlavaForConditionalGeneration(llava)
    text = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items() if name.startswith("model.")}
    model.model.language_model.load_state_dict(text)
    model.tie_weights()
    return model


def batches(tokenizer: Tokenizer, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """pixels [B, 3, SIDE, SIDE], ids [B, T], labels [B, T] (-100: not learnt)."""
    rng = random.Random(seed)
    patches = (SIDE // PATCH) ** 2
    while True:
        pixels, rows, labels = [], [], []
        for _ in range(size):
            image, question, answer = drawn(rng)
            text = f"<|im_start|>user\n{IMAGE * patches}{question}<|im_end|>\n<|im_start|>assistant\n"
            begin = tokenizer.encode(text, add_special_tokens=False)
            end = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
            pixels.append(torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1).permute(2, 0, 1))
            rows.append(torch.tensor(begin + end))
            labels.append(torch.tensor([-100] * len(begin) + end))
        pad = torch.nn.utils.rnn.pad_sequence
        ids, wanted = pad(rows, batch_first=True, padding_value=0), pad(labels, batch_first=True, padding_value=-100)
        yield torch.stack(pixels), ids, wanted


def train(out: Path, *, steps: int, batch: int, device: str) -> None:
    torch.manual_seed(0)
    config, weights, tokenizer = base_model()
    model = whole_model(config, weights, tokenizer.backend.token_to_id(IMAGE)).to(device).train()
    model.requires_grad_(False)
    parts = (model.model.vision_tower, model.model.multi_modal_projector)
    learnt = [parameter.requires_grad_(True) for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(learnt, lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=max(steps, 100), pct_start=0.05)
    for step, (pixels, ids, labels) in zip(range(steps), batches(tokenizer, batch, 1), strict=False):
        with torch.autocast(device, torch.bfloat16):
            inputs = {"pixel_values": pixels.to(device), "input_ids": ids.to(device), "labels": labels.to(device)}
            loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(json.dumps({"step": step, "loss": round(float(loss), 4)}), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    last = f"encoder.layers.{VISION['num_hidden_layers'] - 1}."
    tensors = {f"model.vision_tower.{name}": tensor for name, tensor in parts[0].state_dict().items() if not name.startswith(last)}
    tensors |= {f"model.multi_modal_projector.{name}": tensor for name, tensor in parts[1].state_dict().items()}
    save_file({name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()}, out / "encoder.safetensors")
    put_together(out / "encoder.safetensors", out / "model")


def put_together(encoder: Path, folder: Path) -> Path:
    """A model's folder of SmolLM2's files and a trained encoder."""
    text, weights, tokenizer = base_model()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "base.safetensors")
    shutil.copy(encoder, folder / "encoder.safetensors")
    index = dict.fromkeys(weights, "base.safetensors") | dict.fromkeys(load_file(encoder), "encoder.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {name: text[name] for name in text if name != "quantization_config"} | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "siglip_vision_model"},
        "image_token_id": tokenizer.backend.token_to_id(IMAGE),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def check(folder: Path, *, images: int, device: str) -> int:
    """How many of so many new images the served model names."""
    from compile_and_serve import LLM, SamplingParams

    rng = random.Random(2)
    asked = [drawn(rng) for _ in range(images)]
    parts = [[{"type": "image", "image": image}, {"type": "text", "text": question}] for image, question, _ in asked]
    with LLM(str(folder), device=device) as llm:
        found = llm.chat(
            [[{"role": "user", "content": one}] for one in parts], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
        )
    return sum(result.outputs[0].text.strip() == answer for result, (_, _, answer) in zip(found, asked, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("train", "check"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    if given.action == "train":
        device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
        train(given.out, steps=given.steps, batch=given.batch, device=device)
    right = check(given.out / "model", images=given.images, device=given.device)
    print(json.dumps({"right": right, "of": given.images}))


if __name__ == "__main__":
    main()
