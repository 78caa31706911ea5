"""`WeightTransform`: the only way that a weight of a compiled model differs from the checkpoint.

A transform is data, not a closure, so that an artifact can carry it: a small expression over checkpoint tensors whose
functions are looked up by name (`weight_function`). `merge_linears` makes `cat(q, k, v)`, `fuse_linears` wraps it into
`pack_linear_weight(cat(q, k, v))`; `tensor_parallel` makes `shard_rows(q, 2, 2)`, which differs from rank to rank while the
expression does not: a function may ask for the rank (`by_rank`), which is told where weights are loaded. How an expression is
quantized: `compiler/weights/quantized_expressions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch

from compile_and_serve.compiler.compat import FakeTensorMode

Expression = str | int | tuple[Any, ...]  # a source's name, a constant, or (function name, *expressions)

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}
_BY_RANK: set[str] = set()
_SELECTS: dict[str, int] = {}


def weight_function(
    name: str, *, by_rank: bool = False, selects: int | None = None
) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Register a function of tensors and integers under a name that expressions and artifacts use; change the name when its
    result changes.

    by_rank: it takes a keyword `rank` and selects what that rank needs of one tensor; `rank` changes neither shape nor dtype.
    selects: the one dimension along which it joins tensors or takes slices out of one, in the same way whatever the other sizes
        are; it computes nothing then, so that the scales of a quantized weight can follow it.
    """

    def register(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        assert name not in _FUNCTIONS, f"weight function {name} is registered twice"
        _FUNCTIONS[name] = fn
        if by_rank:
            _BY_RANK.add(name)
        if selects is not None:
            _SELECTS[name] = selects
        return fn

    return register


def selected_dimension(function: str) -> int | None:
    """Dimension along which a weight function only joins or takes out slices; None for one that computes."""
    return _SELECTS.get(function)


@weight_function("cat", selects=0)
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
        return tuple(dict.fromkeys(source_of(part) for part in self.inputs))

    @property
    def inputs(self) -> tuple[Expression, ...]:
        """What it needs of the sources, in order of first use: a whole one (its name) or what a rank selects of it."""
        return tuple(dict.fromkeys(_inputs(self.expression)))

    def fn(self, *tensors: torch.Tensor, rank: int = 0) -> torch.Tensor:
        """The target's value on a rank from its sources' values, given in the order of `sources`."""
        return self.evaluate(dict(zip(self.sources, tensors, strict=True)), rank=rank)

    def evaluate(self, values: Mapping[Expression, torch.Tensor], *, rank: int = 0) -> torch.Tensor:
        """The target's value on a rank from the values of its `inputs`, or of its `sources`, whichever are given."""
        return _evaluate(self.expression, values, rank)


def source_of(part: Expression) -> str:
    """The source of which one of `WeightTransform.inputs` takes something, or all."""
    name = part[1] if isinstance(part, tuple) else part
    assert isinstance(name, str)
    return name


def select(part: Expression, source: torch.Tensor, *, rank: int) -> torch.Tensor:
    """What one of `WeightTransform.inputs` is of its source: the tensor itself, or (a view of) what the rank needs of it."""
    return _evaluate(part, {source_of(part): source}, rank)


def depends_on_rank(expression: Expression) -> bool:
    """Whether an expression's value differs from rank to rank."""
    if not isinstance(expression, tuple):
        return False
    return expression[0] in _BY_RANK or any(depends_on_rank(argument) for argument in expression[1:])


def is_selection(expression: Expression) -> TypeGuard[tuple[Any, ...]]:
    """What a rank selects of one source."""
    return isinstance(expression, tuple) and expression[0] in _BY_RANK and isinstance(expression[1], str)


def _inputs(expression: Expression) -> Sequence[Expression]:
    if isinstance(expression, int):
        return []
    if isinstance(expression, str) or is_selection(expression):
        return [expression]
    return [part for argument in expression[1:] for part in _inputs(argument)]


def _evaluate(expression: Expression, values: Mapping[Expression, torch.Tensor], rank: int) -> Any:
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str) or expression in values:
        return values[expression]
    function, *arguments = expression
    evaluated = [_evaluate(argument, values, rank) for argument in arguments]
    return _FUNCTIONS[function](*evaluated, **({"rank": rank} if function in _BY_RANK else {}))


