"""Traces of a live server: pieces and ops have their names and the model's source lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from compile_and_serve.compiler.pieces.plan import ExecutionPlan, OpStep, PieceStep
from compile_and_serve.compiler.pieces.plan_function import make_plan_function
from compile_and_serve.compiler.pieces.trace import is_tracing, named_calls, start_trace, stop_trace


def test_pieces_and_ops_have_their_names_in_a_trace(tmp_path: Path) -> None:
    steps = (
        PieceStep(piece="abc", inputs=("input_ids",), outputs=("v0",), source="llama.py:31 in forward"),
        OpStep(op="cas::attention", arguments=("$v0",), output="v1", source="llama.py:52 in forward"),
        PieceStep(piece="abc", inputs=("v1",), outputs=("v2",)),
    )
    plan = ExecutionPlan(steps=steps, results=("v2",), outputs=("logits",), transforms=())
    assert ExecutionPlan.from_json(json.loads(json.dumps(plan.to_json()))).steps[0].source == "llama.py:31 in forward"
    calls = named_calls(plan, [lambda inputs: (inputs[0] + 1,), torch.neg, lambda inputs: (inputs[0] * 2,)])
    forward = make_plan_function(plan, calls, {})
    with pytest.raises(ValueError, match="start one with"):
        stop_trace(tmp_path, "rank0")
    start_trace()
    assert is_tracing()
    with pytest.raises(ValueError, match="already"):
        start_trace()
    [result] = forward({"input_ids": torch.ones(3)})
    path = stop_trace(tmp_path / "traces", "rank0")
    assert not is_tracing()
    assert result.tolist() == [-4.0] * 3
    names = [event["name"] for event in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]]
    for name in ("piece 0 (llama.py:31 in forward)", "cas::attention (llama.py:52 in forward)", "piece 0"):
        assert names.count(name) == 1
