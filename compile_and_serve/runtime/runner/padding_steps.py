"""Steps without any sequence: what a data group runs while only others have requests, so that their ranks wait for none of its."""

from __future__ import annotations

from compile_and_serve.custom_ops.step import Step
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.runner.step_shapes import common_size, take_shape
from compile_and_serve.runtime.runner.warm_up import dummy_step
from compile_and_serve.runtime.scheduler.step_messages import StepShape


def run_padding(runner: ModelRunner, shape: StepShape) -> None:
    """Run a step of the shape of the other groups' steps. It changes no state, and nobody reads what comes out."""
    size = common_size(runner.plain_steps, shape)
    step: Step
    if shape.is_decode and size <= runner.batch.num_slots:
        step = runner.decode_step(size)  # in the buffers that graphs are captured over
        for name, backend in runner.backends.items():
            backend.plan(step.metadata[name])
    else:
        step = dummy_step(runner, size, 1, num_rows=shape.rows)
    take_shape(step, shape)
    runner.run_step(step, with_sampling=not shape.is_apart)
