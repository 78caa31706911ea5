"""Embeddings: throughput, and whether batches, chunks and graphs change them. Prints JSON lines.

    python -m benchmarks.pooling MODEL_DIR [--device cuda] [--prompts 512] [--length 512] [--pooling last mean]

MODEL_DIR needs only a config.json (weights are random then) or is a checkpoint with `--load-format auto`. `least_cosine`: of each prompt's
embedding in the batch, with graphs and chunked prefill, and the same prompt's alone in an eager engine; 1 up to rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pooling", nargs="+", default=["last", "mean"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checked", type=int, default=8, help="prompts that run alone, too")
    parser.add_argument("--load-format", default="dummy", choices=["auto", "dummy"])
    args = parser.parse_args()
    from compile_and_serve import LLM, PoolingParams

    options: dict[str, Any] = {
        "runner": "pooling",
        "device": args.device,
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": max(2 * args.length, 64),
        "enable_prefix_caching": False,
    }
    generator = random.Random(0)
    found: dict[str, list[np.ndarray]] = {}
    prompts: list[dict[str, list[int]]] = []
    with LLM(str(args.model), **options) as llm:
        for _ in range(args.prompts):
            length = generator.randint(max(1, args.length // 2), args.length + args.length // 2)
            prompts.append({"prompt_token_ids": [generator.randrange(llm.info.vocab_size) for _ in range(length)]})
        num_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        device = llm.info.device
        for pooling in args.pooling:
            params = PoolingParams(pooling=pooling)
            seconds = []
            for _ in range(args.repeats + 1):  # the first warms up
                start = time.perf_counter()
                outputs = llm.embed(prompts, pooling_params=params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
            found[pooling] = [np.array(output.outputs.embedding) for output in outputs]
            best = min(seconds[1:])
            line = {"figure": "embeddings", "pooling": pooling, "prompts_per_second": round(len(prompts) / best, 1)}
            print(json.dumps(line | {"tokens_per_second": round(num_tokens / best)} | _where(args, device)), flush=True)
    with LLM(str(args.model), enforce_eager=True, max_num_seqs=1, **options) as llm:
        for pooling in args.pooling:
            params = PoolingParams(pooling=pooling)
            cosines = []
            for prompt, batched in zip(prompts[: args.checked], found[pooling], strict=False):
                [alone] = llm.embed([prompt], pooling_params=params, use_tqdm=False)
                cosines.append(float(batched @ np.array(alone.outputs.embedding)))
            line = {"figure": "embeddings alone and eager", "pooling": pooling, "least_cosine": round(min(cosines), 6)}
            print(json.dumps(line | _where(args, device)), flush=True)


def _where(args: argparse.Namespace, device: str) -> dict[str, Any]:
    return {"model": args.model.name, "device": device, "length": args.length, **environment()}


if __name__ == "__main__":
    main()
