"""Transfers between the stages of a model, whose runners may end while something is on its way."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.step import DECODER_INPUTS, INPUT_IDS, POSITIONS, TOKENS, StepInput, StepOutput
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.runner.stages import StageLink
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_spec

D, STEPS, LATE = 3, 4, 0.3
HIDDEN = StepInput(name="hidden", dtype=torch.bfloat16, dims=(TOKENS, D), source="device")


def three_stages() -> ModelSpec:
    """A model whose forward is never called."""
    whole = tiny_spec()
    first = replace(whole, inputs=(INPUT_IDS, POSITIONS), outputs=(StepOutput(name="hidden", dims=(TOKENS, D)),))
    middle = replace(first, inputs=(HIDDEN, POSITIONS))
    return replace(whole, stages=(first, middle, replace(whole, inputs=(HIDDEN, DECODER_INPUTS[-1]))))


def hidden_of(step: int, stage: int) -> torch.Tensor:
    """Of 1 + step tokens; the stage before the last adds 1."""
    return torch.arange(D * (1 + step)).view(-1, D).to(torch.bfloat16) + 100 * step + stage


def run_stage(rank: int, mesh: Mesh) -> list[list[int]]:
    """Steps of more and more tokens, in buffers with padding; the last stage is late with its tokens. → the tokens that were sampled"""
    link = StageLink(three_stages(), mesh)
    stage = mesh.coordinates(rank)["pipe"]
    assert link.is_last == (stage == 2)
    buffer = torch.full((STEPS + 2, D), -1.0, dtype=torch.bfloat16)
    seen = []
    for number in range(STEPS):
        step: Any = SimpleNamespace(inputs={"hidden": buffer[: number + 2]}, num_tokens=number + 1)
        link.receive(step)
        if stage:
            assert torch.equal(buffer[: number + 1], hidden_of(number, stage - 1))
            assert (buffer[number + 1 :] == -1).all()
        link.send({"hidden": torch.cat((hidden_of(number, stage), buffer[:1]))} if stage < 2 else {}, step)
        tokens = torch.arange(number + 1) * 7 + number
        if link.is_last:
            time.sleep(LATE)
            link.send_tokens(tokens)
            seen.append(tokens.tolist())
        else:
            arriving = torch.zeros(STEPS, dtype=torch.int64)
            transfer = link.start_receiving_tokens(arriving[: number + 1])
            if number == 1:
                del arriving, transfer  # the runner goes to sleep
                seen.append(tokens.tolist())
            else:
                transfer.wait()
                seen.append(transfer.tensor.tolist())
    return seen


def test_three_stages_hand_on_hidden_states_and_tokens(tmp_path: Path) -> None:
    mesh = Mesh(pipe=3)
    expected = [[7 * index + number for index in range(number + 1)] for number in range(STEPS)]
    assert run_ranks(3, run_stage, mesh, folder=tmp_path, seconds=60.0, mesh=mesh) == [expected] * 3
