"""The protocol of a graph pass, its result, and the graph edits that passes share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from compile_and_serve.compiler.capture.capture import example_state
from compile_and_serve.compiler.compat import FakeTensorMode, node_source_line
from compile_and_serve.compiler.rewrite.fusion_choice import FusionChoice, FusionTuner
from compile_and_serve.compiler.weights.transforms import WeightTable, evaluate_spec, expression_spec
from compile_and_serve.custom_ops.library import OpKind, op_info
from compile_and_serve.custom_ops.mesh import SINGLE_RANK, AlongAxis, ColwiseParts, Mesh
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import StepInput
from compile_and_serve.custom_ops.weight_functions import Expression, TensorSpec

if TYPE_CHECKING:
    from compile_and_serve.compiler.model import ModelSource


class PassError(ValueError):
    """The requested compilation is not possible; the message says what to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipReason:
    """Why a pass does not run in this compilation."""

    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NearMiss:
    """A node that looked like a site of the pass, and why the pass did not rewrite it."""

    node: str
    source: str
    reason: str

    @classmethod
    def at(cls, node: Node, reason: str) -> NearMiss:
        return cls(node=node.name, source=node_source_line(node), reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What a pass did: the number of rewritten sites, and the near misses, which it expected to rewrite.

    left_to_inductor: sites that it could have rewritten, but for which Inductor's code was measured to be faster.
    measured: one sentence for each measured shape. remarks: sentences for the log, such as what a checkpoint asks for and does not get.
    """

    matched: int
    near_misses: tuple[NearMiss, ...] = ()
    left_to_inductor: tuple[NearMiss, ...] = ()
    measured: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def expected(self) -> int:
        return self.matched + len(self.near_misses)


# Among PassContext.kernels: the kernels also take float32 weights of RMSNorms in a model of another dtype.
FLOAT32_NORM_WEIGHT = "float32_norm_weight"
GELU_LINEAR = "gelu_linear"  # likewise: linears that multiply by GELU in their kernels
NORM_ADDS = "norm_adds"  # likewise: a residual costs a LayerNorm's kernel less than the linear before it


@dataclass(kw_only=True, slots=True)
class PassContext:
    """What a pass knows besides the graph, and the edits that it can make.

    device, dtype: of the finished model (while passes run, the graph's tensors are fakes on the meta device).
    kernels: names of the `cas` ops with a kernel for this device and dtype, `FLOAT32_NORM_WEIGHT`, `GELU_LINEAR` and `NORM_ADDS`.
    tuner: measures whether a fusion is faster; None: every fusion is made.
    mesh: the ranks that hold the model. tp_plan: the model's plan, glob over module names → style, along the tensor axis or another.
    declared: the declaration of each tensor of a step that `argument` can read: of the model, and what passes add.
    """

    device: torch.device
    dtype: torch.dtype
    weights: WeightTable
    fake_mode: FakeTensorMode
    kernels: frozenset[str] = frozenset()
    tuner: FusionTuner | None = None
    mesh: Mesh = SINGLE_RANK
    tp_plan: Mapping[str, str | AlongAxis | ColwiseParts] = field(default_factory=dict)
    declared: Mapping[str, StepInput | StateGroup] = field(default_factory=dict)
    _weight_nodes: dict[str, Node] = field(default_factory=dict)
    _values: dict[Any, Any] = field(default_factory=dict)  # results of calls on equal shapes, because layers repeat

    def call(self, gm: GraphModule, target: Callable[..., Any], *args: Any, origin: Node, kwargs: Mapping[str, Any] | None = None) -> Node:
        """Insert `target(*args)` at the graph's insertion point, with its computed shape and dtype and the source line of `origin`.

        Raises what the op raises for these shapes; then nothing is inserted.
        """
        node = gm.graph.call_function(target, args, dict(kwargs or {}))
        node.stack_trace = origin.stack_trace
        node.meta["stack_trace"] = origin.meta.get("stack_trace")
        key = _call_signature(node)
        if key in self._values:
            node.meta["example_value"] = self._values[key]
            return node
        try:
            set_example_value(node, self.fake_mode)
        except Exception:
            gm.graph.erase_node(node)
            raise
        self._values[key] = node.meta["example_value"]
        return node

    def choose(
        self, pass_name: str, ours: Callable[..., Any], plain: Callable[..., Any], tensors: Sequence[torch.Tensor], *constants: float
    ) -> FusionChoice:
        """Whether our op replaces plain ones on tensors of these shapes (`FusionTuner.choose`)."""
        if self.tuner is None:
            return FusionChoice(use_ours=True)
        return self.tuner.choose(pass_name, ours, plain, tensors, *constants)

    def derived_weight(self, gm: GraphModule, target: str, function: str, weight: Node, *others: Node | int) -> Node:
        """The placeholder of the weight `target` = function(weight, *others). Later calls with the same target return the same one.

        An integer among `others` is a constant of the expression.
        """
        if target in self._weight_nodes:
            return self._weight_nodes[target]
        arguments = [a if isinstance(a, int) else a.meta["weight"] for a in (weight, *others)]
        spec = self._spec(function, arguments)
        self.weights.derive(target, function, *arguments, spec=spec)
        return self._weight_node(gm, target, spec, weight)

    def defined_weight(self, gm: GraphModule, target: str, expression: Expression, *, near: Node) -> Node:
        """The placeholder of the weight `target`, an expression over the checkpoint's tensors. A new one is inserted at `near`."""
        if target in self._weight_nodes:
            return self._weight_nodes[target]
        spec = expression_spec(expression, self.weights.sources, self.device)
        self.weights.define(target, expression, spec=spec)
        return self._weight_node(gm, target, spec, near)

    def _weight_node(self, gm: GraphModule, target: str, spec: TensorSpec, near: Node) -> Node:
        with gm.graph.inserting_before(near), self.fake_mode:
            node = gm.graph.placeholder("weight_" + re.sub(r"\W", "_", target))
            node.meta["weight"] = target
            node.meta["example_value"] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self._weight_nodes[target] = node
        return node

    def argument(self, gm: GraphModule, name: str) -> Node:
        """The placeholder of a step's input, or of a tensor of its state such as "states.3" (`StateGroup.tensor_names`).

        It is inserted before the first node where the graph does not read it yet. Passes that add state come after
        `tensor_parallel`: the tensor has the rank's share of the group.
        """
        nodes = {n.meta["input"]: n for n in gm.graph.find_nodes(op="placeholder") if "declaration" in n.meta}
        if name in nodes:
            return nodes[name]
        declared = self.declared.get(name)
        if declared is None:
            raise PassError(f"A step has no {name!r}: a pass that reads it returns its declaration from `adds`.")
        if isinstance(declared, StepInput):
            shape = tuple(_length(nodes.values(), dim) if isinstance(dim, str) else dim for dim in declared.dims)
            dtype = declared.dtype
        else:
            example = example_state(declared.of_rank(self.mesh), self.dtype)[name]
            shape, dtype = tuple(example.shape), example.dtype
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))), self.fake_mode:
            node = gm.graph.placeholder(re.sub(r"\W", "_", name))
            node.meta |= {"input": name, "declaration": declared}
            node.meta["example_value"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def replace_weight(self, weight: Node, function: str, *constants: int) -> None:
        """Replace a weight by function(weight, *constants), under the same name and placeholder.

        The caller recomputes the nodes that read it (`set_example_value`).
        """
        name = weight.meta["weight"]
        spec = self._spec(function, [name, *constants])
        self.weights.replace(name, function, *constants, spec=spec)
        with self.fake_mode:
            weight.meta["example_value"] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def _spec(self, function: str, arguments: Sequence[str | int]) -> TensorSpec:
        specs = tuple(a if isinstance(a, int) else self.weights[a].spec for a in arguments)
        return evaluate_spec(function, specs, self.device)

    def fork(self, gm: GraphModule) -> tuple[GraphModule, PassContext]:
        """A copy of the graph, and a context for it: passes over one do not change the other."""
        copy, weight_nodes = self._copied(gm)
        forked = replace(self, weights=self.weights.copy(), _weight_nodes=weight_nodes)
        return GraphModule(gm, copy), forked

    def of_other(self, weights: WeightTable, fake_mode: FakeTensorMode) -> PassContext:
        """A context for passes over another graph that was captured of the same model."""
        return replace(self, weights=weights, fake_mode=fake_mode, _weight_nodes={}, _values={})

    def _copied(self, gm: GraphModule) -> tuple[Graph, dict[str, Node]]:
        copy, copies = Graph(), dict[Node, Node]()
        copy.output(copy.graph_copy(gm.graph, copies))
        output, copied_output = (next(iter(reversed(graph.nodes))) for graph in (gm.graph, copy))
        copied_output.meta.update(output.meta)
        return copy, {target: copies[node] for target, node in self._weight_nodes.items()}

    def checkpoint(self, gm: GraphModule) -> Callable[[], None]:
        """A function that restores the graph and the weights to their current state."""
        copy, weight_nodes = self._copied(gm)
        undo_weights = self.weights.checkpoint()

        def undo() -> None:
            gm.graph = copy
            self._weight_nodes = weight_nodes
            undo_weights()

        return undo


class GraphPass(Protocol):
    """A rewrite of the whole graph, in place."""

    name: str
    version: int
    required: bool  # if its guard lets it run, it cannot be disabled
    for_optional: bool  # only for steps that use an optional input: other steps run a plan that is made without it

    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        """Inputs and state of a step that the pass may read with `ctx.argument`, besides the model's own."""
        ...

    def guard(self, ctx: PassContext) -> SkipReason | None:
        """Why this pass does not run in this compilation; None: it runs."""
        ...

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        """Rewrite `gm`. A second run must match nothing."""
        ...

    def cache_key(self) -> str:
        """Everything that the result depends on besides the graph and the context; part of artifact keys."""
        ...


class BasePass:
    """Defaults: the pass always runs, and its cache key is its name and version.

    after: for a user's pass, the name of the pass before it; None: it comes last.
    """

    name: str
    version: int = 1
    after: str | None = None
    required: bool = False
    for_optional: bool = False

    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        return ()

    def guard(self, ctx: PassContext) -> SkipReason | None:
        return None

    def cache_key(self) -> str:
        return f"{self.name}@{self.version}"


def set_example_value(node: Node, fake_mode: FakeTensorMode) -> None:
    """Compute and set a node's `example_value`."""
    node.meta["example_value"] = example_value(node, fake_mode)


def example_value(node: Node, fake_mode: FakeTensorMode) -> Any:
    """The result of a call on its arguments' example values: a fake tensor, a tuple of them, or a number."""
    args: Any = map_arg(node.args, tensor_of)
    kwargs: Any = map_arg(node.kwargs, tensor_of)
    function = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
    with fake_mode, torch.no_grad():
        return function(*args, **kwargs)


def _length(placeholders: Iterable[Node], name: str) -> Any:
    """A symbolic length, "tokens" or "rows", as the graph's inputs have it."""
    for node in placeholders:
        declared = node.meta["declaration"]
        if isinstance(declared, StepInput) and declared.length == name and declared.symbolic_dim is not None:
            return tensor_of(node).shape[declared.symbolic_dim]
    raise PassError(f"The graph has no input of {name!r}, so no input of that length can be added.")


def _call_signature(node: Node) -> Any:
    """Equal for calls whose results have equal shapes and dtypes."""

    def described(value: Any) -> Any:
        if isinstance(value, Node):
            value = value.meta["example_value"]
        if isinstance(value, torch.Tensor):
            return str(tuple(value.shape)), str(value.stride()), value.dtype, value.device
        if isinstance(value, list | tuple):
            return tuple(described(item) for item in value)
        return type(value).__name__, str(value)

    return node.target, described(node.args), described(tuple(node.kwargs.items()))


def weight_of(node: object) -> str | None:
    """Name of a placeholder's weight; None for any other node."""
    return node.meta.get("weight") if isinstance(node, Node) and node.op == "placeholder" else None


def tensor_of(node: Any) -> torch.Tensor:
    """The fake tensor of a node's value: shape, dtype and strides, no data."""
    return node.meta["example_value"]


def arguments(node: Node) -> tuple[Any, ...]:
    """Positional arguments, then keyword arguments in their order."""
    return (*node.args, *node.kwargs.values())


def op_arguments(node: Node) -> dict[str, Any]:
    """The arguments of an op of ours by their names in its schema, in its order, with defaults; empty for any other node."""
    info = op_info(node.target)
    return {} if info is None else {**info.arguments, **dict(zip(info.arguments, node.args, strict=False)), **node.kwargs}


def is_split_point(node: object) -> bool:
    info = op_info(node.target) if isinstance(node, Node) else None
    return info is not None and info.kind is OpKind.SPLIT_POINT


def is_call(node: object, *targets: Callable[..., Any]) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def norm_weight_fits(weight: Node, x: Node, ctx: PassContext) -> bool:
    """Whether our kernels take this weight for an RMSNorm of x."""
    dtype = tensor_of(weight).dtype
    return dtype == tensor_of(x).dtype or (dtype == torch.float32 and FLOAT32_NORM_WEIGHT in ctx.kernels)


def only_user(node: Node) -> Node | None:
    """The only node that reads `node`; None if there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None
