"""`--expert-metrics`: every token of a request is counted once in every layer, with one rank and with two."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.custom_ops.moe import expert_load
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.serve.observe.metrics import Metrics
from tests.support.moe_models import write_moe

PROMPTS = [[7, 21, 300, 9, 44], [5], list(range(30, 53))]
NEW_TOKENS, TOP_K, LAYERS, BUDGET = 4, 2, 3, 16


def counted(folder: Path, *, runs: int = 1, **options: Any) -> list[str]:
    """Generate from PROMPTS, `runs` times with a second between them. → the lines of /metrics on experts"""
    metrics = Metrics("m")
    with LLM(
        str(folder),
        dtype="float32",
        max_num_seqs=2,
        num_kv_blocks=64,
        device="cpu",
        skip_tokenizer_init=True,
        max_num_batched_tokens=BUDGET,
        **options,
    ) as llm:
        core = llm.engine.core
        step = core.step

        def observed_step() -> Any:
            outputs = step()
            metrics.observe_step(outputs.stats)
            return outputs

        core.step = observed_step
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        for run in range(runs):
            time.sleep(1.1 * (run > 0))
            llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [line for line in metrics.render().decode().splitlines() if line.startswith("cas:expert_")]


PAIRS = TOP_K * sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)


def check(lines: list[str]) -> None:
    for layer in range(LAYERS):
        of_layer = [line for line in lines if f'layer="{layer}"' in line]
        counts = [float(line.split()[1]) for line in of_layer if "expert_tokens_total" in line]
        (imbalance,) = (float(line.split()[1]) for line in of_layer if "expert_imbalance" in line)
        assert len(counts) == 6
        assert sum(counts) == PAIRS
        assert imbalance == pytest.approx(max(counts) * len(counts) / sum(counts))


def test_tokens_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "READ_SECONDS", 0.0)
    folder = write_moe(tmp_path, "MixtralForCausalLM")
    check(counted(folder, enforce_eager=True, expert_metrics=True))


@pytest.mark.exhaustive
def test_two_ranks_count_once(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "model", "MixtralForCausalLM")
    options = {"enable_prefix_caching": False, "cache_dir": tmp_path / "cache", "expert_metrics": True}
    lines = counted(folder, runs=2, tensor_parallel_size=2, **options)
    counts = [float(line.split()[1]) for line in lines if "expert_tokens_total" in line and 'layer="0"' in line]
    assert PAIRS < sum(counts) <= PAIRS + TOP_K * BUDGET  # the last read was in the second run's first step


def test_a_model_without_experts_is_told(tiny_llama_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        LLM(
            str(tiny_llama_dir),
            device="cpu",
            num_kv_blocks=8,
            max_model_len=64,
            enforce_eager=True,
            expert_metrics=True,
            skip_tokenizer_init=True,
        ),
    ):
        pass
    assert "no mixture of experts" in caplog.text


def test_replicas_are_added() -> None:
    metrics = Metrics("m")
    for replica, layers in ((0, [[1, 1]]), (1, [[2, 0], [0, 3]]), (0, [[1, 3], [3, 0]]), (0, [])):
        metrics.observe_step(EngineStats(expert_tokens=layers), replica)
    text = metrics.render().decode()
    for expert, tokens in (("0", 3), ("1", 3)):
        assert f'cas:expert_tokens_total{{expert="{expert}",layer="0",model_name="m"}} {tokens}.0' in text
        assert f'cas:expert_tokens_total{{expert="{expert}",layer="1",model_name="m"}} 3.0' in text
    assert 'cas:expert_imbalance{layer="0",model_name="m"} 1.0' in text
