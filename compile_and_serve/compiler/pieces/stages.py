"""Stages: an execution plan cut into parts that run one after another, each on its own ranks.

A cut lies behind an op that reads a layer's state, such as attention: few values are alive there, and the pieces stay as they are. What is
alive at a cut has a row for each token and goes to the next stage, through the stages between where only a later one reads it. No layer's
state lies on both sides. Every rank of every stage makes the same cuts of the same plan, so all use one artifact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compile_and_serve.compiler.pieces.plan import REF, WEIGHT, Argument, ExecutionPlan, OpStep, PieceStep, PlanStep, TokenValue, reads
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import TOKENS, StepInput

RECEIVED = "received"  # the inputs of a stage that the stage before it computes: "received.0", …


class StagesError(ValueError):
    """The model cannot be cut into so many stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStage:
    """A stage's part of a plan. received: what the stage before it gives, in the order of that stage's results."""

    plan: ExecutionPlan
    received: tuple[StepInput, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Where the plans of a model are cut. layers: behind which layer of state each cut lies, for example "kv_caches.15". by: what they were
    chosen by.
    """

    layers: tuple[str, ...]
    groups: tuple[StateGroup, ...]
    by: Literal["hand", "measured time", "bytes of weights"]

    def stage(self, plan: ExecutionPlan, plain: ExecutionPlan | None, index: int) -> tuple[PlanStage, PlanStage | None]:
        """Stage `index` of the plan, and of that of steps without optional inputs. Both have the weights of both."""
        ours, others = _part(plan, plain, self, index), None if plain is None else _part(plain, plan, self, index, prefix="plain.")
        used = {name for one in (ours, others) if one is not None for step in one.plan.steps for name in reads(step)}
        transforms = tuple(one for one in plan.transforms if WEIGHT + one.target in used)
        ours = replace(ours, plan=replace(ours.plan, transforms=transforms))
        return ours, others

    def held(self, *parts: ExecutionPlan) -> tuple[StateGroup, ...]:
        """The groups, with the layers whose state a stage's plans read."""
        layer_of, read = _layer_of(self.groups), {name for part in parts for name in part.arguments}
        held = {layer_of[name] for name in read if name in layer_of}
        return tuple(
            replace(group, held=tuple(i for i in range(len(group.layers)) if f"{group.name}.{i}" in held)) for group in self.groups
        )


def cost_keys(plan: ExecutionPlan, groups: Sequence[StateGroup]) -> list[str]:
    """A name for each step of a plan; those of the same name take about the same time, in all models and stages. groups: of the state."""
    layer_of = _layer_of(groups)
    keys = []
    for step in plan.steps:
        if isinstance(step, PieceStep):
            keys.append(step.piece)
            continue
        constants = [one for one in step.arguments if not (isinstance(one, str) and one.startswith(REF))]
        read = sorted({layer_of[name].split(".")[0] for name in reads(step) if name in layer_of})
        value = plan.token_values.get(step.output)
        keys.append(f"{step.op} {constants} {read} {None if value is None else (*value.shape, str(value.dtype))}")
    return keys


def choose_stages(
    plan: ExecutionPlan,
    plain: ExecutionPlan | None,
    groups: Sequence[StateGroup],
    num_stages: int,
    layers: Sequence[int] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Stages:
    """Cut a model's plans into stages. layers: the number of layers of each; None: the stages take about as long, if the `seconds` of all
    steps are known by `cost_keys`, and else read about as many bytes of weights.

    groups: all state that the plans read. Raises `StagesError` with one sentence.
    """
    by: Literal["hand", "measured time", "bytes of weights"] = "hand"
    ends = _possible_ends(plan, groups)
    if plain is not None:
        also = _possible_ends(plain, groups)
        ends = {layer: end for layer, end in ends.items() if layer in also}
    num_layers = len(ends) + 1
    if num_layers < num_stages:
        raise StagesError(
            f"pipeline_parallel_size is {num_stages}, but the model can be cut in {num_layers - 1} places: set it to {num_layers} or lower."
        )
    if layers is not None:
        if len(layers) != num_stages or sum(layers) != num_layers or min(layers) < 1:
            raise StagesError(
                f"pipeline_parallel_layers is {', '.join(map(str, layers))}, but must be {num_stages} positive numbers with the sum "
                f"{num_layers}, the model's layers."
            )
        chosen = [sum(layers[: i + 1]) - 1 for i in range(num_stages - 1)]
    else:
        bounds = [0, *ends.values(), len(plan.steps)]
        keys = cost_keys(plan, groups)
        if seconds and all(key in seconds for key in keys):
            by, costs_of_steps = "measured time", [round(1e9 * seconds[key]) for key in keys]
        else:
            by, costs_of_steps = "bytes of weights", list(plan.bytes_read)
        costs = [1 + sum(costs_of_steps[begin:end]) for begin, end in itertools.pairwise(bounds)]
        chosen = [count - 1 for count in _even_cuts(costs, num_stages)]
    names = list(ends)
    return Stages(layers=tuple(names[index] for index in chosen), groups=tuple(groups), by=by)


def _even_cuts(costs: Sequence[int], num_parts: int) -> list[int]:
    """Where to cut a list into parts of consecutive costs, so that the largest sum is as small as it can be."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: of the first n costs in k parts: the largest sum, the sum of squares (which makes the other parts even), and the cuts.
    best = {n: (sums[n], sums[n] ** 2, list[int]()) for n in range(1, len(costs) + 1)}
    for k in range(2, num_parts + 1):
        best = {
            n: min(
                (max(best[m][0], sums[n] - sums[m]), best[m][1] + (sums[n] - sums[m]) ** 2, [*best[m][2], m])
                for m in range(k - 1, n)
                if m in best
            )
            for n in range(k, len(costs) + 1)
        }
    return best[len(costs)][2]


def _layer_of(groups: Sequence[StateGroup]) -> dict[str, str]:
    """State tensor → its layer, e.g. "states.3.1.columns" → "states.3"."""
    names = (name for group in groups for name in group.tensor_names)
    return {name: ".".join(name.split(".")[:2]) for name in names}


def _ends(plan: ExecutionPlan, groups: Sequence[StateGroup]) -> dict[str, int]:
    """Layer of state → the number of steps up to the last one that reads it, in the order of the plan."""
    layer_of = _layer_of(groups)
    ends: dict[str, int] = {}
    for number, step in enumerate(plan.steps, 1):
        for name in reads(step):
            if name in layer_of:
                ends.pop(layer_of[name], None)
                ends[layer_of[name]] = number
    return ends


def _possible_ends(plan: ExecutionPlan, groups: Sequence[StateGroup]) -> dict[str, int]:
    """As `_ends`, of the layers behind which the plan can be cut."""
    layer_of = _layer_of(groups)
    layers_of_step = [{layer_of[name] for name in reads(step) if name in layer_of} for step in plan.steps]
    possible = {}
    for layer, end in _ends(plan, groups).items():
        before, behind = set[str]().union(*layers_of_step[:end]), set[str]().union(*layers_of_step[end:])
        is_possible = isinstance(plan.steps[end - 1], OpStep) and behind and before.isdisjoint(behind)
        if is_possible and all(name in plan.token_values for name in _alive(plan, end)):
            possible[layer] = end
    return possible


def _alive(plan: ExecutionPlan, index: int) -> tuple[str, ...]:
    """The computed values that steps from `index` on read of those before it, in the order of their first use there."""
    return plan.cut(index)[0].results


def _part(plan: ExecutionPlan, other: ExecutionPlan | None, stages: Stages, index: int, prefix: str = "") -> PlanStage:
    """Stage `index` of a plan. other: of the same model, whose steps share inputs where both receive the same. prefix: of the others."""
    bounds = [0, *(_ends(plan, stages.groups)[layer] for layer in stages.layers), len(plan.steps)]
    given = _received(plan, other, stages, index, prefix)
    begin, end = bounds[index], bounds[index + 1]
    inside = {name for step in plan.steps[begin:end] for name in step.outputs}
    names = {name: one.name for name, one in given.items()}
    assert len(bounds) > index + 1
    if end == len(plan.steps):
        results, outputs = plan.results, plan.outputs
    else:
        sent = _received(plan, other, stages, index + 1, prefix)
        results, outputs = tuple(sent), tuple(one.name for one in sent.values())
    assert all(name in inside or name in names for name in results)
    return PlanStage(
        plan=replace(
            plan,
            steps=tuple(_renamed(step, names) for step in plan.steps[begin:end]),
            results=tuple(names.get(name, name) for name in results),
            outputs=outputs,
            bytes_read=plan.bytes_read[begin:end],
        ),
        received=tuple(given.values()),
    )


def _received(plan: ExecutionPlan, other: ExecutionPlan | None, stages: Stages, index: int, prefix: str) -> dict[str, StepInput]:
    """Value → the input of stage `index` that brings it there."""
    if index == 0:
        return {}
    cut = stages.layers[index - 1]
    alive = _alive(plan, _ends(plan, stages.groups)[cut])
    also = () if other is None else _alive(other, _ends(other, stages.groups)[cut])
    known = [None if other is None else other.token_values[name] for name in also]
    made = {}
    for number, name in enumerate(alive):
        value = plan.token_values[name]
        is_shared = number < len(known) and known[number] == value
        made[name] = _input(f"{RECEIVED}.{'' if is_shared else prefix}{number}", value)
    return made


def _input(name: str, value: TokenValue) -> StepInput:
    return StepInput(name=name, dtype=value.dtype, dims=(TOKENS, *value.shape), source="device")


def _renamed(step: PlanStep, names: Mapping[str, str]) -> PlanStep:
    """The step, with other names of values that it reads."""
    if isinstance(step, PieceStep):
        return replace(step, inputs=tuple(names.get(name, name) for name in step.inputs))
    return replace(step, arguments=tuple(_renamed_argument(one, names) for one in step.arguments))


def _renamed_argument(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, str) and argument.startswith(REF):
        name = argument.removeprefix(REF)
        return REF + names.get(name, name)
    return argument
