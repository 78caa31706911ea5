"""The compiled model as data: which pieces and ops run in which order on which values. What an artifact keeps of the whole graph.

Values have names: those of inputs and state (`input_ids`, `kv_caches.3`), `weight.<parameter>`, and `v7` for what a step computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import UNKNOWN_SOURCE, OpOverload, node_source_line
from compile_and_serve.compiler.pieces.fingerprint import fingerprint
from compile_and_serve.compiler.pieces.splitter import Piece, SplitOp, Stage
from compile_and_serve.compiler.weights.transforms import WeightTable, WeightTransform
from compile_and_serve.custom_ops.step import TOKENS, StepInput
from compile_and_serve.custom_ops.weight_functions import TensorSpec, expression_from_json, expression_to_json

REF = "$"  # prefix of an op argument that names a value
WEIGHT = "weight."  # prefix of a value that is a weight

Argument = str | int | float | bool | None | list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceStep:
    """outputs = piece(inputs); `piece` is a fingerprint. source: lines of the model that it comes from."""

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpStep:
    """output = op(*arguments), e.g. op "cas::attention"; an argument "$v7" is a value, anything else a constant. source: as of a piece."""

    op: str
    arguments: tuple[Argument, ...]
    output: str
    source: str = field(default="", compare=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output, as of a piece."""
        return (self.output,)


PlanStep = PieceStep | OpStep


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenValue:
    """A computed value with a row for each token: [tokens, *shape]."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def reads(step: PlanStep) -> list[str]:
    """Names of the values that a step reads, in order."""
    if isinstance(step, PieceStep):
        return list(step.inputs)
    return [a.removeprefix(REF) for a in step.arguments if isinstance(a, str) and a.startswith(REF)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """Steps in order, the values that are the results, and the weights that the steps read.

    outputs: the model's outputs by name, in the order of `results`. transforms: how the weights are made of the checkpoint.
    token_values: the computed values that have a row for each token, which may be handed to other ranks (`stages.py`).
    bytes_read: by step, of the weights that it reads as a whole (an embedding gives rows only).
    """

    steps: tuple[PlanStep, ...]
    results: tuple[str, ...]
    outputs: tuple[str, ...]
    transforms: tuple[WeightTransform, ...] = ()
    token_values: Mapping[str, TokenValue] = field(default_factory=dict)
    bytes_read: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Inputs, state and computed values that the steps read and none of them computes, in order of first use."""
        made = {name for step in self.steps for name in step.outputs}
        read = [name for step in self.steps for name in reads(step)] + list(self.results)
        return tuple(dict.fromkeys(n for n in read if n not in made and not n.startswith(WEIGHT)))

    @property
    def last_use(self) -> dict[str, int]:
        """Value → the number of the last step that reads it; results are read after the last step."""
        uses = {name: i for i, step in enumerate(self.steps) for name in reads(step)}
        return uses | dict.fromkeys(self.results, len(self.steps))

    def cut(self, index: int) -> tuple[ExecutionPlan, ExecutionPlan]:
        """The plans of the first `index` steps and of the rest. The first one's results are what the second one reads of it."""
        head, tail = self.steps[:index], replace(self, steps=self.steps[index:], bytes_read=self.bytes_read[index:])
        made = {name for step in head for name in step.outputs}
        live = tuple(name for name in tail.arguments if name in made)
        return replace(self, steps=head, results=live, outputs=live, bytes_read=self.bytes_read[:index]), tail

    @property
    def pieces(self) -> tuple[str, ...]:
        """Fingerprints of the distinct pieces, in order of first use."""
        return tuple(dict.fromkeys(step.piece for step in self.steps if isinstance(step, PieceStep)))

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dump; `from_json` is the inverse."""
        data = asdict(self)
        for transform, plain in zip(self.transforms, data["transforms"], strict=True):
            plain["expression"] = expression_to_json(transform.expression)
            plain["spec"]["dtype"] = _dtype_name(transform.spec.dtype)
        for value in data["token_values"].values():
            value["dtype"] = _dtype_name(value["dtype"])
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ExecutionPlan:
        steps = tuple(
            PieceStep(piece=s["piece"], inputs=tuple(s["inputs"]), outputs=tuple(s["outputs"]), source=s.get("source", ""))
            if "piece" in s
            else OpStep(op=s["op"], arguments=tuple(s["arguments"]), output=s["output"], source=s.get("source", ""))
            for s in data["steps"]
        )
        transforms = tuple(
            WeightTransform(
                expression=expression_from_json(t["expression"]),
                target=t["target"],
                spec=TensorSpec(shape=tuple(t["spec"]["shape"]), dtype=getattr(torch, t["spec"]["dtype"])),
            )
            for t in data["transforms"]
        )
        values = {name: TokenValue(shape=tuple(v["shape"]), dtype=getattr(torch, v["dtype"])) for name, v in data["token_values"].items()}
        return cls(
            steps=steps,
            results=tuple(data["results"]),
            outputs=tuple(data["outputs"]),
            transforms=transforms,
            token_values=values,
            bytes_read=tuple(data["bytes_read"]),
        )


def make_plan(
    gm: GraphModule, stages: Sequence[Stage], weights: WeightTable, outputs: Sequence[str], inputs: Sequence[StepInput] = ()
) -> tuple[ExecutionPlan, dict[str, GraphModule]]:
    """The plan of a split graph, and one graph for each distinct piece by its fingerprint. outputs: names of the graph's results. inputs:
    of the step; they say which symbolic length is the number of tokens.
    """
    names: dict[Node, str] = {}
    used_weights: list[str] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if "input" in node.meta:
            names[node] = node.meta["input"]
        elif "weight" in node.meta:
            names[node] = WEIGHT + node.meta["weight"]
            if node.users:
                used_weights.append(node.meta["weight"])
    graphs: dict[str, GraphModule] = {}
    steps: list[PlanStep] = []
    token_values: dict[str, TokenValue] = {}
    bytes_read: list[int] = []
    num_tokens = _num_tokens(gm, inputs)
    num_values = 0
    for stage in stages:
        for node in stage.outputs if isinstance(stage, Piece) else [stage.node]:
            names[node] = f"v{num_values}"
            if (value := _token_value(node.meta["example_value"], num_tokens)) is not None:
                token_values[names[node]] = value
            num_values += 1
        steps.append(_step(stage, names, graphs))
        bytes_read.append(_bytes_read(stage))
    results: Any = next(iter(reversed(gm.graph.nodes))).args[0]
    if len(results) != len(outputs):
        raise ValueError(f"The model's forward returns {len(results)} tensors; it declares {', '.join(outputs)}.")
    plan = ExecutionPlan(
        steps=tuple(steps),
        results=tuple(names[result] for result in results),
        outputs=tuple(outputs),
        transforms=weights.keep(used_weights),
        token_values=token_values,
        bytes_read=tuple(bytes_read),
    )
    return plan, graphs


def with_weights_of(plan: ExecutionPlan, other: ExecutionPlan) -> ExecutionPlan:
    """The plan with the weights of another plan of the same model added, so that both can run on one set of weights.

    Raises `ValueError` where passes made different weights of the same name for them.
    """
    own = {transform.target: transform for transform in plan.transforms}
    for transform in other.transforms:
        known = own.setdefault(transform.target, transform)
        if known != transform:
            raise ValueError(
                f"Passes made weight {transform.target} in two ways, for steps with and without optional inputs: find the pass with "
                "--dump-dir and disable it."
            )
    return replace(plan, transforms=tuple(own.values()))


def symbolic_lengths(gm: GraphModule) -> list[str]:
    """Names of the symbolic lengths that a piece's inputs have."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    return list(dict.fromkeys(str(size) for size in sizes if isinstance(size, torch.SymInt)))


