"""Which class a config.json means: the one that it names, else the one of its model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.families import known_families

_GENERATES, _BARE = "ForCausalLM", "Model"


def with_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `architectures`, which follow from `model_type` as transformers' Auto classes have it if the config names none.

    The same goes for a causal class that neither a family nor transformers knows. Without a known model type the config stays as it is.
    """
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if named is not None and (not named.endswith(_GENERATES) or named in known_families()):
        return dict(config)
    if named is None and names not in (None, []):
        return dict(config)  # of a wrong type, which `architecture_of` says
    import transformers  # takes seconds
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if named is not None and (hasattr(transformers, named) or "auto_map" in config):
        return dict(config)
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    if found is None:
        return dict(config)
    return {**config, "architectures": [found if isinstance(found, str) else found[0]]}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a config.json names. Raises `ModelConfigError` if it names none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelConfigError(
            'The model\'s config names no architecture: expected "architectures" to be one of '
            f"{', '.join(sorted(known_families()))}, or another decoder of the transformers package, or a model_type of these."
        )
    return names[0]


def generating_architecture(config: Mapping[str, Any]) -> str:
    """As `architecture_of`; the causal class of a base model (Qwen3ForCausalLM for Qwen3Model) where a family has it."""
    name = architecture_of(config)
    causal = name.removesuffix(_BARE) + _GENERATES
    return causal if name.endswith(_BARE) and name not in known_families() and causal in known_families() else name
