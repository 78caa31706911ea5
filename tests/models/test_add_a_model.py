"""The worked example of docs/add-a-model.md, a family outside of the package: it compiles, serves a checkpoint and is listed."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.models.families import FAMILIES
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.serve.cli.main import app
from tests.support import engines
from tests.support.tiny_models import caches, fill, plain_logits, step, tiny_config, tiny_spec

DOCUMENT = Path(__file__).parents[2] / "docs" / "add-a-model.md"
ARCHITECTURE = "ParallelForCausalLM"
TOKENS = [5, 17, 200, 3, 44, 101, 8]


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    code = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
    (tmp_path / "worked_example.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.reload(importlib.import_module("worked_example"))
    yield
    del FAMILIES[ARCHITECTURE]


def test_compiled_logits() -> None:
    logits = []
    for mode in ("eager", "compile"):
        spec = tiny_spec(ARCHITECTURE)
        config = CompileConfig(mode=mode, use_cache=False)
        model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32)
        fill(model)
        logits.append(step(model, TOKENS, 0, caches(spec, torch.float32)))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_checkpoint_is_served(tmp_path: Path) -> None:
    config = tiny_config(ARCHITECTURE)
    spec = tiny_spec(ARCHITECTURE)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(p.shape, generator=generator) * 0.2 for name, p in spec.module.named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = EngineCore(engines.tiny_config(tmp_path, load_format="auto"))
    [tokens] = engines.tokens_of(engines.run_requests(core, [engines.request("one", TOKENS, max_tokens=4)])).values()
    core.shutdown()
    module = spec.module.to_empty(device="cpu")
    module.load_state_dict(weights)
    for name, value in spec.buffers.items():
        module.get_buffer(name).copy_(value)
    expected = list(TOKENS)
    for _ in tokens:
        expected.append(int(plain_logits(spec, expected, torch.float32)[-1].argmax()))
    assert len(tokens) == 4
    assert tokens == expected[len(TOKENS) :]


def test_it_is_listed() -> None:
    assert re.search(rf"^{ARCHITECTURE} +full attention$", CliRunner().invoke(app, ["models"]).output, re.MULTILINE)
