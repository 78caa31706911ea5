"""The registry of checkpoint formats, by the `quant_method` of a config.json's `quantization_config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.plugins import load_plugins

CacheDtype = Literal["fp8", "int8"]


def linears_of(spec: ModelSpec) -> dict[str, nn.Linear]:
    """Linears by name, without an output head that shares its weight with the embedding: no format quantizes it."""
    names = {id(parameter): name for name, parameter in spec.module.named_parameters()}
    return {
        name: child
        for name, child in spec.module.named_modules()
        if isinstance(child, nn.Linear) and names[id(child.weight)] == f"{name}.weight"
    }


# (quantization_config, spec of the unquantized model) → the parameters that the checkpoint holds quantized, by name. Raises
# `ModelConfigError`.
ReadFormat = Callable[[Mapping[str, Any], ModelSpec], Mapping[str, StoredWeight]]


def scheme_cache_dtype(quantization: Mapping[str, Any]) -> CacheDtype | None:
    """The dtype of the KV cache that `kv_cache_scheme` asks for.

    fp8: with static scales per tensor or head. int8: with symmetric scales, of a token, a head or the tensor; the cache's own scales are
    of both a token and a head, so they are no coarser than any of these.
    """
    scheme = quantization.get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return None
    kind, strategy = (scheme.get("num_bits"), scheme.get("type")), scheme.get("strategy")
    if kind == (8, "int") and strategy in (None, "tensor", "attn_head", "token"):
        return "int8"
    is_static = not scheme.get("dynamic") and strategy in (None, "tensor", "attn_head")
    return "fp8" if kind == (8, "float") and is_static else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatFields:
    """Fields of a quantization_config, each list as names with spaces between them.

    read: by the format's reader, which refuses what it does not support. no_effect: those that say how the checkpoint was made or how
    another program runs it. expected: field that the reader ignores → the only values that change nothing, beside null and what is empty.
    """

    read: str
    no_effect: str = ""
    expected: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def check(self, quantization: Mapping[str, Any]) -> None:
        """Raise `ModelConfigError` for a field that is not read and may change numbers.

        Such are the expected ones, and those of transformers' class with another value than the default.
        """
        for name, known in self.expected.items():
            if quantization.get(name) not in (None, {}, [], "", *known):
                raise _not_read(name, quantization[name])
        others = quantization.keys() - {*self.read.split(), *self.no_effect.split(), *self.expected, "quant_method"}
        if not others:
            return
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # takes seconds

        config_class = AUTO_QUANTIZATION_CONFIG_MAPPING.get(str(quantization.get("quant_method")))
        parameters = {} if config_class is None else inspect.signature(config_class.__init__).parameters
        for name in sorted(others & parameters.keys()):
            if quantization[name] not in (None, parameters[name].default):
                raise _not_read(name, quantization[name])


def _not_read(name: str, value: Any) -> ModelConfigError:
    return ModelConfigError(f"quantization_config's {name} is {value!r:.100}, which is not supported: only its default is.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFormat:
    """A registered format; see `register_checkpoint_format`."""

    read: ReadFormat
    cache_dtype: Callable[[Mapping[str, Any]], CacheDtype | None]
    may_be_requantized: bool
    fields: FormatFields | None


# Filled when modules are imported.
CHECKPOINT_FORMATS: dict[str, CheckpointFormat] = {}


def register_checkpoint_format(
    *quant_methods: str,
    cache_dtype: Callable[[Mapping[str, Any]], CacheDtype | None] = scheme_cache_dtype,
    may_be_requantized: bool = False,
    fields: FormatFields | None = None,
) -> Callable[[ReadFormat], ReadFormat]:
    """Have the decorated function read the checkpoints with these names of `quant_method`.

    cache_dtype: the 8-bit dtype of the KV cache that a quantization_config is made for. may_be_requantized: the file's reader gives
    unquantized tensors where the model does not keep the quantized ones, so that `--quantization` can start from them. fields: checked
    before `read`; None: it checks them all.
    """

    def register(read: ReadFormat) -> ReadFormat:
        made = CheckpointFormat(read=read, cache_dtype=cache_dtype, may_be_requantized=may_be_requantized, fields=fields)
        CHECKPOINT_FORMATS.update(dict.fromkeys(quant_methods, made))
        return read

    return register


def known_formats() -> Mapping[str, CheckpointFormat]:
    """All formats by `quant_method`, those of plug-ins included. Raises `PluginError`."""
    load_plugins("checkpoint_formats")
    return CHECKPOINT_FORMATS


def format_of(quantization: Mapping[str, Any]) -> CheckpointFormat:
    """The format of a quantization_config. Raises `ModelConfigError` for an unknown one."""
    method, formats = quantization.get("quant_method"), known_formats()
    if not isinstance(method, str) or method not in formats:
        raise ModelConfigError(
            f"quantization_config's quant_method {method!r} is not supported: use a checkpoint in the format "
            f"{', '.join(sorted(formats))}, or an unquantized one with --quantization."
        )
    return formats[method]