def _num_tokens(gm: GraphModule, inputs: Sequence[StepInput]) -> str | None:
    """The symbolic length that is the number of tokens; None if no input has it."""
    dims = {one.name: one.dims.index(TOKENS) for one in inputs if TOKENS in one.dims}
    for node in gm.graph.find_nodes(op="placeholder"):
        if (dim := dims.get(node.meta.get("input", ""))) is not None:
            return str(node.meta["example_value"].shape[dim])
    return None


def _token_value(value: Any, num_tokens: str | None) -> TokenValue | None:
    """What a computed value is that has a row for each token; None for another one."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or str(value.shape[0]) != num_tokens:
        return None
    shape = tuple(value.shape[1:])
    return TokenValue(shape=shape, dtype=value.dtype) if all(isinstance(size, int) for size in shape) else None


def _bytes_read(stage: Stage) -> int:
    """Bytes of the weights that a piece reads as a whole."""
    if isinstance(stage, SplitOp):
        return 0
    total = 0
    for node, placeholder in zip(stage.inputs, stage.gm.graph.find_nodes(op="placeholder"), strict=True):
        is_table = all("embedding" in str(user.target) for user in placeholder.users)
        if "weight" in node.meta and not is_table:
            value = node.meta["example_value"]
            total += value.numel() * value.element_size()
    return total


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _step(stage: Stage, names: dict[Node, str], graphs: dict[str, GraphModule]) -> PlanStep:
    if isinstance(stage, SplitOp):
        target = stage.node.target
        assert isinstance(target, OpOverload)
        assert not stage.node.kwargs
        arguments = tuple(REF + names[arg] if isinstance(arg, Node) else arg for arg in stage.node.args)
        source = _source([stage.node])
        return OpStep(op=target.name().split(".")[0], arguments=arguments, output=names[stage.node], source=source)  # type: ignore[arg-type]
    key = fingerprint(stage.gm)
    graphs.setdefault(key, stage.gm)
    inputs, outputs = (tuple(names[node] for node in nodes) for nodes in (stage.inputs, stage.outputs))
    return PieceStep(piece=key, inputs=inputs, outputs=outputs, source=_source(stage.gm.graph.nodes))


def _source(nodes: Iterable[Node]) -> str:
    """The first and the last line of the model that these nodes come from: `llama.py:31 in forward … llama.py:52 in forward`."""
    lines = [node_source_line(node).rpartition("/")[2] for node in nodes if node.op == "call_function"]
    known = [line for line in lines if line != UNKNOWN_SOURCE]
    return " … ".join(dict.fromkeys(known[:1] + known[-1:]))
