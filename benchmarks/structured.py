"""Step time with structured output against free output, and the masks' share of it.

    python -m benchmarks.structured [MODEL] [--num-seqs 64] [--tokens 96] [--device cpu]
    python -m benchmarks.structured benchmarks/configs/llama-8b                           # one H200: random weights

MODEL: `smollm2-135m` by default, any model, or a folder with only a config.json, which gets random weights and a made-up tokenizer
of the same vocabulary size. All sequences decode the same number of tokens at once. `free`: without grammars. `structured`: each
follows one of 8 JSON schemas (arrays that go on beyond the last token). `half`: every second sequence is free. The cases run in
turns, so that each ratio compares runs beside each other. A step's time is the median time between two results of the engine, of steps
in which all sequences decode. `mask_ms`: host time per step to follow the last tokens and fill the masks. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, cpu_name, environment

WARM_UP_STEPS = 8


def schemas() -> list[dict[str, Any]]:
    """Arrays of records of some kinds. No output of them ends within a run."""
    text, number = {"type": "string"}, {"type": "number"}
    records: list[dict[str, Any]] = [
        {"name": text, "age": {"type": "integer", "minimum": 0}},
        {"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"}},
        {"kind": {"enum": ["book", "film", "song"]}, "title": text, "year": {"type": "integer"}},
        {"point": {"type": "array", "items": number, "minItems": 3, "maxItems": 3}, "label": text},
        {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, "valid": {"type": "boolean"}},
        {"choice": {"anyOf": [text, number, {"type": "null"}]}, "why": text},
        {"inner": {"type": "object", "properties": {"a": text, "b": {"type": "array", "items": text}}, "required": ["a", "b"]}},
        {f"field_{index}": text for index in range(20)},
    ]
    return [
        {
            "type": "array",
            "minItems": 10_000,
            "items": {"type": "object", "properties": record, "required": list(record), "additionalProperties": False},
        }
        for record in records
    ]


def write_tokenizer(config: Path, folder: Path) -> Path:
    """A folder with the config and a byte-level tokenizer of its vocabulary size: merges of the benchmarks' texts, then pairs of their
    words.
    """
    import tokenizers

    values = json.loads((config / "config.json").read_text())
    size = int(values["vocab_size"])
    text = "\n".join(path.read_text() for path in sorted((ROOT / "benchmarks" / "texts").iterdir()))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([text], trainer)
    state = json.loads(backend.to_str())
    vocabulary: dict[str, int] = state["model"]["vocab"]
    rng, words = random.Random(0), [token for token in vocabulary if token.isascii() and token.isalpha()]
    while len(vocabulary) < size - 1:
        vocabulary.setdefault("Ġ" * rng.randint(0, 1) + rng.choice(words) + rng.choice(words), len(vocabulary))
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": size - 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@contextmanager
def model_folder(model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The model, and options to load it."""
    path = Path(model)
    if not path.is_dir() or list(path.glob("tokenizer*")) or list(path.glob("*.gguf")):
        yield model, {}
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(write_tokenizer(path, Path(folder))), {"load_format": "dummy"}


class Bench:
    """One engine in this process."""

    def __init__(self, model: str, args: argparse.Namespace, options: dict[str, Any]) -> None:
        from compile_and_serve import LLM

        self.args = args
        self.llm = LLM(
            model,
            device=args.device,
            max_num_seqs=args.num_seqs,
            max_model_len=2048,
            enable_prefix_caching=False,
            **({"kv_cache_memory_bytes": 3 << 30} if args.device == "cpu" else {"gpu_memory_utilization": 0.85}),
            **options,
        )
        tokenizer = self.llm.get_tokenizer()
        rng = random.Random(0)
        self.prompts = [[rng.randrange(300, 8000) for _ in range(32)] for _ in range(args.num_seqs)]
        self.eos = tokenizer.eos_token_ids
        self.mask_seconds = 0.0
        self._time_masks()

    def _time_masks(self) -> None:
        from compile_and_serve.runtime.structured.masks import GrammarSequence, TokenMasks

        for owner, name in ((TokenMasks, "fill"), (GrammarSequence, "advance")):
            work = getattr(owner, name)

            def timed(*args: Any, work: Any = work) -> Any:
                start = time.perf_counter()
                try:
                    return work(*args)
                finally:
                    self.mask_seconds += time.perf_counter() - start

            setattr(owner, name, timed)

    def run(self, case: str) -> tuple[float, float]:
        """→ (median seconds of a step, mean mask seconds of a step)"""
        from compile_and_serve import SamplingParams, StructuredOutputsParams

        inputs, engine, args = self.llm._inputs, self.llm.engine, self.args
        forms = schemas()
        for index, prompt in enumerate(self.prompts):
            is_free = case == "free" or (case == "half" and index % 2 == 1)
            params = SamplingParams(
                temperature=args.temperature,
                seed=index,
                max_tokens=args.tokens,
                ignore_eos=True,
                structured_outputs=None if is_free else StructuredOutputsParams(json=forms[index % len(forms)]),
            )
            ids, prepared = inputs.prepare(prompt, params)
            engine.add_request(inputs.engine_request(f"{case}-{index}", ids, prepared))
        times, last, decoding = [], time.perf_counter(), 0
        self.mask_seconds = mask_seconds = 0.0
        while engine.has_work():
            step = engine.step()
            now = time.perf_counter()
            assert not any(output.error for output in step.outputs), next(o.error for o in step.outputs if o.error)
            is_decode = len(step.outputs) == len(self.prompts) == (step.stats.step_tokens if step.stats else 0)
            decoding = decoding + 1 if is_decode else 0
            if decoding > WARM_UP_STEPS:
                times.append(now - last)
                mask_seconds += self.mask_seconds
            last, self.mask_seconds = now, 0.0
        while self.llm.core.idle():  # captures the graphs that steps asked for
            pass
        return statistics.median(times), mask_seconds / len(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    cases = ("free", "half", "structured")
    with model_folder(args.model) as (model, options):
        bench = Bench(model, args, options)
        for case in cases:  # compiles grammars, captures graphs
            bench.run(case)
        found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        for _ in range(args.rounds):
            for case in cases:
                found[case].append(bench.run(case))
        device = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
        free = [seconds for seconds, _ in found["free"]]
        for case in cases:
            steps = [seconds for seconds, _ in found[case]]
            ratios = [mine / theirs for mine, theirs in zip(steps, free, strict=True)]
            line = {
                "benchmark": "structured",
                "case": case,
                "model": Path(args.model).name,
                "num_seqs": args.num_seqs,
                "tokens": args.tokens,
                "temperature": args.temperature,
                "step_ms": round(statistics.median(steps) * 1e3, 3),
                "ratio_to_free": round(statistics.median(ratios), 3),
                "mask_ms": round(statistics.median(masks for _, masks in found[case]) * 1e3, 3),
                "graph_replays": bench.llm.core.stats().graph_replays,
                "device": device,
                **environment(),
            }
            print(json.dumps(line), flush=True)
        bench.llm.shutdown()


if __name__ == "__main__":
    main()
