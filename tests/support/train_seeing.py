"""Train the encoder of `drawings.py` before SmolLM2, which stays as it is: `python -m tests.support.train_seeing --help`.

Some minutes on a GPU. First the encoder learns by itself to tell colors, shapes and digits apart, and its rows learn
to be like the embeddings of their words, which is quick. Then both learn from what the language model says.

Shape legend: B drawings of a batch, T tokens, D width, P patches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from torch import nn

from tests.support.drawings import COLORS, FOLDER, IMAGE_TOKEN, NUM_PATCHES, SHAPES, SIDE, VISION, WEIGHTS, Drawing, draw

LENGTH = 48  # tokens of a row
HELD_OUT = 10_000_000  # the seed of the first drawing that is not trained on
THINGS = (*SHAPES, *"0123456789")
QUESTIONS = ("Which color is it?", "Which shape is it?", "Which digit is it?", "What is in the picture?")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BPD: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x_BPD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.self_attn = Attention(width, heads)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    def forward(self, x_BPD: torch.Tensor) -> torch.Tensor:
        x_BPD = x_BPD + self.self_attn(self.layer_norm1(x_BPD))
        inner = functional.gelu(self.mlp["fc1"](self.layer_norm2(x_BPD)), approximate="tanh")
        return x_BPD + self.mlp["fc2"](inner)


class Encoder(nn.Module):
    """SigLIP's tower without its last norm, and LLaVA's projector, under the names of a checkpoint. [B, SIDE, SIDE, 3] → [B, P, D]"""

    def __init__(self, out_width: int) -> None:
        super().__init__()
        width, patch = VISION["hidden_size"], VISION["patch_size"]
        embeddings = nn.ModuleDict(
            {"patch_embedding": nn.Conv2d(3, width, patch, patch), "position_embedding": nn.Embedding(NUM_PATCHES, width)}
        )
        layers = (Layer(width, VISION["intermediate_size"], VISION["num_attention_heads"]) for _ in range(VISION["num_hidden_layers"]))
        self.vision_tower = nn.ModuleDict(
            {"vision_model": nn.ModuleDict({"embeddings": embeddings, "encoder": nn.ModuleDict({"layers": nn.ModuleList(layers)})})}
        )
        self.multi_modal_projector = nn.ModuleDict({"linear_1": nn.Linear(width, out_width), "linear_2": nn.Linear(out_width, out_width)})
        with torch.no_grad():  # rows begin about as large as the language model's embeddings
            embeddings["position_embedding"].weight.mul_(0.2)
            self.multi_modal_projector["linear_2"].weight.mul_(0.5)

    def seen(self, pixels: torch.Tensor) -> torch.Tensor:
        model = self.vision_tower["vision_model"]
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        x = model["embeddings"]["patch_embedding"](x).flatten(2).transpose(1, 2) + model["embeddings"]["position_embedding"].weight
        for layer in model["encoder"]["layers"]:
            x = layer(x)
        return x

    def projected(self, seen_BPD: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(self.multi_modal_projector["linear_1"](seen_BPD))
        return self.multi_modal_projector["linear_2"](inner)


def load_language_model(path: Path, device: str) -> Any:
    """transformers' LlamaModel from SmolLM2's GGUF file, in bfloat16 on a GPU; nothing of it is trained."""
    from transformers import LlamaConfig, LlamaModel

    from compile_and_serve.runtime.weights import iter_tensors, read_config

    config = {key: value for key, value in read_config(path).items() if key != "quantization_config"}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("meta"):
        model = LlamaModel._from_config(LlamaConfig(**config), attn_implementation="sdpa", dtype=dtype)
    model = model.to_empty(device="cpu")
    model.rotary_emb = type(model.rotary_emb)(model.config)  # its buffers are not in the checkpoint
    tensors = {name.removeprefix("model."): tensor.to(torch.bfloat16).to(dtype) for name, tensor in iter_tensors(path)}
    model.load_state_dict(tensors, strict=True)
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(path: Path) -> Any:
    """SmolLM2's, of which only ordinary texts are asked."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from compile_and_serve.runtime.weights.gguf_file import read_metadata

    metadata = read_metadata(path)
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return tokenizer


def _drawn(seed: int) -> tuple[bytes, str, str]:
    one: Drawing = draw(seed)
    return one.pixels, one.color, one.thing


