"""How long each step of a model's plan takes, with its weights and state in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pieces.plan_function import make_plan_function, step_calls
from compile_and_serve.compiler.reports.profile import Clock
from compile_and_serve.custom_ops.step import Step, running


def time_steps(model: CompiledModel, step: Step, runs: int) -> list[float]:
    """Seconds of each step of the plan, the least of so many runs. Two runs before are not measured."""
    clock = Clock(model.device)

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            clock.start()
            returned = call(*arguments)
            clock.stop()
            return returned

        return run

    forward = make_plan_function(model.plan, [timed(call) for call in step_calls(model.plan, model.pieces)], model.weights)
    seconds = []
    with running(step.metadata), torch.no_grad():
        for _ in range(2 + runs):
            clock = Clock(model.device)
            forward(step.values)
            seconds.append(clock.seconds())
    return [min(times) for times in zip(*seconds[2:], strict=True)]
