"""Transfers between the stages of a model, whose runners may end while something is on its way."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from compile_and_serve.custom_ops.collectives.collectives import stage_links
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.models.spec import PoolingSpec
from compile_and_serve.runtime.runner.stages import StageLink, check_stages
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_spec

D, STEPS, LATE = 3, 4, 0.3
NAMES = ("received.1", "received.0")
DTYPES = (torch.bfloat16, torch.float32)  # by the number in the name; behind three bfloat16, a float32 would not be aligned


def hidden_of(step: int, stage: int, number: int) -> torch.Tensor:
    """Of 1 + step tokens."""
    return torch.arange(D * (1 + step)).view(-1, D).to(DTYPES[number]) + 100 * step + 10 * number + stage


def run_stage(rank: int, mesh: Mesh) -> list[list[int]]:
    """Steps of more and more tokens, in buffers with padding; the last stage is late with its tokens. → the tokens that were sampled"""
    link = StageLink(platform_of(torch.device("cpu")), max_steps=2)
    links = stage_links()
    assert links.one_way.keys() == {(0, 1), (1, 2), (2, 0), (2, 1)}
    own = [group for ways, group in links.one_way.items() if links.stage in ways]
    assert len({id(group) for group in own}) == len(own) == (2, 3, 3)[links.stage]
    stage = mesh.coordinates(rank)["pipe"]
    assert link.is_last == (stage == 2)
    # The order in which a plan reads what it receives is not that in which the stage before computes it.
    read, given = (NAMES if stage else ()), (NAMES[::-1] if stage < 2 else ("logits",))
    plan: Any = SimpleNamespace(arguments=("positions", *read), outputs=given)
    buffers = {name: torch.full((STEPS + 2, D), -1.0, dtype=DTYPES[int(name[-1])]) for name in NAMES}
    seen, arriving = [], []
    for number in range(STEPS):
        step: Any = SimpleNamespace(inputs={name: one[: number + 2] for name, one in buffers.items()}, num_tokens=number + 1)
        link.receive(step, plan)
        for index, name in enumerate(sorted(read)):
            assert torch.equal(buffers[name][: number + 1], hidden_of(number, stage - 1, index))
            assert (buffers[name][number + 1 :] == -1).all()
        made = {name: torch.cat((hidden_of(number, stage, index), buffers[name][:1])) for index, name in enumerate(sorted(NAMES))}
        link.send(made, step, plan)
        for tensor in made.values():
            tensor.fill_(-2)  # as the next replay of a graph would
        tokens = torch.arange(number + 1) * 7 + number
        if link.is_last:
            time.sleep(LATE)
            link.send_back(tokens)
            seen.append(tokens.tolist())
        else:  # the next steps do not wait for the tokens
            arriving.append(link.start_receiving_back(torch.zeros(number + 1, dtype=torch.int64)))
    assert (link.wait_seconds() > 0) == (stage > 0)
    for transfer in arriving:
        transfer.wait()
        seen.append(transfer.tensor.tolist())
    return seen


@pytest.mark.exhaustive
def test_three_stages_hand_on_hidden_states_and_tokens(tmp_path: Path) -> None:
    mesh = Mesh(pipe=3)
    expected = [[7 * index + number for index in range(number + 1)] for number in range(STEPS)]
    assert run_ranks(3, run_stage, mesh, folder=tmp_path, seconds=60.0, mesh=mesh) == [expected] * 3


def run_ahead(rank: int, mesh: Mesh, folder: Path) -> list[float]:
    """The second stage receives nothing until the first one has gone on with its third step."""
    link = StageLink(platform_of(torch.device("cpu")), max_steps=2)
    plan: Any = SimpleNamespace(arguments=NAMES[1:] if rank else (), outputs=() if rank else NAMES[1:])
    seen, told = [], folder / "third step"
    for number in range(3):
        step: Any = SimpleNamespace(inputs={NAMES[1]: torch.zeros(1, D)}, num_tokens=1)
        if rank:
            while not told.exists():
                time.sleep(0.01)
            link.receive(step, plan)
            seen.append(step.inputs[NAMES[1]][0, 0].item())
        else:
            link.receive(step, plan)
            if number == 2:
                told.touch()
            link.send({NAMES[1]: torch.full((1, D), float(number))}, step, plan)
    dist.barrier()
    return seen


def test_a_stage_goes_on_before_the_next_one_has_received(tmp_path: Path) -> None:
    mesh = Mesh(pipe=2)
    assert run_ranks(2, run_ahead, mesh, tmp_path, folder=tmp_path, seconds=60.0, mesh=mesh) == [[], [0.0, 1.0, 2.0]]


def test_what_cannot_run_in_stages_is_a_sentence() -> None:
    spec = tiny_spec()
    check_stages(spec, Mesh(pipe=2))
    for change, what in (
        ({"pooling": PoolingSpec(kind="embed", width=D)}, "A pooling model"),
        ({"whole_prompts": True}, "A model that computes whole prompts"),
        ({"encoder": spec}, "A model with an encoder"),
        ({"state": ()}, "A model without state"),
    ):
        with pytest.raises(ValueError, match=f"{what} runs in one piece, but pipeline_parallel_size is 2: set it to 1"):
            check_stages(replace(spec, **change), Mesh(pipe=2))  # type: ignore[arg-type]
        check_stages(replace(spec, **change), Mesh(tensor=2))  # type: ignore[arg-type]
