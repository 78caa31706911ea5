"""Adapters as PEFT saves them: scales, and one sentence for each that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.peft_files import open_adapter
from compile_and_serve.runtime.lora.request import AdapterTarget
from tests.support.adapters import write_adapter

LINEARS = {"model.layers.0.mlp.up_proj": (6, 10), "model.layers.1.mlp.up_proj": (6, 10), "model.layers.0.mlp.down_proj": (10, 6)}
TARGETS = {name: [AdapterTarget(name, *sizes)] for name, sizes in LINEARS.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = {f"{name}.weight": torch.zeros(*reversed(sizes)) for name, sizes in LINEARS.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def scales(adapter: Path) -> dict[str, float]:
    with open_adapter(adapter, TARGETS, 8) as file:
        return {part.target.module: part.scale for part in file.parts}


def check(adapter: Path) -> None:
    with open_adapter(adapter, TARGETS, 8) as file:
        list(file.tensors(torch.float32))


def test_scales_follow_rslora_and_patterns(model: Path) -> None:
    up_0, up_1, down = LINEARS
    assert scales(write_adapter(model / "a", model, 4, alpha=2)) == dict.fromkeys(LINEARS, 0.5)
    assert scales(write_adapter(model / "b", model, 4, alpha=2, use_rslora=True)) == dict.fromkeys(LINEARS, 1.0)
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers\.\d+\.mlp\.up_proj": 8, "down_proj": 1}}
    assert scales(write_adapter(model / "c", model, 4, alpha=2, **patterns)) == {up_0: 2.0, up_1: 2.0, down: 0.5}


def test_tensors_are_scaled(model: Path) -> None:
    adapter = write_adapter(model / "a", model, 4, alpha=2, targets=("down_proj",))
    stored = load_file(adapter / "adapter_model.safetensors")
    with open_adapter(adapter, TARGETS, 8) as file:
        ((_, a, b),) = file.tensors(torch.float32)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"
    torch.testing.assert_close(a, stored[name.format("A")])
    torch.testing.assert_close(b, 0.5 * stored[name.format("B")])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"peft_type": "IA3"}, 'peft_type must be "LORA"'),
        ({"r": 0}, "positive integers"),
        ({"r": 3}, "expected .*is it an adapter of another model"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
        ({"alpha_pattern": {"(": 2}}, "not a regular expression"),
        ({"lora_alpha": "2"}, "as numbers"),
    ],
)
def test_configs_that_are_refused(model: Path, config: dict[str, Any], message: str) -> None:
    adapter = write_adapter(model / "a", model, 4, **config)
    with pytest.raises(AdapterError, match=message):
        check(adapter)


def change(adapter: Path, changes: dict[str, torch.Tensor | None]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def test_tensors_that_are_refused(model: Path) -> None:
    prefix = "base_model.model.model.layers.0.mlp.up_proj"
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{prefix}.lora_A.weight": torch.zeros(4, 7)}, r"A \[4, 7\] .*expected \[4, 6\]"),
        ({f"{prefix}.lora_A.weight": None}, "only one of A and B"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 6)}, "changes lm_head, but"),
        ({f"{prefix}.lora_magnitude_vector": torch.zeros(4)}, "not the A or B"),
        ({"model.layers.0.mlp.experts.3.w1.lora_A.weight": torch.zeros(4, 6)}, "for experts only with --lora-experts"),
    ]
    for number, (changes, message) in enumerate(cases):
        adapter = write_adapter(model / str(number), model, 4)
        change(adapter, changes)
        with pytest.raises(AdapterError, match=message):
            check(adapter)


def test_files_that_are_refused(model: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config.json"):
        check(model / "nothing")
    big = write_adapter(model / "big", model, 9)
    with pytest.raises(AdapterError, match=r"rank 9, but the engine takes at most 8: raise --max-lora-rank"):
        check(big)
    cut = write_adapter(model / "cut", model, 4)
    file = cut / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(AdapterError, match="truncated"):
        check(cut)
    file.rename(cut / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"no adapter_model.safetensors: save the adapter with safetensors"):
        check(cut)
    (cut / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(AdapterError, match="does not describe"):
        check(cut)
