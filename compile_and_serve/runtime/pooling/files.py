"""Whether a checkpoint is meant for pooling, and how, from its config.json and the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_and_serve.models.pooling import is_pooling_architecture
from compile_and_serve.runtime.config import ModelConfig, PoolingType

_KINDS: Mapping[str, PoolingType] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
_MODULES = ("Transformer", "Pooling", "Normalize")


class PoolingFilesError(ValueError):
    """The checkpoint's pooling is not supported. The message is one sentence."""


def does_pool(model: ModelConfig, config: Mapping[str, Any]) -> bool:
    """Whether the engine pools: as the options say, or "auto" if the checkpoint is meant for it."""
    if model.runner != "auto":
        return model.runner == "pooling"
    return is_pooling_architecture(config) or (model.path.is_dir() and (model.path / "modules.json").is_file())


def pooling_type_of(model: ModelConfig) -> PoolingType:
    """The options' pooling type, else that of sentence-transformers' files, else the last token. Raises `PoolingFilesError`."""
    modules_file = model.path / "modules.json"
    if not (model.path.is_dir() and modules_file.is_file()):
        return model.pooling_type or "last"
    modules = [(str(one.get("type", "")).rpartition(".")[2], one.get("path", "")) for one in _read(modules_file)]
    for name, _ in modules:
        if name not in _MODULES:
            raise PoolingFilesError(f"{modules_file} names the module {name!r:.100}, but only {', '.join(_MODULES)} are supported.")
    if model.pooling_type is not None:
        return model.pooling_type
    folder = next((path for name, path in modules if name == "Pooling"), None)
    if folder is None:
        return "last"
    file = model.path / folder / "config.json"
    content = _read(file)
    chosen = [key for key, value in content.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _KINDS:
        raise PoolingFilesError(
            f"{file} asks for {' and '.join(chosen) or 'no pooling'}, but one of {', '.join(_KINDS)} is supported: set --pooling-type."
        )
    return _KINDS[chosen[0]]


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PoolingFilesError(f"{file} is not valid JSON ({error}): check that the download is complete.") from error
