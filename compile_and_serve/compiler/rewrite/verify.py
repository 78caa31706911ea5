"""`--verify-passes`: run the graph before and after each pass on the same random inputs, in float64, and compare.

The graph that passes rewrite holds no data: weights are placeholders with a name, and a rewritten weight is an
expression over the checkpoint's (`compiler/weights/transforms.py`). The verifier invents the checkpoint (views into
one pool of random numbers, so that a deep model costs no more memory than its largest weight), evaluates the
expressions, and interprets the graph node by node with every floating dtype widened to float64. What remains of a
difference is the pass's, not rounding's. A graph that was sharded runs for all its ranks side by side, so that its
collectives need no other process.

A pass may round by design. What it does to a weight it says itself (`round_weight`), and the verifier then invents a
checkpoint of weights that this leaves as they are; activations are not rounded here (`OpInfo.exact`). All but the rounding
is compared as closely.

"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from compile_and_serve.compiler.compat import node_source_line
from compile_and_serve.compiler.rewrite.graph_pass import (
    GraphPass,
    PassContext,
    PassError,
    PassResult,
    SkipReason,
    is_split_point,
    op_arguments,
)
from compile_and_serve.compiler.weights.transforms import WeightTable
from compile_and_serve.compiler.weights.transforms import evaluate as evaluate_expression
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.library import op_info
from compile_and_serve.custom_ops.mesh import DATA, EXPERT, PIPE, SINGLE_RANK, TENSOR, Axis, Coordinates, Mesh
from compile_and_serve.custom_ops.quantization import LARGEST
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import EXAMPLE_PAGE_TOKENS
from compile_and_serve.custom_ops.step import Step, StepInput, running
from compile_and_serve.custom_ops.weight_functions import Expression

log = logging.getLogger(__name__)

Rounding = Callable[[torch.Tensor], torch.Tensor]

TOLERANCE = 1e-8  # relative, of float64 results that differ in the order of their sums alone
CACHED, NEW = (11, 0), (1, 6)  # tokens of the two sequences: one decodes behind a filled cache, one begins
LARGEST_POOL = 1 << 25  # random numbers; a larger weight has rows that overlap
MAX_TOKEN_ID = 32  # every vocabulary is larger
_STD = 0.05  # of random weights

_WIDENING_METHODS = frozenset({"float", "half", "bfloat16", "double"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteError:
    """Difference at one op that the graph is split at, or in the result. Errors are of float64 values."""

    node: str
    source: str
    max_error: float
    relative_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What the comparison of one pass gave.

    max_error: largest absolute difference; relative_error: that over the largest reference value, the worst site's.
    reason: why it failed, None if it did not. sites: each split op and the result, in order (none if the pass changed nothing).
    """

    tolerance: float
    max_error: float = 0.0
    relative_error: float = 0.0
    reason: str | None = None
    sites: tuple[SiteError, ...] = ()

    @property
    def passed(self) -> bool:
        return self.reason is None


@dataclass(slots=True)
class PassVerifier:
    """Runs passes one by one; one that changes what the graph computes is undone and named.

    buffers: values of the weights that are no checkpoint's (RoPE frequencies).
    """

    buffers: Mapping[str, torch.Tensor]
    seed: int = 0
    _before: _Outcome | None = None
    _rounding: Rounding | None = None

    def run(self, gm: GraphModule, graph_pass: GraphPass, ctx: PassContext) -> tuple[PassResult | SkipReason, Verification]:
        """Run a pass and compare; if it fails, `gm` and `ctx` are as before and the result says why it was left out."""
        tolerance = getattr(graph_pass, "tolerance", TOLERANCE)
        rounding: Rounding | None = getattr(graph_pass, "round_weight", None)
        if rounding is not None:
            self._before, self._rounding = None, rounding
        if self._before is None:
            self._before = self._evaluate(gm, ctx)
        text, undo = str(gm.graph), ctx.checkpoint(gm)
        result: PassResult | None = None
        try:
            result = graph_pass.run(gm, ctx)
            gm.graph.lint()
            if str(gm.graph) == text:
                return result, Verification(tolerance=tolerance)
            after = self._evaluate(gm, ctx)
            verification = compare(self._before, after, tolerance)
        except PassError:
            raise
        except Exception as error:
            what = "it raised" if result is None else "the graph that it left does not run:"
            reason = f"{what} {type(error).__name__}: {error}".splitlines()[0]
            log.debug("pass %s failed", graph_pass.name, exc_info=True)
            verification = Verification(tolerance=tolerance, reason=reason)
        if verification.passed:
            assert result is not None
            self._before = after
            return result, verification
        undo()
        log.error("pass %s failed its verification and is left out: %s", graph_pass.name, verification.reason)
        return SkipReason(sentence=f"failed its verification, {verification.reason}"), verification

    def _evaluate(self, gm: GraphModule, ctx: PassContext) -> _Outcome:
        weights = RandomWeights(ctx.weights, self.buffers, self.seed, self._rounding)
        return evaluate(gm, weights, self.seed, mesh=ctx.mesh)


