"""The exception of weight loading."""

from __future__ import annotations


class WeightError(ValueError):
    """A model cannot be found or read. The message is one sentence: what is wrong, what was expected, what to do."""
