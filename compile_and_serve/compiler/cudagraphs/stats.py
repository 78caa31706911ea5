"""Counts of captures and replays."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class GraphStats:
    """Since the start: replays by mode, steps that ran without a graph, and what capturing took."""

    replays: dict[str, int] = field(default_factory=lambda: {"full": 0, "piecewise": 0})
    plain_steps: int = 0
    captured: dict[str, int] = field(default_factory=lambda: {"full": 0, "piecewise": 0})
    capture_seconds: float = 0.0
    estimated_bytes: int = 0
    used_bytes: int = 0
