"""The compiled model as data: which pieces and ops run in which order on which values. What an artifact keeps of the whole graph.

Values have names: `input_ids`, `positions`, `logits_indices`, `kv_cache.3`, `weight.<parameter>` and `v7` for what a stage
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import OpOverload
from compile_and_serve.compiler.pieces.fingerprint import fingerprint
from compile_and_serve.compiler.pieces.splitter import Piece, SplitOp, Stage
from compile_and_serve.compiler.weights.transforms import TensorSpec, WeightTable, WeightTransform

REF = "$"  # prefix of an op argument that names a value

Argument = str | int | float | bool | None | list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceStep:
    """outputs = piece(inputs); `piece` is a fingerprint."""

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpStep:
    """output = op(*arguments), e.g. op "cas::attention"; an argument "$v7" is a value, anything else a constant."""

    op: str
    arguments: tuple[Argument, ...]
    output: str


Step = PieceStep | OpStep


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """Steps in order, the value that is the result, and the weights that the steps read."""

    steps: tuple[Step, ...]
    result: str
    num_kv_caches: int
    transforms: tuple[WeightTransform, ...]

    @property
    def pieces(self) -> tuple[str, ...]:
        """Fingerprints of the distinct pieces, in order of first use."""
        return tuple(dict.fromkeys(step.piece for step in self.steps if isinstance(step, PieceStep)))

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dump; `from_json` is the inverse."""
        data = asdict(self)
        for transform in data["transforms"]:
            transform["spec"]["dtype"] = str(transform["spec"]["dtype"]).removeprefix("torch.")
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ExecutionPlan:
        steps = tuple(
            PieceStep(piece=s["piece"], inputs=tuple(s["inputs"]), outputs=tuple(s["outputs"]))
            if "piece" in s
            else OpStep(op=s["op"], arguments=tuple(s["arguments"]), output=s["output"])
            for s in data["steps"]
        )
        transforms = tuple(
            WeightTransform(
                expression=_tuples(t["expression"]),
                target=t["target"],
                spec=TensorSpec(shape=tuple(t["spec"]["shape"]), dtype=getattr(torch, t["spec"]["dtype"])),
            )
            for t in data["transforms"]
        )
        return cls(steps=steps, result=data["result"], num_kv_caches=data["num_kv_caches"], transforms=transforms)


def make_plan(
    gm: GraphModule, stages: Sequence[Stage], weights: WeightTable
) -> tuple[ExecutionPlan, dict[str, GraphModule]]:
    """The plan of a split graph, and one graph for each distinct piece by its fingerprint."""
    names: dict[Node, str] = {}
    used_weights: list[str] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if "input" in node.meta:
            names[node] = node.meta["input"]
        elif "weight" in node.meta:
            names[node] = f"weight.{node.meta['weight']}"
            if node.users:
                used_weights.append(node.meta["weight"])
    graphs: dict[str, GraphModule] = {}
    steps: list[Step] = []
    num_values = 0
    for stage in stages:
        for node in stage.outputs if isinstance(stage, Piece) else [stage.node]:
            names[node] = f"v{num_values}"
            num_values += 1
        steps.append(_step(stage, names, graphs))
    result: Any = next(iter(reversed(gm.graph.nodes))).args[0]
    assert len(result) == 1, "the model's forward must return one tensor"
    plan = ExecutionPlan(
        steps=tuple(steps),
        result=names[result[0]],
        num_kv_caches=sum(name.startswith("kv_cache.") for name in names.values()),
        transforms=weights.keep(used_weights),
    )
    return plan, graphs


def symbolic_lengths(gm: GraphModule) -> list[str]:
    """Names of the symbolic lengths that a piece's inputs have."""
    values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    return list(dict.fromkeys(str(size) for size in sizes if isinstance(size, torch.SymInt)))


def _step(stage: Stage, names: dict[Node, str], graphs: dict[str, GraphModule]) -> Step:
    if isinstance(stage, SplitOp):
        target = stage.node.target
        assert isinstance(target, OpOverload)
        assert not stage.node.kwargs
        arguments = tuple(REF + names[arg] if isinstance(arg, Node) else arg for arg in stage.node.args)
        return OpStep(op=target.name().split(".")[0], arguments=arguments, output=names[stage.node])  # type: ignore[arg-type]
    key = fingerprint(stage.gm)
    graphs.setdefault(key, stage.gm)
    inputs, outputs = (tuple(names[node] for node in nodes) for nodes in (stage.inputs, stage.outputs))
    return PieceStep(piece=key, inputs=inputs, outputs=outputs)


def _tuples(expression: Any) -> Any:
    return expression if isinstance(expression, str | int) else tuple(_tuples(item) for item in expression)
