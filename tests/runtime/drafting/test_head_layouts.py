"""EAGLE-3 heads as others publish them: each layout of one head drafts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.drafting.test_heads import (
    DRAFT_V,
    HEAD_CONFIGS,
    LLAMA,
    engine,
    head_tensors,
    record_drafts,
    requests,
    target_tensors,
    write_folders,
    write_model,
)
from tests.support.drafters import check_every_draft
from tests.support.engines import run_requests, tokens_of

TAPS = "eagle_aux_hidden_state_layer_ids"
EIGHT_BITS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("heads"))


def rounded(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A head's matrices in 8 bits with a scale for each row, and the values that these stand for."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        stored[name] = meant[name] = tensor
        if tensor.dim() == 2 and "lm_head" not in name:
            scale = tensor.abs().amax(dim=1, keepdim=True) / 127
            stored[name] = (tensor / scale).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
            meant[name] = stored[name].float() * scale
    return stored, meant


def drafts_of(folders: dict[str, Path], head: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    proposed = record_drafts(monkeypatch)
    core = engine({**folders, "eagle3": head}, "eagle3")
    tokens = tokens_of(run_requests(core, requests()[:3]))
    core.shutdown()
    return tokens, proposed


def test_layouts(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the packages SpecForge and speculators, in 8 bits, and with the model's output head."""
    check_every_draft(monkeypatch)
    config, tensors = HEAD_CONFIGS["eagle3"], head_tensors("eagle3")
    stored, meant = rounded(tensors)
    ids = tensors["d2t"] + torch.arange(DRAFT_V)
    shared = {name: tensor for name, tensor in meant.items() if name != "lm_head.weight"}
    whole = {**meant, "lm_head.weight": target_tensors(LLAMA)["lm_head.weight"][ids]}
    inner = {name: value for name, value in config.items() if name not in ("architectures", "draft_vocab_size", TAPS)}
    spec_forge = {name: value for name, value in config.items() if name != TAPS}
    layouts = {
        "plain": (config, meant),
        "8 bits": ({**config, "quantization_config": EIGHT_BITS}, stored),
        "SpecForge": ({**spec_forge, "eagle_config": {TAPS: [-1, 0, 1], "use_aux_hidden_state": True}}, meant),
        "speculators": (
            {
                "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "transformer_layer_config": inner,
                "draft_vocab_size": DRAFT_V, "norm_before_residual": False, "target_hidden_size": None, TAPS: config[TAPS],
            },
            {name.replace("midlayer.", "layers.0."): tensor for name, tensor in meant.items()},
        ),
        "own output head": (config, whole),
        "the model's output head": (config, shared),
    }  # fmt: skip
    found = {
        name: drafts_of(folders, write_model(tmp_path / name.replace(" ", "-"), *given), monkeypatch) for name, given in layouts.items()
    }
    assert len(found["plain"][1]) > 20
    for name in ("8 bits", "SpecForge", "speculators"):
        assert found[name] == found["plain"], name
    assert found["the model's output head"] == found["own output head"]
