"""How FlashInfer's modules are called, without FlashInfer and a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.attention import flashinfer_modules
from compile_and_serve.custom_ops.attention.flashinfer_prefill import AttentionShape, FlashInferPrefill


@pytest.mark.parametrize(("version", "num_arguments"), [("0.6.15.post1", 19), ("0.6.16.post4", 20), ("0.7.2.post1", 20), ("0.7.4", 21)])
def test_a_plan_has_as_many_arguments_as_the_version_takes(version: str, num_arguments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_modules, "version", lambda name: version)
    planned: list[tuple[Any, ...]] = []
    module = SimpleNamespace(plan=lambda *arguments: planned.append(arguments), ragged_run=None)
    prefill = FlashInferPrefill("fa2", torch.empty(16, dtype=torch.uint8), is_ragged=True)
    shape = AttentionShape(8, 2, 64, 16, torch.bfloat16, torch.bfloat16, 0.125)
    starts = np.array([0, 5], np.int32)
    prefill.plan(module, shape, starts, np.array([5], np.int32), starts)
    assert len(planned[0]) == num_arguments
