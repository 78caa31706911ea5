"""Greedy tokens of a checkpoint, in float32, beside those of the transformers package. Prints one JSON line per prompt.

    python -m benchmarks.greedy_parity MODEL_DIR [--tokens 64] [--eager]

MODEL_DIR has weights and a tokenizer. The prompts are a few words to 1500 tokens long.
They run as one batch, in chunks of 512 tokens. `gap`: the distance of transformers' two logits where a text differs first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

STARTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at 100 degrees because",
    "The three laws of motion say that",
)
STORY = (
    "The old clockmaker wound the spring of clock number {} and listened. It was slow by {} minutes, as it had been every year since "
    "the flood, and he wrote the number into his book beside the others. "
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.gpu_timing import environment
    from compile_and_serve import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    story = "".join(STORY.format(number, number * 7 % 60) for number in range(1, 60))
    ids = tokenizer(story)["input_ids"]
    prompts = [tokenizer(start)["input_ids"] for start in STARTS] + [ids[:300], ids[:700], ids[:1500]]
    llm = LLM(str(args.model), dtype="float32", max_model_len=2048, max_num_batched_tokens=512, enforce_eager=args.eager)
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    llm.shutdown()
    # transformers' SDPA attention ignores Gemma 2's soft cap.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    for prompt, output in zip(prompts, outputs, strict=True):
        ours = list(output.outputs[0].token_ids)
        tensor = torch.tensor([prompt])
        with torch.no_grad():
            whole = model.generate(tensor, attention_mask=torch.ones_like(tensor), do_sample=False, max_new_tokens=args.tokens)[0]
            theirs = whole[len(prompt) :].tolist()
            row = {"prompt_tokens": len(prompt), "tokens": len(ours), "equal": ours == theirs}
            if ours != theirs:
                at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
                logits = model(whole[None, : len(prompt) + at]).logits[0, -1]
                row |= {"first_difference": at, "gap": round(float(logits[theirs[at]] - logits[ours[at]]), 6)}
        text = tokenizer.decode(ours[:16])
        print(json.dumps({"work": "greedy_parity", "model": args.model.name, **row, "text": text, **environment()}))


if __name__ == "__main__":
    main()
