"""What an option that names a device may be. Imports no torch."""

from __future__ import annotations

from compile_and_serve.plugins import declared_plugins

BUILT_IN_DEVICES = ("auto", "cpu", "cuda")


def is_device_name(name: str) -> bool:
    """Whether it is one of ours, or the name of a plug-in's platform."""
    return name in BUILT_IN_DEVICES or name in declared_plugins("platforms")
