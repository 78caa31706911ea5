"""`WeightTransform`: the only way that a weight of a compiled model differs from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype that a tensor must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTransform:
    """target = fn(*sources), run once while weights stream in.

    sources: parameter names of the plain module (what a checkpoint holds), in the order of fn's arguments.
    target: name of the compiled model's parameter. fn: tensors in, one tensor out; it may return its argument.
    spec: what fn returns.
    A source may feed several transforms; a parameter without a transform of its own is its own target.
    """

    sources: tuple[str, ...]
    target: str
    fn: Callable[..., torch.Tensor]
    spec: TensorSpec
