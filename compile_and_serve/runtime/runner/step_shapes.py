"""Steps of several data groups that have the same shape, so that the groups' ranks meet in the same collectives."""

from __future__ import annotations

from typing import Protocol

from compile_and_serve.custom_ops.step import Step
from compile_and_serve.runtime.scheduler.step_messages import StepShape


class PadsSteps(Protocol):
    """A `StepRunner`."""

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None: ...


def common_size(steps: PadsSteps, shape: StepShape) -> int:
    """The number of tokens that every data group pads a step of this shape to: all have captured the same graphs."""
    tokens = shape.tokens
    return steps.padded_size(tokens, tokens if shape.is_decode else 1, 1 if shape.is_decode else max(2, tokens)) or tokens


def take_shape(step: Step, shape: StepShape) -> None:
    """Let graphs be chosen, and come due, by what is the same for all data groups. The step's metadata keeps its own numbers."""
    step.num_tokens = shape.tokens
    if shape.is_decode:
        step.num_seqs = shape.tokens
