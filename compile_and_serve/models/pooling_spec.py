"""What a classifier's config.json says about its classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.spec import PoolingSpec


def classifier_pooling(config: Mapping[str, Any]) -> PoolingSpec:
    """The classes of a config.json, as transformers reads them: two without an `id2label`."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else int(config.get("num_labels", 2))
    if count < 1:
        raise ModelConfigError("The classifier's config names no class: expected id2label to have at least one.")
    names = tuple(str(labels.get(str(i), i)) for i in range(count)) if isinstance(labels, Mapping) else ()
    activation: Literal["none", "sigmoid", "softmax"] = "softmax"
    if config.get("problem_type") == "regression":
        activation = "none"
    elif config.get("problem_type") == "multi_label_classification" or count == 1:
        activation = "sigmoid"
    return PoolingSpec(kind="classify", width=count, activation=activation, labels=names)
