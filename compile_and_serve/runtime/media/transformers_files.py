"""Processors of the transformers package, from a checkpoint's folder, and the tensors that they give."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.runtime.media.prepared import MediaError

log = logging.getLogger(__name__)

_NOT_OF_MEDIA = ("attention_mask", "token_type_ids", "mm_token_type_ids")
_AUDIO_PARTS = ("feature_extractor", "audio_processor")


def load_processor(folder: Path, videos: Any = None) -> Any:
    """The processor of a folder. One that prepares audio comes without what prepares images; one of images, with `videos` in place of what
    processes videos: transformers needs torchvision for these. Raises `MediaError`.
    """
    try:
        return _load(folder, videos)
    except Exception as error:  # transformers raises many kinds for files that it cannot use
        raise MediaError(f"transformers cannot load the processor of {folder.name}: {first_line(error)}.") from None


def prepares_audio(folder: Path) -> bool:
    """Whether the folder's processor prepares audio."""
    return not _audio_parts(processor_class(folder)[0]).isdisjoint(_AUDIO_PARTS)


def processor_class(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The class of a folder's processor, None if there is none, and its settings."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text(encoding="utf-8"))  # of the last one
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = settings.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(config.get("model_type"))
    return getattr(transformers, str(name), None), settings


def token_arrays(made: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of what a processor gives, without masks of the text."""
    return {name: one.numpy() for name, one in made.items() if hasattr(one, "numpy") and name not in _NOT_OF_MEDIA}


def packed_arrays(tensors: Mapping[str, np.ndarray], mean: np.ndarray | None = None, std: np.ndarray | None = None) -> StepArray:
    """See `packed`, which imports torch."""
    from compile_and_serve.models.vision.whole_items import packed

    return packed(tensors, mean=mean, std=std)


def first_line(error: Exception) -> str:
    """The first line of an error's text, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]:.200}".rstrip(".")


def changed_settings(image_processor: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not the processor's own: those of --mm-processor-kwargs."""
    known = image_processor.to_dict()
    return {
        name: value for name, value in settings.items() if name in known and known[name] != value and isinstance(value, int | float | dict)
    }


def _audio_parts(found: Any) -> set[str]:
    return set() if found is None else set(inspect.signature(found.__init__).parameters)


def _image_processor(folder: Path, processor: Any) -> Any:
    """The image processor of a folder. processor: the class of the whole."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor  # without torchvision, the package hides it

    try:
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the package says of some classes that they need torchvision, although their modules load without it
        name = processor.__module__.replace(".processing_", ".image_processing_pil_")
        if importlib.util.find_spec(name) is None:
            raise
        found = [one for one in vars(importlib.import_module(name)).values() if getattr(one, "__module__", None) == name]
        classes = [one for one in found if isinstance(one, type) and one.__name__.endswith("ImageProcessorPil")]
        if not classes:
            raise
        log.info("Images are prepared by %s, which needs no torchvision: %s", classes[0].__name__, first_line(error))
    return classes[0].from_pretrained(folder, local_files_only=True)  # type: ignore[attr-defined]


def _load(folder: Path, videos: Any) -> Any:
    import transformers

    found, settings = processor_class(folder)
    if found is None:
        raise ValueError(f"it has no class {str(settings.get('processor_class'))!r:.100}")
    parameters = inspect.signature(found.__init__).parameters
    parts: dict[str, Any] = {"tokenizer": transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)}
    if of_audio := [name for name in _AUDIO_PARTS if name in parameters]:
        parts[of_audio[0]] = transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        no_images = SimpleNamespace(merge_size=1)
        parts |= {name: no_images for name in ("image_processor", "video_processor") if name in parameters}
    else:
        parts["image_processor"] = _image_processor(folder, found)
        parts |= {"video_processor": videos} if "video_processor" in parameters else {}
    accepts = {"check_argument_for_proper_class": lambda *_: None, "validate_inputs": lambda *_, **__: None}
    unchecked = type(found.__name__, (found,), accepts)
    own = {key: value for key, value in settings.items() if key in parameters and key not in parts and key != "chat_template"}
    return unchecked(**parts, **own)
