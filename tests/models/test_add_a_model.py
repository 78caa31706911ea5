"""The worked example of docs/add-a-model.md compiles, and computes what its plain module computes."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.models import registry
from tests.support.tiny_models import caches, fill, step, tiny_spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "add-a-model.md"
TOKENS = [5, 17, 200, 3, 44, 101, 8]


def test_worked_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
    (tmp_path / "worked_example.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    family = importlib.import_module("worked_example").FAMILY
    monkeypatch.setattr(registry, "ARCHITECTURES", {**registry.ARCHITECTURES, "ParallelForCausalLM": family})
    logits = []
    for mode in ("eager", "compile"):
        spec = tiny_spec("ParallelForCausalLM")
        config = CompileConfig(mode=mode, use_cache=False)
        model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32)
        fill(model)
        logits.append(step(model, TOKENS, 0, caches(spec, torch.float32)))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
