"""What LoRA adapters cost: decode steps of the base, of an engine with adapters that nobody uses, and of batches with adapters.

    python -m benchmarks.lora MODEL [--rank 16] [--tokens 128] [--rounds 3] [--cases 1:1 64:8 64:64] [--loading 16] [--device auto]

One JSON line a case `sequences:adapters`: ms per decode step (the least of the rounds), and its ratio to the base of the same number of
sequences. `base` is an engine without `enable_lora`; `unused` one with it whose requests have no adapter. Weights and adapters are random:
only the config is read. Adapters change all linears but the output head and experts. The time of a step is that of generating many
tokens less that of generating one. All adapters are read from one file, and each has a slot of its own.

--loading N: then base requests fill all but one batch slot and decode all the while, and N short requests with N adapters join them one
after another, so that each adapter is read and copied into a slot while the others decode. Before, all graphs are captured, and an adapter
has been used. One line for this (`loading`); one for the same requests with an adapter that is there already (`loaded`), and one without
adapters (`base joins`), which show what the prompts cost: the median step, the longest, their ratio, how many CUDA graphs were captured and
Triton kernels compiled meanwhile, and how many background builds went on. A step lasts from the end of the one before to its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import environment
from compile_and_serve import LLM, LoRARequest, SamplingParams
from compile_and_serve.runtime.messages import EngineRequest

PROMPT_TOKENS = 16
JOINING_TOKENS = 4  # of a short request


def write_adapter(folder: Path, targets: Mapping[str, Any], rank: int) -> None:
    """A random adapter of rank `rank` for all targets. targets: module → target."""
    folder.mkdir()
    tensors = {}
    for module, target in targets.items():
        name = f"base_model.model.{module}.lora_{{}}.weight"
        tensors[name.format("A")] = (torch.randn(rank, target.in_features) * 0.01).to(torch.bfloat16)
        tensors[name.format("B")] = (torch.randn(target.out_features, rank) * 0.01).to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
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


def loading(llm: LLM, sequences: int, adapters: Sequence[LoRARequest | None]) -> dict[str, float]:
    """Steps of `sequences` - 1 base requests, while short requests with adapters join them one after another. The first adapter's steps are
    not counted: there the kernels of such steps are loaded.
    """
    core, num_base = llm.core, sequences - 1
    while core.idle():  # captures what is left
        pass

    def add(name: str, token: int, count: int, lora: LoRARequest | None = None) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        key = None if lora is None else f"lora {lora.lora_int_id}"
        prompt = [token] * PROMPT_TOKENS
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, prefix_key=key, lora=lora))

    def join(adapter: LoRARequest | None) -> list[float]:
        """Seconds of the steps until a request with the adapter has ended."""
        steps, last, has_ended = [], time.perf_counter(), False
        add("joins", 1, JOINING_TOKENS, adapter)
        while not has_ended:
            done = core.step()
            has_ended = any(one.request_id == "joins" and one.finish_reason for one in done.outputs)
            assert done.stats is not None
            if done.stats.step_tokens:
                now = time.perf_counter()
                steps.append(now - last)
                last = now
        return steps

    for i in range(num_base):
        add(f"base {i}", 1 + i, core.info.max_model_len - PROMPT_TOKENS)
    join(adapters[0])
    before = _captured(llm), _compiled_kernels()
    steps = [step for adapter in adapters[1:] for step in join(adapter)]
    captured, compiled = _captured(llm) - before[0], _compiled_kernels() - before[1]
    if core.stats().num_running < num_base:
        raise SystemExit("The base requests ended too early: use fewer adapters.")
    core.abort([f"base {i}" for i in range(num_base)])
    while core.has_work():
        core.step()
    median, longest = statistics.median(steps), max(steps)
    return {
        "steps": len(steps),
        "median_ms": round(1e3 * median, 3),
        "longest_ms": round(1e3 * longest, 3),
        "longest_to_median": round(longest / median, 2),
        "captured": captured,
        "compiled": compiled,
        "builds": core.stats().pending_work.get("builds", 0),
    }


def _captured(llm: LLM) -> int:
    """CUDA graphs since the start."""
    graphs = getattr(getattr(llm.core.executor, "worker", None), "_graphs", None)
    return 0 if graphs is None else sum(graphs.stats.captured.values())


def _compiled_kernels() -> int:
    """Entries of Triton's cache."""
    try:
        import triton
    except ImportError:
        return 0
    folder = Path(triton.knobs.cache.dir)
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0


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
    if args.loading and most_sequences < 2:
        parser.error("--loading needs a case of 2 or more sequences: one joins the others.")
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_seqs": most_sequences,
        "device": args.device,
    }
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
            targets = llm.core.adapters.targets
            assert targets is not None
            linears = {
                module: one
                for module, (one, *_) in targets.items()
                if not (module.endswith("lm_head") or one.is_embedding or one.num_experts)
            }
            write_adapter(Path(folder) / "adapter", linears, args.rank)

            def adapters(count: int, first: int = 1) -> list[LoRARequest | None]:
                return [LoRARequest(str(i), i, f"{folder}/adapter") for i in range(first, first + count)]

            for count in counts:
                report("unused", count, step_ms(llm, count, [None], args.tokens, args.rounds))
            for sequences, num_adapters in cases:
                ms = step_ms(llm, sequences, adapters(num_adapters), args.tokens, args.rounds)
                report(f"{num_adapters} adapters", sequences, ms)
            if args.loading:
                new = adapters(1 + args.loading, first=1000)
                for case, joining in (("loading", new), ("loaded", new[-1:] * len(new)), ("base joins", [None] * len(new))):
                    facts = {"model": args.model, "rank": args.rank, "device": device, **environment()}
                    steps = loading(llm, most_sequences, joining)
                    print(json.dumps({"case": case, "sequences": most_sequences, **steps} | facts), flush=True)


if __name__ == "__main__":
    main()
