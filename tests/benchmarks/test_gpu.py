"""`benchmarks.gpu` on the CPU: which rows it prints and what it counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.decode_bytes import decode_bytes, state_bytes
from benchmarks.gpu import main
from benchmarks.gpu_timing import StepTimes
from compile_and_serve.custom_ops.recurrent.layer_state import (
    ConvolutionState,
    JoinedState,
    LinearAttentionState,
    SelectiveScanState,
    recurrent_group,
)
from compile_and_serve.models.registry import build_model
from tests.support.engines import write_tiny_model
from tests.support.recurrent_models import FAMILIES
from tests.support.transformers_models import config_of


@pytest.mark.slow
def test_contexts_prints_a_table_of_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 2048}
    (model / "config.json").write_text(json.dumps(config))
    arguments = "--work contexts --device cpu --eager --contexts 32,100,4000 --batches 1,4,64 --max-model-len 160 --num-kv-blocks 24"
    monkeypatch.setattr(sys, "argv", ["gpu", str(model), *arguments.split()])
    main()
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    # 24 blocks of 16: 4 sequences of 32 + 33 tokens need 20, of 100 + 33 tokens 36.
    assert [(row["context"], row["batch"]) for row in rows] == [(32, 1), (32, 4), (100, 1)]
    assert all(row["step_ms"] > 0 and 0 <= row["bandwidth"] < 1 for row in rows)
    # 2 layers, keys and values, 2 heads of 16, bfloat16.
    per_token = 2 * 2 * 2 * 16 * 2
    assert rows[2]["read_gb"] - rows[0]["read_gb"] == pytest.approx(68 * per_token / 1e9, abs=1e-6)
    assert lines[-3].startswith("| 32 | 1 |")
    assert lines[-1].startswith("| 100 | 1 |")


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM"])
def test_an_embedding_is_read_only_by_a_head_that_shares_it(architecture: str) -> None:
    config = config_of(architecture)
    config.pop("tie_word_embeddings", None)  # Gemma's default is to share it
    spec = build_model(config, dtype=torch.bfloat16)
    model = SimpleNamespace(weight_memory=lambda: [torch.empty(1 << 20, dtype=torch.bfloat16)])
    loaded = SimpleNamespace(spec=spec, model=model, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
    not_read = 0 if architecture.startswith("Gemma") else 2 * config["vocab_size"] * config["hidden_size"]
    assert decode_bytes(loaded, 0, 0) == (2 << 20) - not_read


def test_a_decode_reads_checkpoints_and_rings_and_seldom_writes_a_checkpoint() -> None:
    linear = LinearAttentionState(num_heads=4, num_key_heads=2, key_dim=16, value_dim=32, dtype=torch.bfloat16)
    convolution = ConvolutionState(channels=128, width=4, dtype=torch.bfloat16)
    scan = SelectiveScanState(channels=64, state_size=8, dtype=torch.float32)
    group = recurrent_group([JoinedState(parts=(linear, convolution)), scan])
    entry = 2 * 16 * 2 + 4 * (32 + 1) * 4
    of_linear = 4 * 16 * 32 * 4 * (1 + 1 / 16) + 23.5 * entry + 4 * 128 * 2
    of_scan = 64 * 8 * 4 * (1 + 1 / 16) + (2 * 64 + 8) * 4
    assert state_bytes(group, 1000, torch.bfloat16) == of_linear + of_scan


def test_only_experts_that_have_a_token_are_read() -> None:
    config = config_of("Qwen3_5MoeForCausalLM", **FAMILIES["Qwen3_5MoeForCausalLM"])
    spec = build_model(config, dtype=torch.bfloat16)
    parameters = {name: one.numel() * 2 for name, one in spec.module.named_parameters()}
    experts = sum(size for name, size in parameters.items() if ".experts." in name)
    num_experts = next(one.shape[0] for name, one in spec.module.named_parameters() if ".experts." in name)
    weights = torch.empty(sum(parameters.values()), dtype=torch.uint8)
    loaded = SimpleNamespace(
        spec=spec, model=SimpleNamespace(weight_memory=lambda: [weights]), dtype=torch.bfloat16, cache_dtype=torch.bfloat16
    )
    assert experts > 0
    assert decode_bytes(loaded, 0, 0, 1.0) == pytest.approx(decode_bytes(loaded, 0, 0) - experts * (1 - 1 / num_experts), rel=1e-5)


def test_times_of_decodes_leave_out_steps_with_prompts_and_other_batches() -> None:
    clock = iter([0.0, 1.0, 1.0, 3.0, 3.0, 4.0, 4.5, 5.5, 6.0, 8.5, 9.0, 10.0])

    class Event:
        def __init__(self) -> None:
            self.at = next(clock)

        def seconds_since(self, earlier: Event) -> float:
            return self.at - earlier.at

    platform = SimpleNamespace(record_timed_event=Event, synchronize=lambda: None)

    class Executor:
        worker = SimpleNamespace(platform=platform)

        def launch(self, scheduled: object) -> None:
            pass

    executor = Executor()
    with StepTimes(executor) as times:
        # Steps end at 1 (with a prompt), 3, 4, 5.5, 8.5 and 10 (a batch of one).
        for tokens in ([7, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1]):
            requests = {str(index): count for index, count in enumerate(tokens)}
            executor.launch(SimpleNamespace(num_scheduled_tokens=requests, total_num_scheduled_tokens=sum(tokens)))
    assert times.decode_seconds(2) == 1.5  # median of 1, 1.5 and 3
    assert str(times.decode_seconds(3)) == "nan"
    assert times.by_batch(1) == {"1-1": {"steps": 1, "ms": 1500.0}, "2-2": {"steps": 3, "ms": 1833.333}}
