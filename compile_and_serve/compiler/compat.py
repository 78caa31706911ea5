"""The private torch names that capture and the passes need, for every torch version that is supported (2.11 to 2.15).

Only this file, `compiler/inductor.py`, `compiler/built_kernels.py` and `custom_ops/compat.py` may use private torch names
(tests/test_private_torch.py).
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.utils._pytree import tree_leaves

from compile_and_serve.custom_ops.compat import OpOverload, OpOverloadPacket

__all__ = [
    "CAPTURED_CHECKS",
    "FakeTensorMode",
    "GraphBreakError",
    "LinearsOfRows",
    "OpOverload",
    "OpOverloadPacket",
    "capture_full_graph",
    "declared_writes",
    "fake_mode_with_symbols",
    "is_nested_op",
    "mark_symbolic",
    "node_source_line",
    "regions_are_reused",
    "rows_at_once",
    "sized_reads",
    "tree_leaves",
]

# Functions that Dynamo leaves in a captured graph and that compute nothing.
CAPTURED_CHECKS: tuple[Callable[..., Any], ...] = (torch._check, torch._C._log_api_usage_once)

_LIBRARY_FOLDERS = (f"{os.sep}torch{os.sep}", f"{os.sep}custom_ops{os.sep}")  # not part of a model's source

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def mark_symbolic(tensor: torch.Tensor, dim: int, length: str) -> None:
    """Make a dimension of a capture input symbolic. Dimensions with the same `length` are equal.

    The symbol is unbacked: `mark_dynamic` specializes 0 and 1, so a step of one token would be captured again.
    """
    from torch._dynamo.decorators import mark_unbacked

    mark_unbacked(tensor, dim, shape_id=length)


def regions_are_reused() -> bool:
    """Whether Dynamo traces a nested region once and reuses its graph for further calls. torch 2.11 traces every call."""
    return "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters


class GraphBreakError(RuntimeError):
    """Dynamo could not trace a module into one graph. The message is Dynamo's reason."""


class _CaptureComplete(BaseException):
    """Ends a capture once the graph is there: guards and bytecode are not needed.

    Not an `Exception`: torch 2.15 empties the graph of a capture that an `Exception` ends.
    """


def capture_full_graph(module: torch.nn.Module, backend: Backend, arguments: Mapping[str, Any], *, with_bytecode: bool) -> list[CodeType]:
    """Trace `module(**arguments)` into one graph and pass it to `backend`. Raises `GraphBreakError` if that is not possible.

    → the bytecode that Dynamo generates for `forward`, for dumps; empty without `with_bytecode`. It is never run.
    """
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.exc import TorchDynamoException

    def take(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        result = backend(gm, examples)
        if not with_bytecode:
            raise _CaptureComplete
        return result

    bytecode: list[CodeType] = []
    torch._dynamo.reset()
    handle = register_bytecode_hook(lambda original, transformed: bytecode.append(transformed))
    try:
        with torch.no_grad():
            torch.compile(module, backend=take, fullgraph=True)(**arguments)
    except _CaptureComplete:
        pass
    except TorchDynamoException as error:
        raise GraphBreakError(_reason_of(error)) from error
    finally:
        handle.remove()
    torch._dynamo.reset()
    return bytecode


def _reason_of(error: Exception) -> str:
    """The first line of Dynamo's text, and the last line of the model's code that it was tracing."""
    text = str(error)
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    lines = [line for line in lines if _LIBRARY_FOLDERS[0] not in line[0]] or lines
    where = f" ({Path(lines[-1][0]).name}:{lines[-1][1]}, in {lines[-1][2]})" if lines else ""
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__) + where


