"""Train the EAGLE-3 head for SmolLM2-135M-Instruct that tests and benchmarks use.

    python -m tests.support.train_draft_head all --model MODEL.gguf --out FOLDER --device cuda --seconds 290

prompts: questions about Python's library, and 200 held-out ones, as tokens. generate: the target's answers to them, and to questions that
it makes up. train: computes the hidden states, which stay on the device, and trains. write: 8-bit weights with a scale for each row, and
measures what they gain. all: every step, in so many seconds. What a step makes lies in FOLDER, where later steps find it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.draft_head.head import MLP_SIZE, Eagle3Head
from tests.support.draft_head.prompts import held_out_questions, training_questions
from tests.support.draft_head.target import Target
from tests.support.draft_head.training import Conversations, draft_vocabulary, measure, train

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>"
TO_ANSWER, TO_QUESTION = "\n<|im_start|>assistant\n", "\n<|im_start|>user\n"
BEGINNING = SYSTEM + TO_QUESTION
MAX_PROMPT = 192
GENERATING, WRITING = 0.22, 15.0  # share of all seconds; seconds
ASKING = 0.7  # share of the sequences whose questions the target makes up
SAMPLED = 0.4  # share of the sequences with answers at temperature 1


def make_prompts(args: argparse.Namespace) -> None:
    from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.model)

    def encode(question: str) -> list[int]:
        return tokenizer.encode(f"{BEGINNING}{question}<|im_end|>{TO_ANSWER}")

    given = {"training": [encode(one) for one in training_questions(8_000)], "held_out": [encode(one) for one in held_out_questions()]}
    fixed = {"beginning": BEGINNING, "to_answer": TO_ANSWER, "to_question": TO_QUESTION}
    tables = {name: torch.tensor(tokenizer.encode(text)) for name, text in fixed.items()}
    for name, prompts in given.items():
        prompts = [one for one in prompts if len(one) <= MAX_PROMPT]
        table = torch.zeros(len(prompts), MAX_PROMPT, dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            table[row, : len(prompt)] = torch.tensor(prompt)
        tables[name], tables[f"{name}_lengths"] = table, torch.tensor([len(one) for one in prompts])
        print(f"{name}: {len(prompts)} prompts", flush=True)
    save_file(tables, args.out / "prompts.safetensors")


def generate(args: argparse.Namespace, target: Target, seconds: float) -> None:
    """As many rounds of conversations as fit into the seconds, and the held-out ones."""
    tables = {name: tensor.to(target.device).long() for name, tensor in load_file(args.out / "prompts.safetensors").items()}
    numbers = torch.Generator(device=target.device).manual_seed(1)
    fixed = tables["to_answer"].tolist(), tables["to_question"].tolist()

    def converse(name: str, size: int, asking: float, sampled: float, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randperm(len(tables[name]), generator=numbers, device=target.device)[:size]
        chosen = chosen if len(chosen) == size else torch.randint(len(tables[name]), (size,), generator=numbers, device=target.device)
        prompts, lengths = tables[name][chosen], tables[f"{name}_lengths"][chosen]
        asks, is_sampled = (torch.rand(size, generator=numbers, device=target.device) < share for share in (asking, sampled))
        beginning = tables["beginning"]
        prompts[:, : len(beginning)] = torch.where(asks[:, None], beginning, prompts[:, : len(beginning)])
        lengths = torch.where(asks, len(beginning), lengths)
        tokens, answers = target.conversations(prompts, lengths, asks, is_sampled.float(), *fixed, length)
        return tokens.to(torch.int32).cpu(), answers.cpu()

    start, made = time.perf_counter(), []
    held_out = converse("held_out", min(args.held_out, len(tables["held_out"])), 0.0, 0.0, min(args.length, 320))
    answered = held_out[1] & (((held_out[0] == 2) & held_out[1]).cumsum(1) <= 1)  # the first answer alone
    answered &= (answered.int().diff(dim=1, prepend=torch.zeros(len(answered), 1)) > 0).cumsum(1) <= 1
    while not made or (time.perf_counter() - start) * (len(made) + 1) / (len(made) or 1) < seconds:
        made.append(converse("training", args.sequences, ASKING, SAMPLED, args.length))
        count, passed = sum(one[0].numel() for one in made), time.perf_counter() - start
        print(f"{passed:.0f} s: {count} tokens", flush=True)
    tokens, answers = torch.cat([one[0] for one in made]), torch.cat([one[1] for one in made])
    print(f"{answers.float().mean():.1%} of the tokens are answers", flush=True)
    found = {"tokens": tokens, "answers": answers, "held_out": held_out[0], "held_out_answers": answered}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, args.out / "conversations.safetensors")


def train_head(args: argparse.Namespace, target: Target, ends_at: float) -> None:
    """ends_at: of `time.perf_counter`."""
    if args.device == "cuda":
        torch.cuda.empty_cache()  # of the keys and values of `generate`
    found = load_file(args.out / "conversations.safetensors")
    most = int(args.states_gib * 2**30 / (4 * target.hidden_size * 2 * found["tokens"].shape[1]))
    if len(found["tokens"]) > most:
        print(f"{len(found['tokens'])} sequences are cut to {most}, whose hidden states fit into {args.states_gib:g} GiB", flush=True)
    vocabulary_V = draft_vocabulary(found["tokens"], found["answers"], args.draft_vocabulary).to(target.device)
    data = Conversations.of(target, found["tokens"][:most], found["answers"][:most])
    held_out = Conversations.of(target, found["held_out"], found["held_out_answers"])
    print(f"hidden states of {data.tokens_BL.numel()} tokens; {ends_at - time.perf_counter():.0f} s are left to train", flush=True)
    seconds = max(ends_at - time.perf_counter(), 1.0)
    head = train(target, data, held_out, vocabulary_V, seconds=seconds, batch=args.batch, rate=args.rate)
    measure(head, target, held_out, vocabulary_V)
    save_file({**head.state_dict(), "vocabulary": vocabulary_V}, args.out / "trained.safetensors")


def write(args: argparse.Namespace, target: Target) -> None:
    """model.safetensors and config.json of a head: matrices in 8 bits, with a scale for each row."""
    trained = load_file(args.out / "trained.safetensors", device=str(target.device))
    vocabulary_V = trained.pop("vocabulary")
    tensors = {"d2t": vocabulary_V - torch.arange(len(vocabulary_V), device=target.device)}
    restored = {}
    for name, tensor in trained.items():
        part = name.split("_proj")[0]
        inside = "self_attn." if part in ("q", "k", "v", "o") else "mlp." if part in ("gate", "up", "down") else ""
        stored = name if name.startswith(("fc.", "norm.")) else f"midlayer.{inside}{name}"
        restored[name] = tensor
        if tensor.ndim < 2:
            tensors[stored] = tensor.to(torch.bfloat16)
            continue
        scale = (tensor.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16).float()
        tensors[stored] = (tensor / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{stored}_scale"] = scale.to(torch.bfloat16)
        restored[name] = tensors[stored].float() * scale
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, args.out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": len(target.embedding_VD),
        "draft_vocab_size": len(vocabulary_V), "hidden_size": target.hidden_size, "intermediate_size": MLP_SIZE, "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads, "num_key_value_heads": target.num_kv_heads, "head_dim": target.head_dim,
        "hidden_act": "silu", "rms_norm_eps": target.eps, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "rope_theta": target.theta, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": list(target.taps),
    }  # fmt: skip
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{(args.out / 'model.safetensors').stat().st_size / 1e6:.2f} MB in {args.out}", flush=True)
    found = load_file(args.out / "conversations.safetensors")
    head = Eagle3Head(target)
    head.load_state_dict(restored)
    measure(head, target, Conversations.of(target, found["held_out"], found["held_out_answers"]), vocabulary_V)


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prompts", "generate", "train", "write", "all"))
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2's folder or .gguf file")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=290.0)
    parser.add_argument("--sequences", type=int, default=2048, help="that are generated at once")
    parser.add_argument("--length", type=int, default=512, help="of each, in tokens")
    parser.add_argument("--held-out", type=int, default=200, help="questions to measure with")
    parser.add_argument("--states-gib", type=float, default=44.0, help="device memory for hidden states")
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=32, help="sequences a training step")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.step == "prompts" or not (args.out / "prompts.safetensors").exists():
        make_prompts(args)
    if args.step == "prompts":
        return
    torch.manual_seed(0)
    target = Target(args.model, torch.device(args.device))
    print(f"{time.perf_counter() - start:.0f} s: the target is loaded", flush=True)
    if args.step in ("generate", "all"):
        generate(args, target, args.seconds * GENERATING)
    if args.step in ("train", "all"):
        train_head(args, target, start + args.seconds - WRITING)
    if args.step in ("write", "train", "all"):
        write(args, target)


if __name__ == "__main__":
    main()
