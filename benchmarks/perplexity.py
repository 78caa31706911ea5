"""Perplexity of a model on a fixed text with each quantization, computed by the engine's compiled model.

    python -m benchmarks.perplexity [--model smollm2-135m] [--dtype bfloat16] [--quantization none fp8 …] [--exclude GLOB …]
                                    [--kv-cache-dtype auto fp8]

Prints one JSON line per quantization and dtype of the KV cache. "none": the model in its dtype, dequantized if it is a GGUF file;
"as-is": a GGUF file's blocks, or a quantized checkpoint.

perplexity: exp(−mean log p(token | all tokens before it)) over benchmarks/texts/ferry.txt as one sequence. The text was written for
    this benchmark, so it is in no model's training data.
change_percent, standard_error_percent: against the unquantized model with an unquantized cache; the error is that of the mean of
    the tokens' differences.
greedy, greedy_equal: the greedy answers to a few chat prompts, and how many of their first tokens the unquantized model chooses, too.

This measures quality, not speed, so it may run on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import cpu_name, environment
from compile_and_serve.compiler.config import Quantization
from compile_and_serve.runtime.config import KVCacheDtype
from compile_and_serve.runtime.quantize.source import write_weights

TEXT = Path(__file__).with_name("texts") / "ferry.txt"
PROMPTS = ("What is the capital of France?", "Name three primary colors.", "Write one sentence about the sea.")
GREEDY_TOKENS = 32
UNCHANGED = ("none", "as-is")


def measure(model: str, dtype: str, quantization: str, exclude: list[str], kv_cache_dtype: str, threads: int | None) -> dict[str, Any]:
    """Perplexity and greedy answers with one quantization and one dtype of the KV cache."""
    from compile_and_serve.runtime.weights import resolve_model

    start = time.perf_counter()
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    if quantization not in UNCHANGED:
        options["quantization"] = quantization
        if exclude:
            options["quantization_exclude"] = exclude
    path = resolve_model(model)
    with tempfile.TemporaryDirectory() as scratch:
        if quantization == "none" and path.suffix == ".gguf":
            write_weights(path, Path(scratch))
            model, options["tokenizer"] = scratch, str(path)
        return _measure(model, dtype, quantization, exclude, kv_cache_dtype, threads, options, start)


def _measure(
    model: str,
    dtype: str,
    quantization: str,
    exclude: list[str],
    kv_cache_dtype: str,
    threads: int | None,
    options: dict[str, Any],
    start: float,
) -> dict[str, Any]:
    from compile_and_serve.runtime.llm.llm import LLM
    from compile_and_serve.runtime.sampling_params import SamplingParams

    llm = LLM(model, dtype=dtype, num_threads=threads, max_num_batched_tokens=512, max_num_seqs=8, **options)
    tokens = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    logprobs = [
        entry[token].logprob for entry, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True) if entry is not None
    ]
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    answers = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS), use_tqdm=False)
    linears = llm.info.compile_report.get("pass_sites.quantize_linears.matched")
    llm.shutdown()
    return {
        "quantization": quantization,
        **({"exclude": exclude} if exclude else {}),
        "kv_cache_dtype": kv_cache_dtype,
        "linears": linears,
        "tokens": len(logprobs),
        "perplexity": round(math.exp(-sum(logprobs) / len(logprobs)), 4),
        "greedy": [answer.outputs[0].text for answer in answers],
        "logprobs": logprobs,
        "greedy_tokens": [answer.outputs[0].token_ids for answer in answers],
        "seconds": round(time.perf_counter() - start, 1),
    }


def equal_prefix(left: list[int], right: list[int]) -> int:
    """The number of first tokens that are equal."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", nargs="+", default=[*UNCHANGED, *get_args(Quantization)])
    parser.add_argument("--exclude", nargs="*", default=[], help="module globs that replace the quantization's own exclusions")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], choices=get_args(KVCacheDtype))
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    reference: dict[str, Any] | None = None
    for quantization, kv_cache_dtype in itertools.product(args.quantization, args.kv_cache_dtype):
        row = measure(args.model, args.dtype, quantization, args.exclude, kv_cache_dtype, args.threads)
        found = {name: row.pop(name) for name in ("logprobs", "greedy_tokens")}
        if quantization == "none" and kv_cache_dtype == "auto":
            reference = found
        elif reference is not None:
            losses = [b - a for a, b in zip(found["logprobs"], reference["logprobs"], strict=True)]
            row["change_percent"] = round(math.expm1(statistics.fmean(losses)) * 100, 3)
            row["standard_error_percent"] = round(statistics.stdev(losses) / len(losses) ** 0.5 * 100, 3)
            pairs = zip(found["greedy_tokens"], reference["greedy_tokens"], strict=True)
            row["greedy_equal"] = [equal_prefix(a, b) for a, b in pairs]
        line = {"benchmark": "perplexity", "model": args.model, "dtype": args.dtype, "text": TEXT.name, **row}
        print(json.dumps({**line, "device": cpu_name(), **environment()}), flush=True)


if __name__ == "__main__":
    main()
