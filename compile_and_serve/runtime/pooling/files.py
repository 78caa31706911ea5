"""Whether a checkpoint is meant for pooling, and how, from its config.json and the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_and_serve.models.pooling import is_pooling_architecture
from compile_and_serve.runtime.config import ModelConfig, PoolingType
from compile_and_serve.runtime.pooling_params import RowPooling

_KINDS: Mapping[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_HEADS = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")
_BY_NAME: Mapping[str, PoolingType] = {"lasttoken": "last", "mean": "mean", "cls": "cls", "max": "max"}  # of `pooling_mode`, newer
_MODULES = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize", "LogitScore")


class PoolingFilesError(ValueError):
    """The checkpoint's pooling is not supported. The message is one sentence."""


def does_pool(model: ModelConfig, config: Mapping[str, Any]) -> bool:
    """Whether the engine pools: as the options say, or "auto" if the checkpoint is meant for it."""
    if model.runner != "auto":
        return model.runner == "pooling"
    return is_pooling_architecture(config) or "classifier_from_token" in config or _has_modules(model)


def with_base_class(config: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The config with the class that sentence-transformers loads: a Transformer before Pooling is one without a head, whatever it names."""
    names = config.get("architectures")
    is_pooled = {"Transformer", "Pooling"} <= {name for name, _ in modules_of(model)}
    if not is_pooled or not isinstance(names, list) or not names:
        return dict(config)
    base = next((str(names[0]).removesuffix(suffix) for suffix in _HEADS if str(names[0]).endswith(suffix)), None)
    return dict(config) if base is None else {**config, "architectures": [f"{base}Model"]}


def modules_of(model: ModelConfig) -> list[tuple[str, Path]]:
    """The modules of modules.json with their folders, in order. Raises `PoolingFilesError` for one that is not supported."""
    if not _has_modules(model):
        return []
    file = model.path / "modules.json"
    found = [(str(one.get("type", "")).rpartition(".")[2], model.path / str(one.get("path", ""))) for one in _read(file)]
    for name, _ in found:
        if name not in _MODULES:
            raise PoolingFilesError(f"{file} names the module {name!r:.100}, but only {', '.join(_MODULES)} are supported.")
    return found


def pooling_type_of(model: ModelConfig, default: RowPooling = "last") -> RowPooling:
    """The options' pooling type, else that of sentence-transformers' files, else the model's default. Raises `PoolingFilesError`."""
    modules = modules_of(model)
    if model.pooling_type is not None:
        return model.pooling_type
    folder = next((path for name, path in modules if name == "Pooling"), None)
    if folder is None:
        # Dense without Pooling: late interaction, as PyLate writes it.
        return "all" if any(name == "Dense" for name, _ in modules) else default
    file = folder / "config.json"
    content = _read(file)
    if isinstance(named := content.get("pooling_mode"), str) and named in _BY_NAME:
        return _BY_NAME[named]
    chosen = [key for key, value in content.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _KINDS:
        raise PoolingFilesError(
            f"{file} asks for {' and '.join(chosen) or 'no pooling'}, but one of {', '.join(_KINDS)} is supported: set --pooling-type."
        )
    return _KINDS[chosen[0]]


def logit_score_ids(model: ModelConfig) -> list[int] | None:
    """The negative and the positive answer's token ids of the module LogitScore, or the positive one's; None: there is no such module."""
    folder = next((path for name, path in modules_of(model) if name == "LogitScore"), None)
    if folder is None:
        return None
    content = _read(folder / "config.json")
    ids = [content[name] for name in ("false_token_id", "true_token_id") if content.get(name) is not None]
    if content.get("true_token_id") is None or not all(isinstance(one, int) and one >= 0 for one in ids):
        raise PoolingFilesError(f"{folder / 'config.json'} names no true_token_id: check the download.")
    return ids


def max_text_tokens(model: ModelConfig) -> int | None:
    """Tokens of the longest text that the checkpoint is made for, its special tokens included; None: the files do not say."""
    file = model.path / "sentence_bert_config.json"
    if not (model.path.is_dir() and file.is_file()):
        return None
    length = _read(file).get("max_seq_length")
    if length is not None and (not isinstance(length, int) or length < 1):
        raise PoolingFilesError(f"max_seq_length in {file} must be a positive integer, got {length!r:.100}.")
    return length


def prompts_of(model: ModelConfig) -> tuple[dict[str, str], str | None]:
    """What is put before texts, by name, and the name of the default. Raises `PoolingFilesError`."""
    file = model.path / "config_sentence_transformers.json"
    if not (model.path.is_dir() and file.is_file()):
        return {}, None
    content = _read(file)
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise PoolingFilesError(f"prompts in {file} must be texts by name, got {prompts!r:.100}.")
    for name in ("query", "document"):  # of PyLate
        if isinstance(prefix := content.get(f"{name}_prefix"), str):
            prompts = {name: prefix, **prompts}
    if default is not None and default not in prompts:
        raise PoolingFilesError(f"default_prompt_name in {file} is {default!r:.100}, but its prompts are {', '.join(prompts) or 'none'}.")
    return prompts, default


def _has_modules(model: ModelConfig) -> bool:
    return model.path.is_dir() and (model.path / "modules.json").is_file()


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PoolingFilesError(f"{file} is not valid JSON ({error}): check that the download is complete.") from error
