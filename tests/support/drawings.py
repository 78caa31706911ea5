"""Drawings of shapes and digits with questions about them, and a small LLaVA that answers: SmolLM2-135M with an encoder of its own.

`train_seeing.py` made the encoder's weights, which are in `seeing_model`. Drawings need no fonts, so that they are the same everywhere.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw

FOLDER = Path(__file__).parent / "seeing_model"
WEIGHTS = "model.safetensors"
SIDE, DRAWN_SIDE = 64, 128  # pixels that the encoder reads, and of a drawing
IMAGE_TOKEN, IMAGE_TEXT = 16, "<image>"  # a special token that SmolLM2 does not use
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": SIDE,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
NUM_PATCHES = (SIDE // VISION["patch_size"]) ** 2
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 25, 30),
    "green": (25, 150, 45),
    "blue": (30, 60, 215),
    "yellow": (245, 225, 35),
    "purple": (130, 35, 160),
    "orange": (245, 135, 20),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
_DIGITS: dict[str, list[list[tuple[float, float]]]] = {}  # strokes in a box from (-0.6, -1) to (0.6, 1), made below
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _arc(x: float, y: float, rx: float, ry: float, begin: float, end: float) -> list[tuple[float, float]]:
    """Points of an ellipse, angles in degrees, clockwise from the right."""
    angles = [math.radians(begin + (end - begin) * i / 24) for i in range(25)]
    return [(x + rx * math.cos(angle), y + ry * math.sin(angle)) for angle in angles]


_DIGITS |= {
    "0": [_arc(0, 0, 0.6, 1, 0, 360)],
    "1": [[(-0.35, -0.6), (0.05, -1), (0.05, 1)]],
    "2": [[*_arc(0, -0.45, 0.55, 0.55, -180, 30), (-0.6, 1), (0.6, 1)]],
    "3": [_arc(-0.05, -0.5, 0.55, 0.5, -160, 90), _arc(-0.05, 0.5, 0.6, 0.5, -90, 160)],
    "4": [[(0.25, 1), (0.25, -1), (-0.6, 0.35), (0.6, 0.35)]],
    "5": [[(0.5, -1), (-0.45, -1), (-0.5, -0.1), *_arc(-0.05, 0.4, 0.6, 0.6, -130, 150)]],
    "6": [[(0.4, -1), (-0.35, -0.1), *_arc(0, 0.45, 0.55, 0.55, -150, 210)]],
    "7": [[(-0.6, -1), (0.6, -1), (-0.15, 1)]],
    "8": [_arc(0, -0.5, 0.45, 0.5, 0, 360), _arc(0, 0.5, 0.58, 0.5, 0, 360)],
    "9": [[*_arc(0, -0.45, 0.55, 0.55, 0, 360), (0.55, -0.3), (0.25, 1)]],
}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """thing: a shape or a digit."""

    color: str
    thing: str
    image: PIL.Image.Image

    @property
    def questions(self) -> dict[str, str]:
        """With their right answers."""
        which = "Which digit is it?" if self.thing.isdigit() else "Which shape is it?"
        return {"Which color is it?": self.color, which: self.thing, "What is in the picture?": f"a {self.color} {self.thing}"}

    @property
    def pixels(self) -> bytes:
        """uint8 [SIDE, SIDE, 3] as the encoder reads them."""
        return self.image.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC).tobytes()


def draw(seed: int) -> Drawing:
    """A shape or a digit of some color, size, place and turn on a ground that is rather grey."""
    numbers = random.Random(seed)
    color = numbers.choice(list(COLORS))
    thing = numbers.choice(SHAPES) if numbers.random() < 0.5 else numbers.choice(list(_DIGITS))
    grey = numbers.randint(95, 170)
    ground = tuple(grey + numbers.randint(-12, 12) for _ in range(3))
    ink = tuple(min(255, max(0, value + numbers.randint(-10, 10))) for value in COLORS[color])
    image = PIL.Image.new("RGB", (2 * DRAWN_SIDE,) * 2, ground)  # twice as large: resizing makes edges smooth
    radius = numbers.uniform(0.22, 0.42) * 2 * DRAWN_SIDE
    x, y = (numbers.uniform(radius + 8, 2 * DRAWN_SIDE - radius - 8) for _ in "xy")
    turn = math.radians(numbers.uniform(-15, 15))
    cos, sin = radius * math.cos(turn), radius * math.sin(turn)

    def placed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(x + cos * a - sin * b, y + sin * a + cos * b) for a, b in points]

    pen = PIL.ImageDraw.Draw(image)
    if thing.isdigit():
        width = radius * numbers.uniform(0.2, 0.32)
        for stroke in _DIGITS[thing]:
            points = placed([(0.85 * a, 0.85 * b) for a, b in stroke])
            pen.line(points, fill=ink, width=round(width), joint="curve")
            for a, b in (points[0], points[-1]):
                pen.ellipse((a - width / 2, b - width / 2, a + width / 2, b + width / 2), fill=ink)
    elif thing in ("circle", "ring"):
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        if thing == "ring":
            hole = radius * numbers.uniform(0.45, 0.65)
            pen.ellipse((x - hole, y - hole, x + hole, y + hole), fill=ground)
    else:
        pen.polygon(placed(_polygon(thing)), fill=ink)
    return Drawing(color=color, thing=thing, image=image.resize((DRAWN_SIDE,) * 2, PIL.Image.Resampling.BOX))


def _polygon(shape: str) -> list[tuple[float, float]]:
    if shape == "square":
        return [(-0.72, -0.72), (0.72, -0.72), (0.72, 0.72), (-0.72, 0.72)]
    if shape == "triangle":
        return [(0, -1), (0.9, 0.75), (-0.9, 0.75)]
    if shape == "star":
        rays = [(1.0 if i % 2 == 0 else 0.42, math.radians(36 * i - 90)) for i in range(10)]
        return [(length * math.cos(angle), length * math.sin(angle)) for length, angle in rays]
    arm = 0.3
    quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm), (1.0, -arm), (1.0, arm), (arm, arm)]
    return quarter + [(-a, -b) for a, b in quarter]


def config_of(text: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the small LLaVA. text: SmolLM2's."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": "bfloat16",
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": VISION["num_hidden_layers"],
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": True,
        "text_config": {key: value for key, value in text.items() if key != "quantization_config"} | {"model_type": "llama"},
        "vision_config": VISION,
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def write_seeing(smollm2: Path, folder: Path, weights: Path = FOLDER / WEIGHTS) -> None:
    """The whole checkpoint, from the folder of SmolLM2 in Hugging Face's layout."""
    from safetensors.torch import load_file, save_file

    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(smollm2 / "model.safetensors").items()}
    tensors |= load_file(weights)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(json.loads((smollm2 / "config.json").read_text()))))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    settings = json.loads((smollm2 / "tokenizer_config.json").read_text()) | {"chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((smollm2 / "tokenizer.json").read_text())
    [entry] = [token for token in tokenizer["added_tokens"] if token["id"] == IMAGE_TOKEN]
    tokenizer["model"]["vocab"][IMAGE_TEXT] = tokenizer["model"]["vocab"].pop(entry["content"])
    entry["content"] = IMAGE_TEXT
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