def fake_mode_with_symbols(groups: Sequence[str], upper: dict[str, int]) -> tuple[FakeTensorMode, dict[str, torch.SymInt]]:
    """A fake mode, and an unbacked symbol in [1, upper[group]] for each group of equal lengths."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, _constrain_range_for_size

    shape_env = ShapeEnv()
    symbols = {}
    for group in groups:
        with shape_env.ignore_fresh_unbacked_symbols():  # the symbols are inputs of the graph, not results of its ops
            symbol = shape_env.create_unbacked_symint()
        _constrain_range_for_size(symbol)  # comparisons of strides assume that the length is more than 1
        torch._check(symbol >= 1)
        torch._check(symbol <= upper[group])
        symbols[group] = symbol
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False), symbols


@contextmanager
def sized_reads() -> Iterator[None]:
    """In the block, Inductor counts the bytes of values whose length is an unbacked symbol, at the length that it chooses tiles for.

    Otherwise it takes them to be empty. It fuses a reduction with other work only to save bytes: a LayerNorm would be three kernels.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    sizes: dict[Any, int] = {}
    sized = GraphLowering.get_dep_size_hint

    def with_symbols(graph: GraphLowering, dep: Any, *options: Any) -> int:
        if (size := sized(graph, dep, *options)) > 0:
            return size
        if dep not in sizes:
            try:
                is_symbolic, numel = dep.has_unbacked_symbols(), dep.get_numel()
                length = config.unbacked_symint_fallback
                count = graph.sizevars.optimization_hint(numel, fallback=length) if is_symbolic else 0
                sizes[dep] = count * graph.get_dtype(dep.name).itemsize
            except (KeyError, NotImplementedError):  # of a value that is no tensor
                sizes[dep] = 0
        return sizes[dep]

    GraphLowering.get_dep_size_hint = with_symbols
    try:
        yield
    finally:
        GraphLowering.get_dep_size_hint = sized


@contextmanager
def rows_at_once(max_values: int = 2048) -> Iterator[None]:
    """In the block, Inductor's programs hold a whole row of up to `max_values` values when they reduce it.

    Otherwise they hold 1024. A LayerNorm of Whisper's 1280 would read its rows twice, and compute their moments by divisions.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    chosen = InductorChoices.should_use_persistent_reduction

    def with_longer_rows(features: Any, cooperative_reduction: bool) -> bool:
        size = features.reduction_numel
        if not cooperative_reduction and features.get_reduction_hint() == ReductionHint.INNER and size.is_number and size <= max_values:
            return True
        return chosen(features, cooperative_reduction)

    InductorChoices.should_use_persistent_reduction = staticmethod(with_longer_rows)
    try:
        yield
    finally:
        InductorChoices.should_use_persistent_reduction = staticmethod(chosen)


class LinearsOfRows(Interpreter):
    """Runs a piece so that its linears multiply matrices.

    torch 2.11 cannot trace a linear without a bias whose input has more dimensions, of which the first is symbolic: it asks for the number
    of its elements.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.nn.functional.linear and args[0].dim() > 2:
            x, *further = args
            return torch.nn.functional.linear(x.flatten(0, -2), *further, **kwargs).unflatten(0, x.shape[:-1])
        return super().call_function(target, args, kwargs)


UNKNOWN_SOURCE = "unknown source"


def node_source_line(node: torch.fx.Node) -> str:
    """`file:line in function` of the line in the model that the node comes from; "unknown source" if it comes from a pass."""
    trace = node.meta.get("stack_trace") or node.stack_trace
    if not trace:
        return UNKNOWN_SOURCE
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    frames = [frame for frame in frames if not any(folder in frame for folder in _LIBRARY_FOLDERS)] or frames
    return frames[-1].removeprefix("File ").replace('"', "").replace(", line ", ":") if frames else UNKNOWN_SOURCE


def declared_writes(node: torch.fx.Node) -> list[Any] | None:
    """The arguments that a custom op declares that it mutates; an empty list for an op of ours. None if `node` calls no custom op."""
    target = node.target
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        target = next((overload for overload in overloads if overload._schema.is_mutable), overloads[0])
    if not isinstance(target, OpOverload) or target.namespace == "aten":
        return None
    if target.namespace == "cas":
        return []
    written = [(i, a.name) for i, a in enumerate(target._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in written]


def is_nested_op(target: object) -> bool:
    """Whether the target calls a nested graph. Such a call never returns a view of its inputs."""
    return isinstance(target, HigherOrderOperator)
