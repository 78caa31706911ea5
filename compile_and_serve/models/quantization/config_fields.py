"""Reads and checks fields of a config.json's `quantization_config`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compile_and_serve.models.config import ModelConfigError

log = logging.getLogger(__name__)


def integer(settings: Mapping[str, Any], field: str, default: Any) -> int:
    """An integer field of quantization_config. Raises `ModelConfigError`."""
    value = settings.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelConfigError(f"quantization_config's {field} is {value!r}: expected an integer.")
    return value


def require(field: str, value: Any, known: Sequence[Any]) -> None:
    """Raise `ModelConfigError` if a field of quantization_config has none of the known values."""
    if value not in known:
        expected = " or ".join(repr(one) for one in known)
        raise ModelConfigError(f"quantization_config's {field} is {value!r}, which is not supported: expected {expected}.")


def is_ignored(name: str, ignored: Sequence[str]) -> bool:
    """Whether a list of modules has this module, one of its parents, or a part of its name from dot to dot."""
    return any(f".{name}.".endswith(f".{one}.") or f"{name}.".startswith(f"{one}.") or f".{one}." in f".{name}." for one in ignored)


def as_list(value: Any) -> list[Any]:
    """The items of a list, of a list of lists, or of a text with commas."""
    if isinstance(value, str):
        return [one.strip() for one in value.split(",")]
    return [item for one in value for item in as_list(one)] if isinstance(value, list | tuple) else [value]


def is_pattern_for(target: str, name: str) -> bool:
    """Whether `re:` and a pattern for `re.match` fit the module's name."""
    return target.startswith("re:") and re.match(target[3:], name) is not None


_logged: set[str] = set()  # sentences that this process has logged, for whichever engine


def tell_once(sentence: str) -> None:
    """Log a sentence the first time that it is said."""
    if sentence not in _logged:
        _logged.add(sentence)
        log.info(sentence)


def tell_about_activations(what: str, bits: Any) -> None:
    """Log once that activations are not quantized."""
    tell_once(
        f"{what} weights are decoded in the kernels; activations stay in the model's dtype, although the checkpoint is for {bits} bits."
    )


def unsupported(what: str, expected: str) -> ModelConfigError:
    """The error for a scheme that kernels do not run."""
    return ModelConfigError(f"The checkpoint is quantized with {what}, which is not supported: expected {expected}.")
