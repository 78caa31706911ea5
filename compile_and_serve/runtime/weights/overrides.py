"""`--hf-overrides`: fields that replace those of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = ("rope_scaling", "rope_theta")


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with other values.

    Objects that are configs of their own, such as text_config, are changed field by field; other objects are replaced. RoPE has an older
    spelling, rope_scaling with rope_theta, and a newer one, rope_parameters: either changes a config that is written in the other.
    """
    changed = dict(config)
    for name, value in overrides.items():
        current = changed.get(name)
        if name.endswith("_config") and isinstance(value, Mapping) and isinstance(current, Mapping):
            changed[name] = overridden(current, value)
        elif name == "rope_parameters" and isinstance(value, Mapping):
            theta = {"rope_theta": changed["rope_theta"]} if changed.get("rope_theta") else {}
            theta |= {k: v for k, v in (current or {}).items() if k == "rope_theta"}
            changed[name] = theta | dict(value)
            changed.pop("rope_scaling", None)
        elif name in _ROPE and isinstance(newer := changed.get("rope_parameters"), Mapping):
            changed["rope_parameters"] = _with_older_rope(newer, name, value)
        else:
            changed[name] = value
    return changed


def _with_older_rope(newer: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """rope_parameters with the value of a field of the older spelling."""
    if name == "rope_theta":
        return {**newer, "rope_theta": value}
    scaling = dict(value or {"rope_type": "default"})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return {key: newer[key] for key in ("rope_theta", "partial_rotary_factor") if key in newer} | scaling
