"""A rank reads its own experts alone, where the checkpoint has a tensor for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.weights.transforms import WeightTransform
from compile_and_serve.custom_ops.mesh import EXPERT
from compile_and_serve.custom_ops.moe.placement import num_slots, take_experts
from compile_and_serve.custom_ops.weight_functions import TensorSpec
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.weights import load_weights, loader, read_config
from tests.runtime.weights.test_loader import RecordingTarget
from tests.support.moe_models import write_moe

RANKS, REDUNDANT = 2, 2


class SpreadTarget(RecordingTarget):
    """A rank's target: slots of the experts, and the table of each layer."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        transforms = []
        for one in self.transforms:
            if ".experts." in one.target:
                slots = num_slots(one.spec.shape[0], RANKS, REDUNDANT)
                held = TensorSpec(shape=(slots, *one.spec.shape[1:]), dtype=one.spec.dtype)
                transforms.append(WeightTransform(expression=("take_experts", one.target, slots, RANKS), target=one.target, spec=held))
                if one.target.endswith("gate_up_proj"):
                    table = ("expert_placement", one.target, one.spec.shape[0], slots, RANKS)
                    of_table = TensorSpec(shape=(one.spec.shape[0], 32), dtype=torch.int32)
                    transforms.append(WeightTransform(expression=table, target=f"{one.target}.placement", spec=of_table))
            else:
                transforms.append(one)
        self.transforms = tuple(transforms)


def test_a_rank_reads_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_moe(tmp_path / "model", "Qwen3MoeForCausalLM")
    spec = build_model(read_config(folder), dtype=torch.float32)
    given: dict[str, Any] = {"load_format": "auto", "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    whole = RecordingTarget(spec)
    load_weights(whole, spec, folder, **given)
    read: list[set[int]] = []
    open_checkpoint = loader.open_checkpoint

    class Watched:
        def __init__(self, *args: Any) -> None:
            self._checkpoint = open_checkpoint(*args)
            self.shapes = self._checkpoint.shapes

        def stream(self, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
            read.append({int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name})
            return self._checkpoint.stream(names)

    monkeypatch.setattr(loader, "open_checkpoint", Watched)
    for rank in range(RANKS):
        target = SpreadTarget(spec)
        load_weights(target, spec, folder, coordinates={EXPERT: rank}, **given)
        for name, tensor in whole.assigned.items():
            expected = take_experts(tensor, 4, RANKS, rank=rank) if ".experts." in name else tensor
            assert torch.equal(target.assigned[name], expected), name
    assert read == [{0, 1, 2, 3}, {4, 5, 0, 1}]
