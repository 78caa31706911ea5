"""From an execution plan to one Python function that calls the pieces and the ops between them.

The function is generated as text (kept in the artifact and in dumps), so that a step costs one call a piece and nothing else: no
interpreter loop, no dictionaries; a value is deleted where it is read for the last time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compile_and_serve.compiler.pieces.plan import REF, ExecutionPlan, OpStep, PieceStep, Step
from compile_and_serve.custom_ops.library import OPS

Stitched = Callable[..., torch.Tensor]


def stitched_source(plan: ExecutionPlan) -> str:
    """Text of `forward(input_ids, positions, kv_caches, logits_indices)`.

    Its globals are `piece_<n>` (n-th distinct piece), `op_<name>`, and `weight_<…>` for each weight.
    """
    numbers = {piece: i for i, piece in enumerate(plan.pieces)}
    last_use = {name: i for i, step in enumerate(plan.steps) for name in _reads(step)}
    caches = ", ".join(f"kv_cache_{i}" for i in range(plan.num_kv_caches))
    lines = ["def forward(input_ids, positions, kv_caches, logits_indices):"]
    if caches:
        lines.append(f"    {caches}, = kv_caches")
    for i, step in enumerate(plan.steps):
        if isinstance(step, PieceStep):
            outputs = "".join(f"{identifier(name)}, " for name in step.outputs)
            inputs = ", ".join(identifier(name) for name in step.inputs)
            lines.append(f"    {outputs}= piece_{numbers[step.piece]}([{inputs}])")
        else:
            arguments = ", ".join(_argument(argument) for argument in step.arguments)
            lines.append(f"    {identifier(step.output)} = {_op_name(step)}({arguments})")
        dead = [name for name in dict.fromkeys(_reads(step)) if last_use[name] == i and re.fullmatch(r"v\d+", name)]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    lines.append(f"    return {identifier(plan.result)}")
    return "\n".join(lines) + "\n"


def stitch(
    plan: ExecutionPlan, pieces: Mapping[str, Callable[..., Any]], weights: Mapping[str, torch.Tensor]
) -> Stitched:
    """The callable of a plan. pieces: by fingerprint; weights: by parameter name."""
    names: dict[str, Any] = {f"piece_{i}": pieces[piece] for i, piece in enumerate(plan.pieces)}
    names |= {identifier(f"weight.{name}"): tensor for name, tensor in weights.items()}
    # 30 layers' attention through the dispatcher to Python and back is a tenth of a millisecond a step
    names |= {_op_name(step): OPS[step.op].python or _overload(step) for step in plan.steps if isinstance(step, OpStep)}
    exec(compile(stitched_source(plan), "<stitched forward>", "exec"), names)
    return names["forward"]


def identifier(value: str) -> str:
    """A value's name as a Python identifier."""
    return re.sub(r"\W", "_", value)


def _reads(step: Step) -> list[str]:
    if isinstance(step, PieceStep):
        return list(step.inputs)
    return [a.removeprefix(REF) for a in step.arguments if isinstance(a, str) and a.startswith(REF)]


def _argument(argument: Any) -> str:
    if isinstance(argument, str) and argument.startswith(REF):
        return identifier(argument.removeprefix(REF))
    return repr(argument)


def _op_name(step: OpStep) -> str:
    return f"op_{identifier(step.op)}"


def _overload(step: OpStep) -> Callable[..., Any]:
    namespace, name = step.op.split("::")
    return getattr(getattr(torch.ops, namespace), name).default
