"""Makes one Python function of an execution plan. Everything that runs a plan runs this function.

The function is generated as text, which the artifact and dumps keep. Running it costs one call per piece or op: there is no interpreter
loop and no look-up, and a value is deleted after its last use. The caller gives what each step of the plan calls: the pieces and ops
themselves, versions that measure their time, or versions that capture CUDA graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compile_and_serve.compiler.pieces.plan import REF, WEIGHT, ExecutionPlan, OpStep, PieceStep, PlanStep, reads
from compile_and_serve.custom_ops.library import OPS

# inputs, state and earlier results by name → results in order
PlanFunction = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, ...]]
# A piece takes the list of its inputs and returns a tuple; an op takes its arguments and returns a tensor.
StepCall = Callable[..., Any]


def plan_source(plan: ExecutionPlan) -> str:
    """Text of `forward(values)`; its globals are `call_<n>` for the n-th step, and `weight_<…>` for each weight."""
    last_use = plan.last_use
    numbers = {piece: i for i, piece in enumerate(plan.pieces)}
    lines = ["def forward(values):"]
    lines += [f"    {identifier(name)} = values[{name!r}]" for name in plan.arguments]
    for i, step in enumerate(plan.steps):
        if isinstance(step, PieceStep):
            outputs = "".join(f"{identifier(name)}, " for name in step.outputs)
            inputs = ", ".join(identifier(name) for name in step.inputs)
            lines.append(f"    {outputs}= call_{i}([{inputs}])  # piece {numbers[step.piece]}")
        else:
            arguments = ", ".join(_argument(argument) for argument in step.arguments)
            lines.append(f"    {identifier(step.output)} = call_{i}({arguments})  # {step.op}")
        read_or_made = dict.fromkeys((*reads(step), *step.outputs))
        dead = [name for name in read_or_made if last_use.get(name, i) == i and re.fullmatch(r"v\d+", name)]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    results = "".join(f"{identifier(name)}, " for name in plan.results)
    lines.append(f"    return ({results})")
    return "\n".join(lines) + "\n"


def make_plan_function(plan: ExecutionPlan, calls: Sequence[StepCall], weights: Mapping[str, torch.Tensor]) -> PlanFunction:
    """The function that runs a plan. calls: one for each of its steps, usually `step_calls`. weights: by parameter name."""
    names: dict[str, Any] = {f"call_{i}": call for i, call in enumerate(calls)}
    names |= {identifier(WEIGHT + name): tensor for name, tensor in weights.items()}
    exec(compile(plan_source(plan), "<plan>", "exec"), names)
    return names["forward"]


def step_calls(plan: ExecutionPlan, pieces: Mapping[str, StepCall]) -> list[StepCall]:
    """What each step of the plan calls in service. pieces: by fingerprint."""
    # A split point's Python function, not its overload: the dispatcher takes a tenth of a millisecond per 30 calls.
    return [pieces[step.piece] if isinstance(step, PieceStep) else OPS[step.op].python or _overload(step) for step in plan.steps]


def identifier(value: str) -> str:
    """A value's name as a Python identifier."""
    return re.sub(r"\W", "_", value)


def is_computed(argument: Any) -> bool:
    """Whether an op's argument is a value that an earlier step computed."""
    return isinstance(argument, str) and re.fullmatch(rf"{re.escape(REF)}v\d+", argument) is not None


def _argument(argument: Any) -> str:
    if isinstance(argument, str) and argument.startswith(REF):
        return identifier(argument.removeprefix(REF))
    return repr(argument)


def _overload(step: PlanStep) -> StepCall:
    assert isinstance(step, OpStep)
    namespace, name = step.op.split("::")
    return getattr(getattr(torch.ops, namespace), name).default
