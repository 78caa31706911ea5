"""Whether a pass replaces plain ops by a fused op of ours, or leaves them to Inductor, which may fuse them itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

TOKENS = (1, 16, 256)  # both are timed at these numbers of tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionChoice:
    """ours, inductor: seconds of one call at each of `TOKENS`; empty where nothing was measured (forced, or no tuner).

    failure: why it could not be measured.
    """

    use_ours: bool
    ours: tuple[float, ...] = ()
    inductor: tuple[float, ...] = ()
    failure: str = ""

    def sentence(self) -> str:
        """The reason, for a report."""
        if self.failure:
            return f"it could not be measured ({self.failure}): left to Inductor"
        if not self.ours:
            return "fused without measuring"
        ratio = mean_ratio(self.ours, self.inductor)
        times = " and ".join("/".join(f"{1e6 * s:.1f}" for s in seconds) for seconds in (self.ours, self.inductor))
        measured = f"{times} µs at {'/'.join(map(str, TOKENS))} tokens"
        if self.use_ours:
            return f"measured {1 / ratio - 1:.0%} faster than Inductor's code ({measured})"
        how = f"{ratio - 1:.0%} slower" if ratio > 1 else f"only {1 / ratio - 1:.0%} faster"
        return f"measured {how} than Inductor's code ({measured}): left to Inductor"


class FusionTuner(Protocol):
    """Measures fused ops against Inductor's code (`compiler/artifacts/autotune.py`)."""

    def choose(
        self, pass_name: str, ours: Callable[..., Any], plain: Callable[..., Any], tensors: Sequence[torch.Tensor], *constants: float
    ) -> FusionChoice:
        """Which of two functions of (*tensors, *constants) is faster. Both return a tuple of tensors.

        tensors: fakes; a symbolic first dimension is the number of tokens, all others are fixed.
        """
        ...


def mean_ratio(left: Sequence[float], right: Sequence[float]) -> float:
    """Geometric mean of left / right."""
    return math.exp(sum(math.log(a / b) for a, b in zip(left, right, strict=True)) / len(left))
