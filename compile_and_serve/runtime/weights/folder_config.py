"""config.json of a model's folder, and the files beside it that say how the weights are quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.weights.errors import WeightError

# Files of quantizers that older folders have in place of config.json's quantization_config: the file, the key in it (None: the whole
# object), and the quant_method.
_QUANTIZERS = (
    ("hf_quant_config.json", "quantization", "modelopt"),
    ("quantize_config.json", None, "gptq"),  # AutoGPTQ
    ("quant_config.json", None, "awq"),  # AutoAWQ
)
_MEDIA_PROCESSORS = (("image_processor", "preprocessor_config.json"), ("video_processor", "video_preprocessor_config.json"))


def read_folder_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises `WeightError` if there is none, or if it is not a JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise WeightError(f"{folder} has no config.json: expected a model folder in Hugging Face layout.")
    config = _read_object(file)
    for name, key, method in _QUANTIZERS:
        if config.get("quantization_config") is None and (folder / name).is_file():
            settings = _read_object(folder / name)
            if key is not None:
                settings = settings.get(key) or {}
                if not isinstance(settings, dict):
                    raise WeightError(f"{key} in {folder / name} must be a JSON object, got a {type(settings).__name__}.")
            config["quantization_config"] = {"quant_method": method, **settings}
    for kind, file_name in _MEDIA_PROCESSORS if config.get("vision_config") is not None else ():
        if settings := _media_processor(folder, kind, file_name):
            config[kind] = settings
    return config


def _media_processor(folder: Path, kind: str, file_name: str) -> dict[str, Any]:
    """How media are resized and normalized, from the file of their processor, or of the one for everything; {}: there is none."""
    for name, key in ((file_name, None), ("processor_config.json", kind)):
        if (folder / name).is_file():
            settings = _read_object(folder / name)
            found = settings if key is None else settings.get(key)
            if isinstance(found, dict):
                return found
    return {}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightError(f"{file} is not valid JSON ({error}): check that the file is complete.") from None
    if not isinstance(found, dict):
        raise WeightError(f"{file} must hold a JSON object, got a {type(found).__name__}.")
    return found
