"""Writes docs/vision-classes.md, the table of transformers' classes of images and text: `python -m compile_and_serve.models.image_classes`.

Each class is built on the meta device from its config's defaults, with few layers where that config can be made. What its processor needs
shows only with a checkpoint's files.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "vision-classes.md"
Status = Literal["native", "transformers", "text", "refused", "unknown"]
_HEAD = """# Classes of images and text

Every class that transformers' `AutoModelForImageTextToText` knows, as of transformers {version}, and what becomes of it here. The table
is made by `python -m compile_and_serve.models.image_classes`, which builds each class from the defaults of its config: a checkpoint's
config may make a difference (a LLaVA with a SigLIP tower runs natively). [vision.md](vision.md) says which of them are tested against
transformers.

| | | classes |
|---|---|---|
| native | reads images with an encoder of this project, or a decoder of this project beside transformers' encoder | {native} |
| transformers | reads images with transformers' encoder, beside the class's decoder | {transformers} |
| text | runs on text alone, for the reason given; the log says so | {text} |
| refused | does not run, for the reason given | {refused} |
| unknown | the defaults of its config make no model; a checkpoint's config may | {unknown} |

| class | | |
|---|---|---|
"""
# Classes whose configs' defaults do not fit together, and which tests compare with transformers.
TESTED: Mapping[str, Status] = {
    "MllamaForConditionalGeneration": "native",
    "Qwen2_5_VLForConditionalGeneration": "native",
    "Qwen3VLForConditionalGeneration": "native",
    "Qwen3VLMoeForConditionalGeneration": "native",
    "Glm4vForConditionalGeneration": "transformers",
    "Idefics3ForConditionalGeneration": "transformers",
    "SmolVLMForConditionalGeneration": "transformers",
}
_NO_MODEL = ("transformers cannot build", "a dry run failed with RuntimeError", "A configuration of type")
_LAYERS = ("num_hidden_layers", "depth", "num_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """reason: why a class reads no images, as a clause without a full stop."""

    status: Status
    reason: str = ""


class _Reasons(logging.Handler):
    """Keeps why a class runs on text alone."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "on text alone" in (message := record.getMessage()):
            self.found = message.split(": ", 1)[-1].rstrip(".")


def classes() -> dict[str, str]:
    """Class → type of its config, the first one of several."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        for name in names if isinstance(names, tuple) else (names,):
            found.setdefault(name, model_type)
    return found


def outcome(name: str, model_type: str) -> Outcome:
    """What becomes of a class."""
    if name in TESTED:
        return Outcome(status=TESTED[name])
    from compile_and_serve.models.registry import build_model

    log, reasons = logging.getLogger("compile_and_serve.models"), _Reasons()
    log.addHandler(reasons)
    try:
        spec = build_model({**_config(model_type), "architectures": [name]}, dtype=torch.float32)
    except Exception as error:  # also of transformers' code, for configs that have no defaults
        reason = _clause(error)
        return Outcome(status="unknown" if reason.startswith(_NO_MODEL) else "refused", reason=reason)
    finally:
        log.removeHandler(reasons)
    if spec.encoder is None:
        return Outcome(status="text", reason=reasons.found or "it has nothing that puts features in place of embeddings")
    is_ours = spec.encoder.eager_reason is None or "model_impl" not in spec.config
    return Outcome(status="native" if is_ours else "transformers")


def make_table(outcomes: Mapping[str, Outcome]) -> str:
    """The document."""
    import transformers

    counts = Counter(one.status for one in outcomes.values())
    numbers = {name: counts[name] for name in ("native", "transformers", "text", "refused", "unknown")}
    rows = [f"| `{name}` | {one.status} | {one.reason.replace('|', '/')} |\n" for name, one in sorted(outcomes.items())]
    return "".join([_HEAD.format(version=transformers.__version__, **numbers), *rows])


def _config(model_type: str) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    smaller = _with_few_layers(config.to_dict())
    try:
        return CONFIG_MAPPING[model_type](**smaller).to_dict()
    except Exception:  # lists of layers, or a check of their number
        return config.to_dict()


def _with_few_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers in place of more. Lists that have an entry for each layer are cut."""
    changed = {name: _with_few_layers(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    for name in _LAYERS:
        count = changed.get(name)
        if isinstance(count, int) and count > 4:
            changed = {key: value[:4] if isinstance(value, list) and len(value) == count else value for key, value in changed.items()}
            changed[name] = 4
    return changed


def _clause(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^\S+ cannot run in the transformers package's implementation: (.*) \(`compile-and-serve models`.*$", r"\1", lines[0])
    return f"{text:.200}".rstrip(".")


if __name__ == "__main__":
    DOCUMENT.write_text(make_table({name: outcome(name, model_type) for name, model_type in classes().items()}), encoding="utf-8")
