"""Recurrent and hybrid families: logits beside those of transformers' classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.loaded_checkpoints import load
from tests.support.recurrent_models import FAMILIES, write_recurrent
from tests.support.tiny_models import plain_logits


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_recurrent(tmp_path, architecture)
    reference, spec = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load(folder).spec
    torch.manual_seed(0)
    for length in (1, 15, 16, 17, 130):
        tokens = torch.randint(3, 320, (length,)).tolist()
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0]
        difference = (plain_logits(spec, tokens, torch.float32) - expected).abs().max() / expected.abs().max()
        assert difference < 5e-4, f"{length} tokens: {difference:.1e}"
