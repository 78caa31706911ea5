"""Plug-ins of installed packages, found by their entry points: docs/plug-ins.md. Imports nothing of ours, and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any


class PluginError(ValueError):
    """A plug-in is declared twice, or cannot be imported. The message is one sentence."""


def declared_plugins(kind: str) -> Mapping[str, EntryPoint]:
    """The entry points of the group `compile_and_serve.<kind>`, by name, without importing what they name. Raises `PluginError`."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"compile_and_serve.{kind}"):
        other = found.setdefault(point.name, point)
        if other is not point:
            raise PluginError(f"The {_describe(point)} has the name of the {_describe(other)}: uninstall one of the packages.")
    return found


def load_plugin(point: EntryPoint) -> Any:
    """What an entry point names: a module, or something in one. Raises `PluginError` with the package and the reason."""
    try:
        return point.load()
    except Exception as error:  # a plug-in may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")
        raise PluginError(f"The {_describe(point)} cannot be imported: {reason}: update or uninstall the package.") from error


@cache
def load_plugins(kind: str) -> Mapping[str, Any]:
    """Import all plug-ins of a kind, once in a process. → what their entry points name, by name. Raises `PluginError`.

    A module that is a plug-in registers what it brings when it is imported, as our own modules do.
    """
    return {name: load_plugin(point) for name, point in declared_plugins(kind).items()}


def _describe(point: EntryPoint) -> str:
    package = f" of the package {point.dist.name}" if point.dist is not None else ""
    return f"plug-in {point.name!r} in {point.group}{package} ({point.value})"