@cache
def evaluate_spec(function: str, arguments: tuple[TensorSpec | int, ...], device: torch.device) -> TensorSpec:
    """Spec of a weight function's result on `device`; nothing is allocated."""
    with FakeTensorMode():
        values = [
            argument if isinstance(argument, int) else torch.empty(argument.shape, dtype=argument.dtype, device=device)
            for argument in arguments
        ]
        out = _FUNCTIONS[function](*values, **({"rank": 0} if function in _BY_RANK else {}))
    return TensorSpec(shape=tuple(out.shape), dtype=out.dtype)


def expression_spec(expression: Expression, sources: Mapping[str, TensorSpec], device: torch.device) -> TensorSpec:
    """Spec of an expression's value on `device`; nothing is allocated."""
    if isinstance(expression, str):
        return sources[expression]
    assert not isinstance(expression, int), "a constant has no spec"
    function, *arguments = expression
    specs = tuple(a if isinstance(a, int) else expression_spec(a, sources, device) for a in arguments)
    return evaluate_spec(function, specs, device)


class WeightTable:
    """The weights of a graph while passes rewrite it: name → how it comes from the checkpoint, and its spec.

    specs: of the parameters, by name. sources: of the checkpoint's tensors, and expressions: over them, where a parameter is not
    a checkpoint's tensor as it is. aliases: further names of a parameter (an output head that is tied to the embedding).
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], *, sources: Mapping[str, TensorSpec] | None = None,
        expressions: Mapping[str, Expression] | None = None, aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.sources = dict(specs if sources is None else sources)
        self.scales = self.sources.keys() - specs.keys()  # what a checkpoint holds beside quantized parameters
        self.aliases = dict(aliases or {})
        expressions = expressions or {}
        self._transforms = {
            name: WeightTransform(expression=expressions.get(name, name), target=name, spec=spec)
            for name, spec in specs.items()
        }

    def __getitem__(self, name: str) -> WeightTransform:
        return self._transforms[name]

    def derive(self, target: str, function: str, *weights: str | int, spec: TensorSpec) -> None:
        """Define weight `target` = function(*weights); the arguments may themselves be derived, integers are constants."""
        self.define(target, self._call(function, weights), spec=spec)

    def define(self, target: str, expression: Expression, *, spec: TensorSpec) -> None:
        """Define weight `target` as an expression over the checkpoint's tensors."""
        known = self._transforms.get(target)
        assert known is None or known.expression == expression, f"weight {target} is defined twice, differently"
        self._transforms[target] = WeightTransform(expression=expression, target=target, spec=spec)

    def replace(self, target: str, function: str, *constants: int, spec: TensorSpec) -> None:
        """From now on weight `target` is function(what it was, *constants); what was derived from it before is not touched."""
        expression = self._call(function, (target, *constants))
        self._transforms[target] = WeightTransform(expression=expression, target=target, spec=spec)

    def _call(self, function: str, arguments: Sequence[str | int]) -> Expression:
        assert function in _FUNCTIONS, f"unknown weight function {function}"
        return (function, *(self._transforms[a].expression if isinstance(a, str) else a for a in arguments))

    def checkpoint(self) -> Callable[[], None]:
        """What forgets every change of a weight after this call."""
        transforms = dict(self._transforms)

        def undo() -> None:
            self._transforms = dict(transforms)

        return undo

    def keep(self, names: Sequence[str]) -> tuple[WeightTransform, ...]:
        """Transforms of the weights that the finished graph uses."""
        return tuple(self._transforms[name] for name in names)
