"""The error of adapters that cannot be used."""

from __future__ import annotations


class AdapterError(ValueError):
    """An adapter that cannot be used. The message is one sentence."""
