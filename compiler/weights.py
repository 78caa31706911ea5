"""`WeightTransform`: the only way that a weight of a compiled model differs from the checkpoint.

A transform is data, not a closure, so that an artifact can carry it: a small expression over checkpoint tensors whose
functions are looked up by name (`weight_function`). `merge_linears` makes `cat(q, k, v)`, `fuse_linears` wraps it into
`pack_linear_weight(cat(q, k, v))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from compiler.compat import FakeTensorMode

Expression = str | tuple[Any, ...]  # a source's name, or (function name, *expressions)

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}


def weight_function(name: str) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Register a function of tensors under a name that expressions and artifacts use; change the name when its result changes."""

    def register(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        assert name not in _FUNCTIONS, f"weight function {name} is registered twice"
        _FUNCTIONS[name] = fn
        return fn

    return register


@weight_function("cat")
def _cat(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype that a tensor must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTransform:
    """target = expression(sources), evaluated once while weights stream in.

    expression: over parameter names of the plain module (what a checkpoint holds).
    target: name of the compiled model's parameter. spec: what the expression gives.
    A source may feed several transforms; a parameter that the compiled model uses as it is has the transform `name = name`.
    """

    expression: Expression
    target: str
    spec: TensorSpec

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors that it needs, in order of first use."""
        return tuple(dict.fromkeys(_names(self.expression)))

    def fn(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The target's value from its sources' values, given in the order of `sources`."""
        return _evaluate(self.expression, dict(zip(self.sources, tensors, strict=True)))


def _names(expression: Expression) -> Sequence[str]:
    if isinstance(expression, str):
        return [expression]
    return [name for argument in expression[1:] for name in _names(argument)]


def _evaluate(expression: Expression, values: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(expression, str):
        return values[expression]
    function, *arguments = expression
    return _FUNCTIONS[function](*(_evaluate(argument, values) for argument in arguments))


@cache
def evaluate_spec(function: str, arguments: tuple[TensorSpec, ...], device: torch.device) -> TensorSpec:
    """Spec of a weight function's result on `device`; nothing is allocated."""
    with FakeTensorMode():
        out = _FUNCTIONS[function](*(torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in arguments))
    return TensorSpec(shape=tuple(out.shape), dtype=out.dtype)


class WeightTable:
    """The weights of a graph while passes rewrite it: name → how it comes from the checkpoint, and its spec."""

    def __init__(self, sources: dict[str, TensorSpec]) -> None:
        self.sources = dict(sources)
        self._transforms = {
            name: WeightTransform(expression=name, target=name, spec=spec) for name, spec in sources.items()
        }

    def __getitem__(self, name: str) -> WeightTransform:
        return self._transforms[name]

    def derive(self, target: str, function: str, *weights: str, spec: TensorSpec) -> None:
        """Define weight `target` = function(*weights); the arguments may themselves be derived."""
        assert function in _FUNCTIONS, f"unknown weight function {function}"
        expression = (function, *(self._transforms[name].expression for name in weights))
        known = self._transforms.get(target)
        assert known is None or known.expression == expression, f"weight {target} is defined twice, differently"
        self._transforms[target] = WeightTransform(expression=expression, target=target, spec=spec)

    def checkpoint(self) -> Callable[[], None]:
        """What forgets every weight that is derived after this call."""
        transforms = dict(self._transforms)

        def undo() -> None:
            self._transforms = dict(transforms)

        return undo

    def keep(self, names: Sequence[str]) -> tuple[WeightTransform, ...]:
        """Transforms of the weights that the finished graph uses."""
        return tuple(self._transforms[name] for name in names)
