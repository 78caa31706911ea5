"""Whether a packed linear also keeps the plain weight, so that steps of many tokens can run the library's product (oneDNN)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

SIZES = (32, 128, 512)  # both are timed at these numbers of tokens
# The library's product needs a second copy of the weight, whose memory the KV cache could have: a small gain is not worth it.
MIN_GAIN = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """A packed linear on the CPU, with what is fused into it. dtype: of x and of the weight [out_features, in_features]."""

    out_features: int
    in_features: int
    dtype: torch.dtype
    has_norm: bool = False
    has_bias: bool = False
    silu_mul: bool = False
    has_residual: bool = False

    @property
    def weight_bytes(self) -> int:
        """Of one copy of the weight."""
        return self.out_features * self.in_features * self.dtype.itemsize

    def __str__(self) -> str:
        options = (
            ("norm", self.has_norm),
            ("bias", self.has_bias),
            ("SiLU-mul", self.silu_mul),
            ("residual", self.has_residual),
        )
        fused = ", ".join(name for name, is_there in options if is_there)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} [{self.out_features}, {self.in_features}]" + (f" with {fused}" if fused else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryChoice:
    """ours, library: seconds of one call at each of `SIZES`; empty if it could not be measured: failure says why."""

    shape: LinearShape
    ours: tuple[float, ...] = ()
    library: tuple[float, ...] = ()
    failure: str = ""

    @property
    def min_tokens(self) -> int | None:
        """The least number of tokens for the library: the first of `SIZES` from which on it is `MIN_GAIN` times as fast. None: never."""
        found = None
        for size, ours, library in reversed(list(zip(SIZES, self.ours, self.library, strict=False))):
            if ours < MIN_GAIN * library:
                break
            found = size
        return found

    def sentence(self) -> str:
        """The outcome and its reason, for a report."""
        if not self.ours:
            return f"{self.shape}: our kernel at all sizes, because it could not be measured ({self.failure})"
        gains = "/".join(f"{ours / library:.2f}" for ours, library in zip(self.ours, self.library, strict=True))
        measured = f"oneDNN's product was measured {gains} times as fast at {'/'.join(map(str, SIZES))} tokens"
        copy = f"{self.shape.weight_bytes / 2**20:.1f} MiB for a second copy of each such weight"
        if self.min_tokens is None:
            return f"{self.shape}: our kernel at all sizes ({measured}; {MIN_GAIN} pays for {copy})"
        return f"{self.shape}: oneDNN's product from {self.min_tokens} tokens on ({measured}), which takes {copy}"


class LibraryTuner(Protocol):
    """Measures our packed linears against the library's (`compiler/artifacts/library_tuner.py`)."""

    def choose(self, shape: LinearShape) -> LibraryChoice | None:
        """From how many tokens on the library is worth a copy of the weight. None: the weight is too small to measure."""
        ...


def copies_sentence(shapes: Sequence[LinearShape]) -> str:
    """What the second copies of the weights take, one of `shapes` for each."""
    mib = sum(shape.weight_bytes for shape in shapes) / 2**20
    return f"second copies of {len(shapes)} weights take {mib:.1f} MiB"
