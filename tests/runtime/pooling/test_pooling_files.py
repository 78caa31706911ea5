"""What the files of sentence-transformers say of pooling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compile_and_serve.runtime.config import ModelConfig
from compile_and_serve.runtime.pooling.files import PoolingFilesError, does_pool, pooling_type_of

CONFIG = {"architectures": ["LlamaForCausalLM"]}


def write(folder: Path, *modules: str, **modes: bool) -> ModelConfig:
    kinds = [{"type": f"sentence_transformers.models.{name}", "path": f"1_{name}"} for name in modules]
    (folder / "modules.json").write_text(json.dumps(kinds))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return ModelConfig(model="m", path=folder)


def test_modes(tmp_path: Path) -> None:
    model = write(tmp_path, "Transformer", "Pooling", "Normalize", pooling_mode_cls_token=False, pooling_mode_mean_tokens=True)
    assert does_pool(model, CONFIG)
    assert pooling_type_of(model) == "mean"
    assert pooling_type_of(ModelConfig(model="m", path=tmp_path, pooling_type="last")) == "last"
    assert not does_pool(ModelConfig(model="m", path=tmp_path, runner="generate"), CONFIG)


def test_unsupported(tmp_path: Path) -> None:
    model = write(tmp_path, "Transformer", "Pooling", pooling_mode_mean_sqrt_len_tokens=True)
    with pytest.raises(PoolingFilesError, match="asks for pooling_mode_mean_sqrt_len_tokens"):
        pooling_type_of(model)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.LSTM"}]))
    with pytest.raises(PoolingFilesError, match="names the module 'LSTM'"):
        pooling_type_of(model)


def test_without_files(tmp_path: Path) -> None:
    model = ModelConfig(model="m", path=tmp_path)
    assert not does_pool(model, CONFIG)
    assert does_pool(model, {"architectures": ["Qwen3Model"]})
    assert does_pool(model, {"architectures": ["LlamaForSequenceClassification"]})
    assert not does_pool(model, {"architectures": ["GPT2LMHeadModel"]})
    assert pooling_type_of(model) == "last"
