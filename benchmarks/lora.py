"""What LoRA adapters cost: decode steps of the base, of an engine with adapters that nobody uses, and of batches with adapters.

    python -m benchmarks.lora MODEL [--rank 16] [--tokens 128] [--rounds 3] [--cases 1:1 64:8 64:64] [--loading 16] [--device auto]

One JSON line a case `sequences:adapters`: ms per decode step (the least of the rounds), and its ratio to the base of the same number of
sequences. `base` is an engine without `enable_lora`; `unused` one with it whose requests have no adapter. Weights and adapters are random:
only the config is read. Adapters change all linears but the output head and experts. The time of a step is that of generating many
tokens less that of generating one.

--loading N: then N short requests with N adapters join base requests that fill all but one batch slot, so that each adapter is read and
copied into a slot while the others decode; and the same requests once more with one adapter, which is loaded already. One line each: the
median step, the longest one, their ratio, and how many CUDA graphs were captured meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import environment
from compile_and_serve import LLM, LoRARequest, SamplingParams

PROMPT_TOKENS = 16


def write_adapter(folder: Path, targets: Mapping[str, Any], rank: int) -> None:
    """A random adapter of rank `rank` for all targets. targets: module → target."""
    folder.mkdir()
    tensors = {}
    for module, target in targets.items():
        name = f"base_model.model.{module}.lora_{{}}.weight"
        tensors[name.format("A")] = (torch.randn(rank, target.in_features) * 0.01).to(torch.bfloat16)
        tensors[name.format("B")] = (torch.randn(target.out_features, rank) * 0.01).to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def step_ms(llm: LLM, sequences: int, adapters: list[LoRARequest | None], tokens: int, rounds: int) -> float:
    """ms per decode step, the least of the rounds after one that warms up."""
    prompts: Any = [{"prompt_token_ids": [1 + i] * PROMPT_TOKENS} for i in range(sequences)]
    requests = [adapters[i % len(adapters)] for i in range(sequences)]

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        return time.perf_counter() - start

    seconds(tokens)
    return 1e3 * min(seconds(tokens + 1) - seconds(1) for _ in range(rounds)) / tokens


def loading(llm: LLM, sequences: int, adapters: list[LoRARequest], tokens: int) -> dict[str, float]:
    """Steps of `sequences` - 1 base requests, while short requests with adapters join them one after another."""
    core = llm.engine.core
    graphs = getattr(getattr(core.executor, "worker", None), "_graphs", None)
    run_step, times = core.step, list[float]()

    def captured() -> int:
        return 0 if graphs is None else sum(graphs.stats.captured.values())

    def step() -> Any:
        start = time.perf_counter()
        outputs = run_step()
        times.append(time.perf_counter() - start)
        return outputs

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    num_base, before = max(1, sequences - 1), captured()
    prompts: Any = [{"prompt_token_ids": [1 + i] * PROMPT_TOKENS} for i in range(num_base + len(adapters))]
    lengths = [params(tokens)] * num_base + [params(4)] * len(adapters)
    while core.idle():  # what is left to capture
        pass
    core.step = step  # type: ignore[method-assign]
    try:
        llm.generate(prompts, lengths, use_tqdm=False, lora_request=[*[None] * num_base, *adapters])
    finally:
        core.step = run_step  # type: ignore[method-assign]
    median, longest = statistics.median(times[1:]), max(times[1:])  # the first is the prompts'
    return {
        "median_ms": round(1e3 * median, 3), "longest_ms": round(1e3 * longest, 3),
        "longest_to_median": round(longest / median, 2), "captured": captured() - before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=["1:1", "64:8", "64:64"])
    parser.add_argument("--loading", type=int, default=0)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    cases = [tuple(map(int, case.split(":"))) for case in args.cases]
    most_sequences, most_adapters = (max(values) for values in zip(*cases, strict=True))
    options: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": most_sequences,
        "device": args.device,
    }  # fmt: skip
    counts = sorted({sequences for sequences, _ in cases})
    with LLM(args.model, **options) as llm:
        base = {count: step_ms(llm, count, [None], args.tokens, args.rounds) for count in counts}
        device = llm.info.device

    def report(case: str, sequences: int, ms: float) -> None:
        line = {"case": case, "sequences": sequences, "step_ms": round(ms, 3), "ratio": round(ms / base[sequences], 3)}
        facts = {"model": args.model, "rank": args.rank, "device": device, **environment()}
        print(json.dumps(line | facts), flush=True)

    for count in counts:
        report("base", count, base[count])
    with tempfile.TemporaryDirectory() as folder:
        options |= {"enable_lora": True, "max_loras": most_adapters, "max_lora_rank": args.rank}
        with LLM(args.model, **options) as llm:
            targets = llm.engine.core.adapters.targets
            assert targets is not None
            linears = {
                module: one for module, (one, *_) in targets.items()
                if not (module.endswith("lm_head") or one.is_embedding or one.num_experts)
            }  # fmt: skip
            for i in range(max(most_adapters, args.loading)):
                write_adapter(Path(folder) / str(i), linears, args.rank)
            adapters: list[LoRARequest | None] = [
                LoRARequest(str(i), i + 1, f"{folder}/{i}") for i in range(most_adapters)
            ]
            for count in counts:
                report("unused", count, step_ms(llm, count, [None], args.tokens, args.rounds))
            for sequences, num_adapters in cases:
                ms = step_ms(llm, sequences, adapters[:num_adapters], args.tokens, args.rounds)
                report(f"{num_adapters} adapters", sequences, ms)
            if args.loading:
                new = [LoRARequest(f"new {i}", 1000 + i, f"{folder}/{i}") for i in range(args.loading)]
                for case, requests in (("loading", new), ("loaded", [new[-1]] * args.loading)):
                    facts = {"model": args.model, "rank": args.rank, "device": device, **environment()}
                    steps = loading(llm, most_sequences, requests, args.tokens)
                    print(json.dumps({"case": case, "sequences": most_sequences, **steps} | facts), flush=True)


if __name__ == "__main__":
    main()
