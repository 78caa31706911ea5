"""All weights in one allocation."""

from __future__ import annotations

import torch

from compile_and_serve.compiler.weights.arena import ALIGNMENT, WeightArena
from compile_and_serve.custom_ops.weight_functions import TensorSpec


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    specs = {
        "a": TensorSpec(shape=(3, 5), dtype=torch.bfloat16),
        "b": TensorSpec(shape=(7,), dtype=torch.float32),
        "c": TensorSpec(shape=(1000, 33), dtype=torch.bfloat16),
    }
    arena = WeightArena(specs, torch.device("cpu"))
    for value, (name, spec) in enumerate(specs.items(), start=1):
        tensor = arena.tensor(name)
        assert tensor.shape == spec.shape
        assert tensor.dtype == spec.dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(value)
    for value, name in enumerate(specs, start=1):
        assert (arena.tensor(name) == value).all()
