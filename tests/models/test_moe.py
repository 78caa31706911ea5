"""Mixtures of experts, native and of transformers: logits equal transformers', and the checks of configs and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.weights import WeightError, load_weights
from tests.models.test_registry import config_of
from tests.support.moe_models import FAMILIES, write_moe
from tests.support.tiny_models import plain_logits


def loaded(folder: Path) -> ModelSpec:
    """The plain module with the checkpoint's weights, through the loader."""
    from compile_and_serve.compiler.model import EagerModel

    spec = build_model(json.loads((folder / "config.json").read_text()), dtype=torch.float32)
    cpu = torch.device("cpu")
    model = EagerModel(spec=spec, device=cpu, report={})
    load_weights(model, spec, folder, load_format="auto", device=cpu, dtype=torch.float32, seed=0)
    return spec


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 90])
def test_logits_equal_transformers(architecture: str, num_tokens: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_moe(tmp_path, architecture)
    tokens = torch.randint(3, 320, (num_tokens,)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(plain_logits(loaded(folder), tokens, torch.float32), expected, rtol=1e-4, atol=1e-4)


def test_stacked_weights_are_read_as_they_are(tmp_path: Path) -> None:
    """A checkpoint may have one tensor for all experts."""
    folder = write_moe(tmp_path, "Qwen3MoeForCausalLM")
    expected = plain_logits(loaded(folder), [5, 6, 7], torch.float32)
    spec = loaded(folder)
    save_file({n: p.contiguous() for n, p in spec.module.named_parameters()}, folder / "model.safetensors")
    assert torch.equal(plain_logits(loaded(folder), [5, 6, 7], torch.float32), expected)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_moe(tmp_path, "Qwen3MoeForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.1.mlp.experts.4.up_proj.weight"
    wrong = "model.layers.1.mlp.experts.4.down_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != missing}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=f"lacks {missing}, which"):
        loaded(folder)
    save_file(tensors | {wrong: torch.zeros(3, 4)}, folder / "model.safetensors")
    with pytest.raises(WeightError, match=rf"{wrong} .* has shape \[3, 4\]"):
        loaded(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("Qwen3MoeForCausalLM", num_experts_per_tok=9), "must be at most the number of experts, 4, got 9"),
        (
            config_of("Qwen3MoeForCausalLM", num_experts=0),
            "num_experts in the model's config must be a positive integer",
        ),
        (config_of("MixtralForCausalLM", sliding_window=64), "sliding_window is not supported for Mixtral"),
    ],
)
def test_bad_config_is_one_sentence(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        build_model(config, dtype=torch.float32)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
