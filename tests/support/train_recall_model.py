"""Train the model of `recall.py`: `python -m tests.support.train_recall_model` takes some minutes on one core of a CPU."""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from tests.support.recall import END, FOLDER, VOCAB_SIZE, Conversation

CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}


def batch(numbers: random.Random, size: int, length: int, longest_body: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64 [size, length]. The label of what need not be predicted is -100."""
    tokens, labels = torch.zeros(size, length, dtype=torch.int64), torch.full((size, length), -100)
    for row in range(size):
        talk = Conversation(numbers.getrandbits(62))
        wanted: list[int] = []
        while len(talk.token_ids) < length and talk.turns_left:
            answer = talk.ask(numbers.randint(4, longest_body))
            wanted += [-100] * (len(talk.token_ids) - len(answer) - len(wanted)) + answer
        count = min(length, len(wanted))
        tokens[row, :count] = torch.tensor(talk.token_ids[:count])
        labels[row, :count] = torch.tensor(wanted[:count])
    return tokens, labels


def accuracy(model: torch.nn.Module, seed: int, length: int, longest_body: int) -> float:
    """Of the tokens of answers, how many come first."""
    tokens, labels = batch(random.Random(seed), 16, length, longest_body)
    with torch.no_grad():
        predicted = model(tokens).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != -100
    return (predicted == labels[:, 1:])[asked].float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config: PretrainedConfig = Qwen3_5TextConfig(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps, pct_start=0.1)
    numbers, begin = random.Random(1), time.monotonic()
    for step in range(args.steps):
        progress = step / args.steps
        length, longest = (96, 12) if progress < 0.3 else (192, 32) if progress < 0.7 else (320, 64)
        tokens, labels = batch(numbers, args.batch_size * 96 // length * 2, length, longest)
        logits = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(
                f"{step}: loss {loss.item():.4f}, {accuracy(model, 7, length, longest):.4f} right, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
            if step % 250 == 0:
                write(model, args.folder)
    model.to(torch.bfloat16).float()
    write(model, args.folder)
    print(f"{accuracy(model, 8, 320, 64):.5f} of 320 tokens, {accuracy(model, 9, 640, 100):.5f} of 640")


def write(model: torch.nn.Module, folder: Path) -> None:
    """A checkpoint in bfloat16."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", **CONFIG}
    config["rope_parameters"] = model.config.rope_parameters
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