def drawings(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ pixels uint8 [N, SIDE, SIDE, 3], colors and things int64 [N]"""
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        made = pool.map(_drawn, range(first, first + count), chunksize=64)
    pixels = np.frombuffer(b"".join(one[0] for one in made), np.uint8).reshape(count, SIDE, SIDE, 3)
    colors = torch.tensor([list(COLORS).index(one[1]) for one in made])
    return torch.from_numpy(pixels.copy()), colors, torch.tensor([THINGS.index(one[2]) for one in made])


class Prompts:
    """Token ids of every question about every color and thing, made once: [question, order, color, thing, LENGTH]."""

    def __init__(self, tokenizer: Any, device: str) -> None:
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

        begin, end, image = [1, *ids("user\n")], [2, *ids("\n"), 1, *ids("assistant\n")], [IMAGE_TOKEN] * NUM_PATCHES
        shape = (len(QUESTIONS), 2, len(COLORS), len(THINGS))
        tokens = torch.zeros(*shape, LENGTH, dtype=torch.int64)
        self.answers = torch.zeros(shape, dtype=torch.int64)  # where one begins
        self.images = torch.zeros(shape[:2], dtype=torch.int64)
        for q, question in enumerate(QUESTIONS):
            for order in range(2):  # the image before and behind the question
                middle = image + ids(question) if order == 0 else ids(question) + image
                self.images[q, order] = len(begin) + (0 if order == 0 else len(ids(question)))
                for c, color in enumerate(COLORS):
                    for t, thing in enumerate(THINGS):
                        answer = (color, thing, thing, f"a {color} {thing}")[q]
                        row = begin + middle + end + ids(answer) + [2]
                        tokens[q, order, c, t, : len(row)] = torch.tensor(row)
                        self.answers[q, order, c, t] = len(row) - len(ids(answer)) - 1
        words = torch.zeros(len(COLORS), len(THINGS), NUM_PATCHES, dtype=torch.int64)  # half of the rows for the color, half for the thing
        for c, color in enumerate(COLORS):
            for t, thing in enumerate(THINGS):
                halves = [ids(f" {color}"), ids(thing if thing.isdigit() else f" {thing}")]
                words[c, t] = torch.tensor([half[i % len(half)] for half in halves for i in range(NUM_PATCHES // 2)])
        self.words = words.to(device)
        self.longest = 1 + max(len(ids(f"a {color} {thing}")) for color in COLORS for thing in THINGS)
        self.tokens, self.answers, self.images = (x.to(device) for x in (tokens, self.answers, self.images))


def answer_logits(
    model: Any, prompts: Prompts, rows_BPD: torch.Tensor, which: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, A, V] at the tokens of answers, and these tokens, -100 behind the end. which: question, order, color, thing, each [B]."""
    tokens = prompts.tokens[which]
    tokens = tokens[:, : int((tokens != 0).sum(1).max())]
    x_BTD = model.embed_tokens(tokens).clone()
    at = prompts.images[which[:2]][:, None] + torch.arange(NUM_PATCHES, device=x_BTD.device)
    batch = torch.arange(len(tokens), device=x_BTD.device)[:, None]
    x_BTD[batch, at] = rows_BPD.to(x_BTD.dtype)
    x_BTD = model(inputs_embeds=x_BTD, use_cache=False).last_hidden_state
    places = (prompts.answers[which][:, None] + torch.arange(prompts.longest, device=x_BTD.device)).clamp(max=tokens.shape[1] - 1)
    wanted = tokens.gather(1, places)
    over = (wanted == 2).cumsum(1) - (wanted == 2).int() > 0
    return x_BTD[batch, places - 1] @ model.embed_tokens.weight.t(), wanted.masked_fill(over, -100)


def questions_about(things: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Color, thing or both, one for each."""
    kind = torch.randint(0, 3, things.shape, generator=generator, device=things.device)
    digit = (things >= len(SHAPES)).long()
    return torch.where(kind == 0, 0, torch.where(kind == 1, 1 + digit, 3))


def jittered(pixels: torch.Tensor) -> torch.Tensor:
    """Moved by up to 3 pixels, brighter or darker, with noise."""
    moves = torch.randint(-3, 4, (2,)).tolist()
    x = torch.roll(pixels, moves, (1, 2)).float()
    x = x + 6 * torch.randn(len(x), 1, 1, 3, device=x.device) + 3 * torch.randn_like(x)
    return x.clamp(0, 255)


@torch.no_grad()
def accuracy(encoder: Encoder, model: Any, prompts: Prompts, data: tuple[torch.Tensor, ...], *, rounded: bool = False) -> float:
    """Of the held-out drawings, how many get exactly the right answer, greedily. rounded: the encoder's weights to 8 bits of precision."""
    if rounded:
        whole, encoder = encoder, Encoder(model.config.hidden_size).to(data[0].device)
        encoder.load_state_dict({name: tensor.bfloat16().float() for name, tensor in whole.state_dict().items()})
    right = total = 0
    generator = torch.Generator(data[0].device).manual_seed(1)
    for begin in range(0, len(data[0]), 64):
        pixels, colors, things = (x[begin : begin + 64] for x in data)
        order = torch.arange(len(things), device=things.device) % 2
        which = (questions_about(things, generator), order, colors, things)
        logits, wanted = answer_logits(model, prompts, encoder.projected(encoder.seen(pixels)), which)
        right += int(((logits.argmax(-1) == wanted) | (wanted == -100)).all(1).sum())
        total += len(things)
    return right / total


def write(encoder: Encoder, folder: Path) -> None:
    """The weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", torch.float16).contiguous() for name, tensor in encoder.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=180, help="of training, after drawing")
    parser.add_argument("--alone", type=float, default=0.25, help="share of the time in which the encoder learns by itself")
    parser.add_argument("--drawings", type=int, default=120_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the weights are written")
    args = parser.parse_args()
    torch.manual_seed(0)
    device, start = args.device, time.monotonic()
    held_out = drawings(HELD_OUT, 512 if device == "cuda" else 96)
    train = drawings(0, args.drawings)
    print(f"{args.drawings} drawings after {time.monotonic() - start:.0f} s", flush=True)
    held_out, train = ([x.to(device) for x in data] for data in (held_out, train))
    model, prompts = load_language_model(args.model, device), Prompts(load_tokenizer(args.model), device)
    encoder = Encoder(model.config.hidden_size).to(device)
    heads = nn.Linear(VISION["hidden_size"], len(COLORS) + len(THINGS)).to(device)  # only while training
    print(
        f"{sum(p.numel() for p in encoder.parameters())} parameters are trained; ready after {time.monotonic() - start:.0f} s", flush=True
    )
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.02)
    begin, step, shown = time.monotonic(), 0, 0.0
    losses: dict[str, float] = {}
    while (spent := time.monotonic() - begin) < args.seconds:
        share = spent / args.seconds
        alone = share < args.alone
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 100) * max(0.02, 0.5 * (1 + np.cos(np.pi * share)))
        chosen = torch.randint(0, len(train[0]), (args.batch_size,), device=device)
        pixels, colors, things = (x[chosen] for x in train)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            seen = encoder.seen(jittered(pixels))
            rows = encoder.projected(seen)
            by_color, by_thing = heads(seen.mean(1)).float().split([len(COLORS), len(THINGS)], -1)
        named = functional.cross_entropy(by_color, colors) + functional.cross_entropy(by_thing, things)
        if alone:
            like_BPD = model.embed_tokens(prompts.words[colors, things]).float()
            near = (rows.float() - like_BPD).square().mean() / like_BPD.square().mean()
            loss = named + near
        else:
            which = (questions_about(things), torch.randint(0, 2, things.shape, device=device), colors, things)
            logits, wanted = answer_logits(model, prompts, rows, which)
            said = functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())
            loss = said + 0.2 * named
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0 or (not alone and device == "cpu"):  # a read of a loss waits for the device
            if time.monotonic() - begin - shown > args.seconds / 18:
                shown = time.monotonic() - begin
                losses = {"named": named.item()} | ({"near": near.item()} if alone else {"said": said.item()})
                line = {"seconds": round(shown), "step": step} | {key: round(value, 4) for key, value in losses.items()}
                with torch.no_grad():
                    guessed = heads(encoder.seen(held_out[0]).mean(1)).split([len(COLORS), len(THINGS)], -1)
                    right = (one.argmax(-1) == known for one, known in zip(guessed, held_out[1:], strict=True))
                    line["held_out_named"] = [round(one.float().mean().item(), 4) for one in right]
                if not alone:
                    line["held_out_said"] = round(accuracy(encoder, model, prompts, tuple(x[:256] for x in held_out)), 4)
                print(json.dumps(line), flush=True)
                write(encoder, args.folder)  # for a run that is ended early
            elif device == "cuda":
                torch.cuda.synchronize()
    write(encoder, args.folder)
    right = accuracy(encoder, model, prompts, tuple(held_out), rounded=True)
    size = (args.folder / WEIGHTS).stat().st_size
    print(json.dumps({"steps": step, "held_out_said": round(right, 4), "bytes": size, "file": str(args.folder / WEIGHTS)}), flush=True)


if __name__ == "__main__":
    main()
