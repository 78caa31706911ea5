"""`WeightTransform`: how a weight of a compiled model is computed from the checkpoint.

A transform is data, so that artifacts can store it: an expression over checkpoint tensors, whose functions are registered by name
(`custom_ops/weight_functions.py`). For example, `merge_linears` creates `cat(q, k, v)`, and `fuse_linears` wraps it into
`pack_linear_weight(cat(q, k, v))`. `tensor_parallel` creates `shard_rows(q, 2, 2)`: the expression is the same on all ranks, and a
function that is registered with an axis receives the rank along it when the weights are loaded.
Quantized weights: `compiler/weights/quantized_expressions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch

from compile_and_serve.compiler.compat import FakeTensorMode
from compile_and_serve.custom_ops.mesh import ORIGIN, Coordinates
from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.custom_ops.weight_functions import WEIGHT_FUNCTIONS, Constant, Expression, TensorSpec, Text, weight_function


@weight_function("cat", selects="rows")
def _cat(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTransform:
    """target = expression(sources), evaluated once while the weights are loaded.

    expression: over the names of the checkpoint's tensors. target: name of the compiled model's weight. spec: of the target.
    Several transforms may use the same source. The transform of an unchanged parameter is `name = name`.
    """

    expression: Expression
    target: str
    spec: TensorSpec

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the checkpoint's tensors that the expression uses, in order of first use."""
        return tuple(dict.fromkeys(source_of(part) for part in self.inputs))

    @property
    def inputs(self) -> tuple[Expression, ...]:
        """The inputs of the expression, in order of first use: a whole source (its name), or a rank's selection from one."""
        return tuple(dict.fromkeys(_inputs(self.expression)))

    def fn(self, *tensors: torch.Tensor, coordinates: Coordinates = ORIGIN) -> torch.Tensor:
        """The target's value on a rank, from the values of `sources` in their order."""
        return self.evaluate(dict(zip(self.sources, tensors, strict=True)), coordinates=coordinates)

    def evaluate(self, values: Mapping[Expression, torch.Tensor], *, coordinates: Coordinates = ORIGIN) -> torch.Tensor:
        """The target's value on a rank, from the values of its `inputs` or of its `sources`."""
        return _evaluate(self.expression, values, coordinates)


def source_of(part: Expression) -> str:
    """The source of one of `WeightTransform.inputs`."""
    name = part[1] if isinstance(part, tuple) else part
    assert isinstance(name, str)
    return name


def select(part: Expression, source: torch.Tensor, *, coordinates: Coordinates) -> torch.Tensor:
    """The value of one of `WeightTransform.inputs`: the source itself, or the part (or a view of it) that the rank needs."""
    return _evaluate(part, {source_of(part): source}, coordinates)


def evaluate(expression: Expression, values: Mapping[Expression, torch.Tensor], coordinates: Coordinates = ORIGIN) -> torch.Tensor:
    """An expression's value on a rank, from the values of its sources."""
    return _evaluate(expression, values, coordinates)


def depends_on_rank(expression: Expression) -> bool:
    """Whether an expression's value differs from rank to rank."""
    if not isinstance(expression, tuple):
        return False
    return _is_by_rank(expression[0]) or any(depends_on_rank(argument) for argument in expression[1:])


def is_selection(expression: Expression) -> TypeGuard[tuple[Any, ...]]:
    """Whether the expression is a rank's selection from one source."""
    return isinstance(expression, tuple) and _is_by_rank(expression[0]) and isinstance(expression[1], str)


def _is_by_rank(function: str) -> bool:
    return WEIGHT_FUNCTIONS[function].axis is not None


def _inputs(expression: Expression) -> Sequence[Expression]:
    if isinstance(expression, Constant):
        return []
    if isinstance(expression, str) or is_selection(expression):
        return [expression]
    return [part for argument in expression[1:] for part in _inputs(argument)]


def _evaluate(expression: Expression, values: Mapping[Expression, torch.Tensor], coordinates: Coordinates) -> Any:
    if isinstance(expression, Constant):
        return expression.text if isinstance(expression, Text) else expression
    if isinstance(expression, str) or expression in values:
        return values[expression]
    function, *arguments = expression
    return _call(function, [_evaluate(argument, values, coordinates) for argument in arguments], coordinates)


def _call(name: str, arguments: Sequence[Any], coordinates: Coordinates) -> torch.Tensor:
    function = WEIGHT_FUNCTIONS[name]
    return function.call(*arguments, **({} if function.axis is None else {"rank": coordinates.get(function.axis, 0)}))


