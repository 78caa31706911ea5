"""Profiles of a live server: a Chrome trace in which pieces and ops have their names and the model's source lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from compile_and_serve.compiler.pieces.plan import ExecutionPlan, PieceStep
from compile_and_serve.compiler.pieces.plan_function import StepCall

_running: list[torch.profiler.profile] = []  # one at most: torch has one profiler a process


def is_tracing() -> bool:
    """Whether a trace is being recorded in this process."""
    return bool(_running)


def start_trace() -> None:
    """Record what the device and the host do. Raises `ValueError` if that is so already."""
    if _running:
        raise ValueError("A profile is being recorded already: stop it with POST /stop_profile.")
    profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
    profile.start()
    _running.append(profile)


def stop_trace(folder: Path, name: str) -> str:
    """Write what was recorded to a new file of `folder`. → its path. Raises `ValueError` if nothing is recorded."""
    if not _running:
        raise ValueError("No profile is being recorded: start one with POST /start_profile.")
    profile = _running.pop()
    profile.stop()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}-{name}.json.gz"
    profile.export_chrome_trace(str(path))
    return str(path)


def named_calls(plan: ExecutionPlan, calls: Sequence[StepCall]) -> list[StepCall]:
    """The calls of a plan's steps, each under its name in a trace."""
    numbers = {piece: i for i, piece in enumerate(plan.pieces)}
    named = []
    for step, call in zip(plan.steps, calls, strict=True):
        name = f"piece {numbers[step.piece]}" if isinstance(step, PieceStep) else step.op
        named.append(_named(call, f"{name} ({step.source})" if step.source else name))
    return named


def _named(call: StepCall, name: str) -> StepCall:
    def run(*arguments: Any) -> Any:
        with torch.profiler.record_function(name):
            return call(*arguments)

    return run
