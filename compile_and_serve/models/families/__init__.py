"""Model families, a file each. A file registers the architectures that it builds, by the names that config.json files give them.

All files of this folder are imported with it, so that a family from outside, which registers itself in the same way, comes later and wins.
`known_families` also imports those of installed packages (docs/plug-ins.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_and_serve.models.config import positive_int
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.plugins import load_plugins

ModelBuilder = Callable[[Mapping[str, Any], torch.dtype], ModelSpec]
# The same for a layer for multi-token prediction. Also takes its number in the checkpoint and whether it is the only one.
LayerBuilder = Callable[[Mapping[str, Any], torch.dtype, int, bool], ModelSpec]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the models of an architecture are built; the fields are as in `register_model`."""

    build: ModelBuilder
    features: Sequence[str]
    build_mtp_layer: LayerBuilder | None
    fields: Mapping[str, str] | None
    num_mtp_layers: Callable[[Mapping[str, Any]], int]


def _num_mtp_layers(config: Mapping[str, Any]) -> int:
    return positive_int(config, "num_nextn_predict_layers") if config.get("num_nextn_predict_layers") else 0


FAMILIES: dict[str, Family] = {}


def register_model(
    architecture: str,
    build: ModelBuilder,
    *,
    features: Sequence[str] = ("full attention",),
    build_mtp_layer: LayerBuilder | None = None,
    fields: Mapping[str, str] | None = None,
    num_mtp_layers: Callable[[Mapping[str, Any]], int] = _num_mtp_layers,
) -> None:
    """Have `build(config.json as a dictionary, dtype)` make the models of an architecture, on the meta device, with parameters in dtype.

    build: raises `ModelConfigError` for a wrong config, and `UnsupportedConfigError` for one that transformers' class may be able to run.
        If it sets no `quantized_weights`, they follow from the config's `quantization_config`.
    features: what `compile-and-serve models` says. build_mtp_layer: makes a layer for multi-token prediction, if the family has them.
    fields: field that `build` reads or refuses → its kind (`models/config_fields.py`). A config is then checked before `build`: its types,
        and that other fields of transformers' config class have their defaults. None: `build` checks the config alone.
    num_mtp_layers: how many layers for multi-token prediction a checkpoint with this config.json has.
    """
    FAMILIES[architecture] = Family(
        build=build, features=features, build_mtp_layer=build_mtp_layer, fields=fields, num_mtp_layers=num_mtp_layers
    )


def known_families() -> Mapping[str, Family]:
    """All families by architecture, those of plug-ins included. Raises `PluginError`."""
    load_plugins("models")
    return FAMILIES


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