@dataclass(slots=True)
class _Outcome:
    """Values that two runs are compared by: split ops' outputs, the results, the state as it was left."""

    sites: list[tuple[Node, torch.Tensor]] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class RandomWeights:
    """The values of a graph's weights: random checkpoint tensors, put through the transforms that passes recorded.

    rounding: is first applied to each matrix of the model.
    """

    def __init__(self, weights: WeightTable, buffers: Mapping[str, torch.Tensor], seed: int, rounding: Rounding | None = None) -> None:
        self._weights, self._buffers, self._rounding = weights, buffers, rounding
        self._examples = {tensor.name: tensor for one in weights.stored.values() if one.is_quantized for tensor in one.tensors}
        largest = max((_numel(spec.shape) for spec in weights.sources.values()), default=1)
        self._slack = 4099
        size = min(largest, LARGEST_POOL) + self._slack
        self._pool = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * _STD

    def value(self, name: str, coordinates: Coordinates) -> torch.Tensor:
        """The value of weight `name` on a rank, float64 where it is floating."""
        transform = self._weights[name]
        values: dict[Expression, torch.Tensor] = {source: self.source(source) for source in transform.sources}
        value = evaluate_expression(_with_float64(transform.expression), values, coordinates)
        return value if value.dtype in LARGEST else _widen(value)

    def source(self, name: str) -> torch.Tensor:
        """The invented checkpoint tensor `name`; the same in every run. Vectors (norms) lie around 1."""
        if name in self._buffers:
            return _widen(self._buffers[name].cpu())
        if name in self._examples:
            example = self._examples[name].example(_STD, torch.Generator().manual_seed(zlib.crc32(name.encode())))
            return example if example.dtype in LARGEST else _widen(example)
        spec = self._weights.sources[name]
        value = self._random(name, spec.shape)
        if len(spec.shape) == 1:
            return 1 + 4 * value
        return value if self._rounding is None or len(spec.shape) not in (2, 3) else self._rounded(name, value)

    def _rounded(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A checkpoint tensor whose parameter is rounded. The parameter may have the tensor's elements in another order."""
        assert self._rounding is not None
        expression = self._weights.expressions.get(name, name)
        if expression == name:
            return self._rounding(value)
        order = evaluate_expression(expression, {name: torch.arange(value.numel()).view(value.shape)})
        rounded = torch.empty(value.numel(), dtype=value.dtype)
        rounded[order.flatten()] = self._rounding(evaluate_expression(expression, {name: value})).flatten()
        return rounded.view(value.shape)

    def _random(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        offset = zlib.crc32(name.encode()) % self._slack
        if _numel(shape) <= LARGEST_POOL:
            return self._pool[offset : offset + _numel(shape)].view(shape)
        rows, columns = shape[0], _numel(shape[1:])
        stride = max(1, (len(self._pool) - offset - columns) // rows)
        return self._pool.as_strided((rows, columns), (stride, 1), offset).unflatten(1, shape[1:])


@dataclass(slots=True)
class _Rank:
    """One rank's values while the graph is interpreted; weights are made where they are first read."""

    coordinates: Coordinates
    inputs: dict[str, Any]
    weights: RandomWeights
    values: dict[Node, Any] = field(default_factory=dict)

    def value_of(self, node: Node) -> Any:
        if node not in self.values:
            weight = node.meta.get("weight")
            value = self.inputs[_input_name(node)] if weight is None else self.weights.value(weight, self.coordinates)
            self.values[node] = value
        return self.values[node]


def evaluate(gm: GraphModule, weights: RandomWeights, seed: int = 0, *, mesh: Mesh = SINGLE_RANK) -> _Outcome:
    """Interpret a whole-model graph in float64 on a step of two sequences, one behind filled state, one from its start.

    mesh: that a graph with collectives is made for. The ranks along the axes of its collectives run side by side, node by node. Split
    ops and state of all ranks are joined, as one rank would have them.
    """
    mesh = _mesh_of_collectives(gm, mesh)
    placeholders = {n.meta["input"]: n for n in gm.graph.find_nodes(op="placeholder") if "declaration" in n.meta}
    step = _random_step([node.meta["declaration"] for node in placeholders.values()], seed)
    inputs: dict[str, Any] = {name: _widen(tensor) for name, tensor in step.inputs.items()}
    for name, node in placeholders.items():
        declared = node.meta["declaration"]
        if isinstance(declared, StepInput) and declared.symbolic_dim is not None:
            length = node.meta["example_value"].shape[declared.symbolic_dim]
            inputs[str(length)] = step.inputs[name].shape[declared.symbolic_dim]
    local = {name: placeholders[name].meta["example_value"].shape for name in step.state if name in placeholders}
    in_parts = {name: placeholders[name].meta["shares"] for name in local if "shares" in placeholders[name].meta}
    ranks = []
    for coordinates in map(mesh.coordinates, range(mesh.size)):
        state = {}
        for name, shape in local.items():
            if name in in_parts:
                function, constants = in_parts[name]
                state[name] = evaluate_expression((function, name, *constants), {name: step.state[name]}, coordinates)
            else:
                state[name] = _share(step.state[name], shape, coordinates[TENSOR], mesh.tensor).clone()
        ranks.append(_Rank(coordinates=coordinates, weights=weights, inputs=inputs | state))
    sharing = [ranks[member] for member in mesh.groups(TENSOR)[0]]  # the others repeat what these have
    orders = key_orders(gm)
    for rank in ranks:
        for name, order in orders.items():
            _reorder_keys(rank.inputs[name], order)
    outcome = _Outcome()
    last_user = {user_input: node for node in gm.graph.nodes for user_input in node.all_input_nodes}
    with running(step.metadata), torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                for result in node.args[0]:
                    of_ranks = [rank.value_of(result) for rank in ranks]
                    assert all(one.equal(of_ranks[0]) for one in of_ranks), "the ranks come to different results"
                    outcome.results.append(of_ranks[0])
                continue
            if across_ranks := _collective(node):
                wholes: list[Any] = [None] * len(ranks)
                for members in mesh.groups(_axis_of(node)):
                    parts = [ranks[member].value_of(node.all_input_nodes[0]) for member in members]
                    others = [ranks[members[0]].value_of(a) if isinstance(a, Node) else a for a in node.args[1:]]
                    whole = across_ranks(parts, *others)
                    for member in members:
                        wholes[member] = whole
            else:
                wholes = [_call(node, rank.value_of) for rank in ranks]
            for rank, value in zip(ranks, wholes, strict=True):
                rank.values[node] = value
            if is_split_point(node):
                outcome.sites.append((node, _joined(node, sharing)))
            for read in node.all_input_nodes:
                if last_user[read] is node:
                    for rank in ranks:
                        rank.values.pop(read, None)
    for rank in ranks:
        for name, order in orders.items():
            _reorder_keys(rank.inputs[name], [order.index(i) for i in range(len(order))])
    for name, shape in local.items():
        if name in in_parts:  # columns, which no step changes
            outcome.state[name] = step.state[name]
            continue
        dim = _sharded_dim(step.state[name], shape)
        if dim is None:
            outcome.state[name] = _with_changes(step.state[name], [rank.inputs[name] for rank in ranks])
            continue
        alike = max(1, mesh.tensor // step.state[name].shape[dim])  # ranks that keep the same share
        outcome.state[name] = torch.cat([rank.inputs[name] for rank in sharing[::alike]], dim=dim)
    return outcome


def key_orders(gm: GraphModule) -> dict[str, list[int]]:
    """KV caches whose keys a pass keeps in another order of dimensions, which it leaves in the attention's meta["key_order"]."""
    orders: dict[str, list[int]] = {}
    for node in gm.graph.nodes:
        if "key_order" in node.meta:
            orders |= {
                read.meta["input"]: node.meta["key_order"]
                for read in node.all_input_nodes
                if isinstance(read.meta.get("declaration"), StateGroup)
            }
    return orders


def _reorder_keys(cache: torch.Tensor, order: list[int]) -> None:
    """cache: [N, 2, K, P, E], keys at [:, 0]."""
    cache[:, 0] = cache[:, 0][..., order]


def _random_step(declarations: Sequence[StepInput | StateGroup], seed: int) -> Step:
    """A step of the two sequences with random tokens and state (float64), whole as one rank has it. A pass that adds state does not
    change the rest.
    """

    def generator(name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))

    groups = list({one.name: one for one in declarations if isinstance(one, StateGroup)}.values())
    sizes = {group.name: EXAMPLE_PAGE_TOKENS for group in groups}
    state: dict[str, torch.Tensor] = {}
    for group in groups:
        layout = group.example_layout(torch.float64)
        state |= layout.column_tensors(torch.device("cpu"))
        for name, placed in layout.tensors.items():
            shape = layout.num_example_pages, *placed.shape
            state[name] = torch.randn(shape, generator=generator(name), dtype=torch.float64)
    num_tokens = sum(NEW)
    return make_step(
        [one for one in declarations if isinstance(one, StepInput)],
        groups,
        list(zip(CACHED, NEW, strict=True)),
        state=state,
        tokens_per_page=sizes,
        token_ids=torch.randint(0, MAX_TOKEN_ID, (num_tokens,), generator=generator("token_ids")).numpy(),
        row_indices=np.array([0, num_tokens // 2, num_tokens - 1]),
    )


def _joined(node: Node, ranks: Sequence[_Rank]) -> torch.Tensor:
    """A split op's output on all ranks, [T, …], as one rank would have it."""
    of_ranks = [rank.values[node].flatten(1) for rank in ranks]
    if "shares" not in node.meta:
        return torch.cat(of_ranks, dim=1)
    function, (size, *parts) = node.meta["shares"]
    columns = torch.arange(sum(parts[::2]))
    whole = of_ranks[0].new_empty(len(of_ranks[0]), len(columns))
    for rank, value in zip(ranks, of_ranks, strict=True):
        whole[:, evaluate_expression((function, "columns", size, *parts), {"columns": columns}, rank.coordinates)] = value
    return whole


def _with_changes(before: torch.Tensor, of_ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that all ranks have whole, with what each has changed: of recurrent state, the units that are its own."""
    after = of_ranks[0]
    for other in of_ranks[1:]:
        after = torch.where(other != before, other, after)
    return after


def _sharded_dim(whole: torch.Tensor, shape: torch.Size) -> int | None:
    """The dimension of which a rank has a share; None where it has all."""
    return next((dim for dim, size in enumerate(whole.shape) if size != shape[dim]), None)


def _share(whole: torch.Tensor, shape: torch.Size, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's share of a state tensor, of the given shape."""
    dim = _sharded_dim(whole, shape)
    return whole if dim is None else whole.narrow(dim, rank * whole.shape[dim] // num_ranks, shape[dim])


def _collective(node: Node) -> Callable[..., Any] | None:
    """A collective's result on all ranks (`OpInfo.across_ranks`); None for other nodes."""
    info = op_info(node.target)
    return None if info is None else info.across_ranks


def _axis_of(collective: Node) -> Axis:
    """The axis whose groups a collective is over."""
    axis: Axis = op_arguments(collective)["group"]
    return axis


def _mesh_of_collectives(gm: GraphModule, mesh: Mesh) -> Mesh:
    """The mesh's axes that a graph has collectives over: along the others all ranks compute the same."""
    axes = {_axis_of(node) for node in gm.graph.nodes if _collective(node)}
    if EXPERT in axes:
        axes |= {DATA, TENSOR}
    data, tensor = (mesh.of_axis(axis) if axis in axes else 1 for axis in (DATA, TENSOR))
    return Mesh(data=data, pipe=mesh.pipe if PIPE in axes else 1, tensor=tensor, expert_parallel=mesh.expert_parallel)


def compare(before: _Outcome, after: _Outcome, tolerance: float) -> Verification:
    """Errors of `after` against `before` at each split op (where both have as many), in the results and in the state."""
    sites = []
    if [value.shape for _, value in before.sites] == [value.shape for _, value in after.sites]:
        for (_, reference), (node, value) in zip(before.sites, after.sites, strict=True):
            sites.append(_site_error(node.name, node_source_line(node), reference, value))
    numbered = enumerate(zip(before.results, after.results, strict=True))
    pairs = [("result" if i == 0 else f"result {i + 1}", *results) for i, results in numbered]
    pairs += [(name, before.state[name], left) for name, left in after.state.items() if name in before.state]
    for name, reference, value in pairs:
        if reference.shape != value.shape:
            mismatch = f"{name} has shape {list(value.shape)}, {list(reference.shape)} before"
            return Verification(tolerance=tolerance, reason=mismatch, sites=tuple(sites))
    sites += [_site_error(name, "", reference, value) for name, reference, value in pairs]
    wrong = [site for site in sites if not site.relative_error <= tolerance]  # a NaN is wrong, too
    worst = max(sites, key=lambda site: site.relative_error)
    reason = None
    if wrong:
        place = f"{wrong[0].node} ({wrong[0].source})" if wrong[0].source else wrong[0].node
        reason = f"relative error {wrong[0].relative_error:.2g} at {place}, tolerance {tolerance:.0g}"
    return Verification(
        tolerance=tolerance,
        max_error=max(site.max_error for site in sites),
        relative_error=worst.relative_error,
        reason=reason,
        sites=tuple(sites),
    )


def _site_error(node: str, source: str, reference: torch.Tensor, value: torch.Tensor) -> SiteError:
    error = (value - reference).abs().max().item() if value.numel() else 0.0
    scale = reference.abs().max().item() if reference.numel() else 0.0
    relative = error / scale if scale else (0.0 if error == 0 else float("inf"))
    if not value.isfinite().all():
        error = relative = float("inf")
    return SiteError(node=node, source=source, max_error=error, relative_error=relative)


def _input_name(node: Node) -> str:
    return node.meta["input"] if "input" in node.meta else str(node.meta["example_value"])


def _call(node: Node, value_of: Callable[[Node], Any]) -> Any:
    def concrete(argument: Any) -> Any:
        if isinstance(argument, Node):
            return value_of(argument)
        if isinstance(argument, torch.dtype):
            return torch.float64 if argument.is_floating_point else argument
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args, kwargs = map_aggregate(node.args, concrete), map_aggregate(node.kwargs, concrete)
    info = op_info(node.target)
    if info is not None and info.exact is not None:
        value: Any = info.exact(*map_aggregate(tuple(op_arguments(node).values()), concrete))
    elif node.op == "call_method":
        assert isinstance(node.target, str)
        method = "double" if node.target in _WIDENING_METHODS else node.target
        value = getattr(args[0], method)(*args[1:], **kwargs)
    else:
        assert node.op == "call_function", f"{node.op} in a captured graph"
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    # A cast makes a new tensor that may be written to; from float64 to float64 it would be the same one.
    return value.clone() if isinstance(value, torch.Tensor) and _is_cast(node) and value is args[0] else value


def _is_cast(node: Node) -> bool:
    values = [n.meta.get("example_value") for n in (node, *node.all_input_nodes[:1])]
    return len({value.dtype for value in values if isinstance(value, torch.Tensor)}) == 2


def _with_float64(expression: Expression) -> Expression:
    """The expression with float64 in place of the dtypes that it computes in."""
    if isinstance(expression, tuple):
        return tuple(_with_float64(part) for part in expression)
    is_wide = isinstance(expression, torch.dtype) and expression.is_floating_point and expression not in LARGEST
    return torch.float64 if is_wide else expression


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
