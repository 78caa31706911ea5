"""Skewed routing on ranks with experts of their own, before and after the balancer moved experts. Prints a JSON line.

    python -m benchmarks.expert_balance [--ranks 2] [--experts 64] [--redundant 8] [--sequences 32] [--steps 240] [--device cpu]
                                       [--hidden 64] [--layers 2]

A small random GLM-4.5 whose biases of the choice send half of the pairs of token and expert to 5 % of the experts. `imbalance_before`,
`imbalance_after`: pairs of the busiest rank over those of the mean rank, by the experts' counted tokens, the mean of the layers.
`tokens_equal`: greedy tokens are those of one rank (on CUDA: of the same ranks without the balancer). `step_ms`: the median of decode
steps, `longest_ms`: the longest of those beside which experts moved, `longest_still_ms`: of the others. `longest_at`: the five longest,
each with its number and whether experts moved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.engine.expert_balance import ExpertBalancer
from compile_and_serve.runtime.engine.expert_placement import Turns, imbalance, loads_of_ranks
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.sampling_params import SamplingParams

TOP_K = 6
STEPS_OF_A_WINDOW = 24


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--over", default="tensor", choices=("tensor", "data"), help="data: each rank has sequences of its own")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = write_skewed(Path(folder) / "model", arguments.experts, hidden=arguments.hidden, layers=arguments.layers)
        row = measure(model, **{name: value for name, value in vars(arguments).items() if name not in ("experts", "hidden", "layers")})
    print(
        json.dumps({"experts": arguments.experts, "hidden": arguments.hidden, "layers": arguments.layers} | row | environment()), flush=True
    )


def write_skewed(folder: Path, num_experts: int, *, hidden: int = 64, layers: int = 2) -> Path:
    """A random model of which every token goes to `TOP_K` / 2 experts of `num_experts`, and to as many others."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        vocab_size=320,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        n_routed_experts=num_experts,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        first_k_dense_replace=0,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    model = transformers.Glm4MoeForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[num_experts // 4 : num_experts // 4 + TOP_K // 2] = 10.0  # on one rank, without a second slot
    model.save_pretrained(folder)
    return folder


def measure(
    model: Path, *, ranks: int, redundant: int, sequences: int, steps: int, device: str = "cpu", over: str = "tensor", **options: Any
) -> dict[str, Any]:
    """What the docstring of this file says. options: further ones of the engine."""
    common = {
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "device": device,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": 8 * sequences,
        "max_model_len": steps + 32,
        "num_threads": 1 if device == "cpu" else None,
        "async_scheduling": device != "cpu",
    }
    if device == "cuda":
        common |= {"num_kv_blocks": 4096, "capture": "all"}  # no graph is captured between the steps that are timed
    spread = {f"{over}_parallel_size": ranks, "enable_expert_parallel": True}
    plain, _, _ = _run(model, sequences, steps, common | options | (spread if device == "cuda" else {}))
    balance = {"step_interval": STEPS_OF_A_WINDOW, "window_size": STEPS_OF_A_WINDOW, "num_redundant_experts": redundant}
    tokens, times, found = _run(model, sequences, steps, common | options | spread | {"enable_eplb": True, "eplb_config": balance})
    still = [seconds for seconds, moves in times if not moves]
    moving = [seconds for seconds, moves in times if moves]
    median = statistics.median(still)
    longest = sorted(range(len(times)), key=lambda at: -times[at][0])
    return found | {
        "ranks": ranks,
        "over": over,
        "redundant": redundant,
        "sequences": sequences,
        "tokens_equal": tokens == plain,
        "step_ms": round(1000 * median, 3),
        "longest_ms": round(1000 * max(moving, default=0.0), 3),
        "longest_still_ms": round(1000 * max(still), 3),
        "longest_at": [[at, round(1000 * times[at][0], 3), times[at][1]] for at in longest[:5]],
        "steps_with_moves": len(moving),
    }


def _run(
    model: Path, sequences: int, steps: int, options: dict[str, Any]
) -> tuple[list[list[int]], list[tuple[float, bool]], dict[str, Any]]:
    """Greedy tokens, (seconds, whether experts moved) of each decode step, and the balance."""
    core = EngineCore(make_engine_config(str(model), **options))
    try:
        for number in range(sequences):
            prompt = [(number * 37 + at * 11 + at * at) % 317 + 3 for at in range(4 + number % 8)]
            sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
            core.add_request(EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=sampling))
        tokens: list[list[int]] = [[] for _ in range(sequences)]
        times: list[tuple[float, bool]] = []
        balancer, before = core.experts, 0.0
        while core.has_work():
            moved, began = 0 if balancer is None else balancer.num_moves, time.perf_counter()
            outputs = core.step().outputs
            for one in outputs:
                tokens[int(one.request_id)] += one.new_token_ids
            if balancer is not None and balancer.num_plans == 0 and balancer.counted:
                before = _imbalance(balancer, balancer.counted, sequences)
            if len(tokens[0]) > 3 and len(outputs) == sequences:
                times.append((time.perf_counter() - began, balancer is not None and balancer.num_moves > moved))
        if balancer is None:
            return tokens, times, {}
        after = _imbalance(balancer, balancer.last_window, sequences)
        return (
            tokens,
            times,
            {"imbalance_before": before, "imbalance_after": after, "plans": balancer.num_plans, "moves": balancer.num_moves},
        )
    finally:
        core.shutdown()


def _imbalance(balancer: ExpertBalancer, counts: Sequence[Sequence[int]], rows: int) -> float:
    """The mean of the layers' imbalances, if each of the `rows` tokens of a step gets the experts with the same chance."""
    found = []
    for loads, placement, of_layer in zip(counts, balancer.placements, balancer.turns, strict=True):
        slots: Turns = {}
        for slot, expert in enumerate(placement):
            slots.setdefault(expert, []).append(slot)
        given = {expert: of_layer.get(expert, own) for expert, own in slots.items() if len(own) > 1}
        taken = {expert: [one[row % len(one)] for row in range(rows)] for expert, one in given.items()}
        found.append(imbalance(loads_of_ranks(loads, placement, taken, balancer.spread.num_ranks)))
    return round(sum(found) / len(found), 3)


if __name__ == "__main__":
    main()
