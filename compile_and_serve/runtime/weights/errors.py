"""The one exception of weight loading."""

from __future__ import annotations


class WeightError(ValueError):
    """A model that cannot be found or read; the message is one sentence: what is wrong, what was expected, what to do."""
