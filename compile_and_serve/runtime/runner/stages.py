"""Stages: the ranks along the pipe axis, of which each runs its part of the model on what the one before computed.

Within a step, what a stage gives is received into the next one's inputs, persistent buffers that graphs may read. The last stage samples,
and sends the tokens to all other stages, which need them before they decode the same sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from compile_and_serve.compiler.model import Outputs
from compile_and_serve.custom_ops.collectives.collectives import Transfer, rank_group, start_receive, start_send
from compile_and_serve.custom_ops.mesh import PIPE, Mesh
from compile_and_serve.custom_ops.step import TOKENS, Step, StepInput
from compile_and_serve.models.spec import ModelSpec


def stages_of(spec: ModelSpec, mesh: Mesh) -> Sequence[ModelSpec]:
    """What the ranks of each stage run: the model itself where the mesh has one stage. Raises `ValueError` with one sentence."""
    if mesh.pipe == 1:
        return (spec,)
    parts = (spec, *spec.stages)
    unsupported = {
        "A pooling model": spec.pooling is not None,
        "A model that computes whole prompts": spec.whole_prompts,
        "A model with optional inputs": any(one.optional for part in parts for one in part.inputs),
        "A model with recurrent state": any(group.kind.unit == "slot" for part in parts for group in part.state),
        "A quantized checkpoint": any(part.quantized_weights for part in parts),
    }
    for what, is_given in unsupported.items():
        if is_given:
            raise ValueError(f"{what} runs in one piece, but pipeline_parallel_size is {mesh.pipe}: set it to 1.")
    if not spec.stages:
        raise ValueError(
            f"The model does not say how it is cut into stages, but pipeline_parallel_size is {mesh.pipe}: use tensor_parallel_size."
        )
    if len(spec.stages) != mesh.pipe:
        raise ValueError(f"The model has {len(spec.stages)} stages, but pipeline_parallel_size is {mesh.pipe}: use {len(spec.stages)}.")
    return tuple(_without_weights_of_others(one, spec) for one in spec.stages)


def _without_weights_of_others(stage: ModelSpec, whole: ModelSpec) -> ModelSpec:
    """The stage, whose loader passes over the other stages' tensors."""
    others = {name for one in (whole, *whole.stages) for name in one.module.state_dict()} - stage.module.state_dict().keys()
    named = {name: None if parameter in others else parameter for name, parameter in stage.weight_map.items()}
    parts = {name: None for name, part in stage.parts.items() if part.parameter in others}
    return replace(stage, weight_map=dict.fromkeys(others) | named | parts)


def received_inputs(stages: Sequence[ModelSpec], stage: int) -> tuple[StepInput, ...]:
    """The inputs of a stage that the stage before it computes. Raises `ValueError` for a stage that gives less than the next one reads."""
    given = {one.name: one.dims for one in stages[stage - 1].outputs} if stage else {}
    received = tuple(one for one in stages[stage].inputs if one.source == "device")
    for one in received:
        reads = f"stages[{stage}] of the model reads {one.name!r} from the device"
        if one.name not in given:
            raise ValueError(f"{reads}, but no stage before it gives it: make it an output of stages[{stage - 1}].")
        if given[one.name] != one.dims or one.dims[0] != TOKENS:
            raise ValueError(f"{reads} as {one.dims}, but is given {given[one.name]}: both must be the same and begin with {TOKENS!r}.")
    return received


class StageLink:
    """A rank's transfers from and to the other stages of its model.

    spec: what this rank's stage runs. is_last: whether it samples.
    """

    def __init__(self, whole: ModelSpec, mesh: Mesh) -> None:
        """Raises `ValueError` with one sentence for a model whose stages do not fit the mesh or each other."""
        stages = stages_of(whole, mesh)
        self._group = rank_group(PIPE)
        stage, self._last = self._group.rank, self._group.size - 1
        self.spec, self.is_last = stages[stage], stage == self._last
        self._receives = received_inputs(stages, stage)
        self._sends = () if self.is_last else received_inputs(stages, stage + 1)
        self._in_flight: list[Transfer] = []  # of the step before; its tensors must outlive them, even where the runner does not

    def receive(self, step: Step) -> None:
        """Receive the step's inputs from the stage before. What was sent of an earlier step may be overwritten from here on."""
        for transfer in self._in_flight:
            transfer.wait()
        self._in_flight.clear()
        for one in self._receives:
            start_receive(step.inputs[one.name][: step.num_tokens], self._group.rank - 1, self._group).wait()

    def send(self, outputs: Outputs, step: Step) -> None:
        """Begin to send the next stage what it reads of the step's outputs."""
        for one in self._sends:
            output = outputs[one.name]
            assert output.dtype == one.dtype, f"{one.name} is {output.dtype}, but the next stage reads {one.dtype}"
            self._in_flight.append(start_send(output[: step.num_tokens], self._group.rank + 1, self._group))

    def send_tokens(self, tokens_S: torch.Tensor) -> None:
        """Begin to send all other stages the tokens that the last one sampled, int64 [S]."""
        self._in_flight += [start_send(tokens_S, other, self._group) for other in range(self._last)]

    def start_receiving_tokens(self, tokens_S: torch.Tensor) -> Transfer:
        """Begin to receive the tokens that the last stage samples in the step, int64 [S]."""
        transfer = start_receive(tokens_S, self._last, self._group)
        self._in_flight.append(transfer)
        return transfer