@cache
def evaluate_spec(function: str, arguments: tuple[TensorSpec | Constant, ...], device: torch.device) -> TensorSpec:
    """The spec of a weight function's result on `device`. No memory is allocated."""
    with FakeTensorMode():
        values = [
            torch.empty(argument.shape, dtype=argument.dtype, device=device)
            if isinstance(argument, TensorSpec)
            else _evaluate(argument, {}, ORIGIN)
            for argument in arguments
        ]
        out = _call(function, values, ORIGIN)
    return TensorSpec(shape=tuple(out.shape), dtype=out.dtype)


def expression_spec(expression: Expression, sources: Mapping[str, TensorSpec], device: torch.device) -> TensorSpec:
    """The spec of an expression's value on `device`. No memory is allocated."""
    if isinstance(expression, str):
        return sources[expression]
    assert isinstance(expression, tuple), "a constant has no spec"
    function, *arguments = expression
    specs = tuple(a if isinstance(a, Constant) else expression_spec(a, sources, device) for a in arguments)
    return evaluate_spec(function, specs, device)


def checkpoint_specs(specs: Mapping[str, TensorSpec], stored: Mapping[str, StoredWeight]) -> dict[str, TensorSpec]:
    """The tensors that a checkpoint must hold: the parameters, and for those that it holds in another form their tensors."""
    sources = {name: spec for name, spec in specs.items() if name not in stored}
    return sources | {t.name: TensorSpec(shape=t.shape, dtype=t.dtype) for one in stored.values() for t in one.tensors}


class WeightTable:
    """The weights of a graph while passes rewrite it, each with its transform.

    specs: the parameters. stored: how the checkpoint holds those that it holds in another form. aliases: further names of a parameter,
    such as an output head tied to the embedding. sources: the checkpoint's tensors.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        *,
        stored: Mapping[str, StoredWeight] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.stored = {name: one for name, one in (stored or {}).items() if name in specs}
        self.sources = checkpoint_specs(specs, self.stored)
        self.aliases = dict(aliases or {})
        self.expressions: dict[str, Expression] = {name: one.plain(specs[name].dtype) for name, one in self.stored.items()}
        self._parameter_of = {expression: name for name, expression in self.expressions.items()}
        self._transforms = {
            name: WeightTransform(expression=self.expressions.get(name, name), target=name, spec=spec) for name, spec in specs.items()
        }

    def parameter_of(self, expression: Expression) -> str | None:
        """The parameter that an expression is; None if it is made of parameters."""
        return expression if isinstance(expression, str) else self._parameter_of.get(expression)

    def parameters(self, expression: Expression) -> list[str]:
        """The parameters that an expression is made of, in order."""
        parameter = self.parameter_of(expression)
        if parameter is not None or not isinstance(expression, tuple):
            return [] if parameter is None else [parameter]
        return [name for argument in expression[1:] for name in self.parameters(argument)]

    def __getitem__(self, name: str) -> WeightTransform:
        return self._transforms[name]

    def derive(self, target: str, function: str, *weights: str | int, spec: TensorSpec) -> None:
        """Define weight `target` = function(*weights). The weights may be derived themselves; integers are constants."""
        self.define(target, self._expression(function, weights), spec=spec)

    def define(self, target: str, expression: Expression, *, spec: TensorSpec) -> None:
        """Define weight `target` as an expression over the checkpoint's tensors."""
        known = self._transforms.get(target)
        assert known is None or known.expression == expression, f"weight {target} has two different definitions"
        self._transforms[target] = WeightTransform(expression=expression, target=target, spec=spec)

    def replace(self, target: str, function: str, *constants: int, spec: TensorSpec) -> None:
        """Redefine weight `target` as function(its present value, *constants). Weights that were derived from it do not change."""
        expression = self._expression(function, (target, *constants))
        self._transforms[target] = WeightTransform(expression=expression, target=target, spec=spec)

    def _expression(self, function: str, arguments: Sequence[str | int]) -> Expression:
        assert function in WEIGHT_FUNCTIONS, f"unknown weight function {function}"
        return (function, *(self._transforms[a].expression if isinstance(a, str) else a for a in arguments))

    def checkpoint(self) -> Callable[[], None]:
        """A function that restores the weights to their present state."""
        transforms = dict(self._transforms)

        def undo() -> None:
            self._transforms = dict(transforms)

        return undo

    def copy(self) -> WeightTable:
        """The same weights; defining more in one table does not change the other."""
        copied = copy(self)
        copied._transforms = dict(self._transforms)
        return copied

    def keep(self, names: Sequence[str]) -> tuple[WeightTransform, ...]:
        """The transforms of these weights."""
        return tuple(self._transforms[name] for name in names)
