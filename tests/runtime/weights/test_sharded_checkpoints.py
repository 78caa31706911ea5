"""Quantized checkpoints on two ranks: the logits of the dequantized model on one rank, with every linear kept quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.mesh import TENSOR
from compile_and_serve.custom_ops.quantized.group_layout import padded_order, padded_width
from tests.runtime.weights.test_float4_checkpoints import FORMATS as FLOAT4
from tests.runtime.weights.test_group_checkpoints import FORMATS as GROUPED
from tests.support.float4_checkpoints import float4_linear
from tests.support.group_checkpoints import packed_linear, write_grouped
from tests.support.loaded_checkpoints import EAGER, TOKENS, load
from tests.support.numbers import relative_error
from tests.support.ranks import run_ranks
from tests.support.tiny_models import caches, step

CPU, LAYERS, SIZE = torch.device("cpu"), 2, 2


def run_rank(rank: int, folder: str, cache: str | None, size: int, verify: bool = False) -> tuple[torch.Tensor, list]:
    """Logits, and the rows of `quantize_linears` in the report."""
    config = EAGER if cache is None else CompileConfig(cache_dir=Path(cache), tensor_parallel_size=size, verify_passes=verify)
    model = load(Path(folder), config, coordinates={TENSOR: rank})
    logits = step(model, TOKENS, 0, caches(model.spec, torch.float32, tensor_parallel_size=size), TorchAttention())
    return logits, [row for row in model.report.get("passes", []) if row["name"] == "quantize_linears"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gptq-act-order", "nvfp4", "llm-int8"])
def test_two_ranks(name: str, plain: Path, tmp_path: Path) -> None:
    config = FLOAT4.get(name) or GROUPED[name]
    pack = float4_linear if name in FLOAT4 else packed_linear
    quantized, dequantized = write_grouped(plain, tmp_path, config, pack=pack)
    expected, _ = run_rank(0, str(dequantized), None, 1)
    cache = str(tmp_path / "cache")
    for logits, rows in run_ranks(SIZE, run_rank, str(quantized), cache, SIZE, name == "gptq-act-order", folder=tmp_path):
        assert relative_error(logits, expected) < 1e-3
        for row in rows:  # a rank that finds the other's artifact has no rows
            assert (row["matched"], row["near_misses"]) == (4 * LAYERS, [])
            assert not row.get("verification", {}).get("reason")


@pytest.mark.parametrize(("in_features", "groups"), [(96, 6), (64, 2), (33, 33), (40, 100)])
def test_padded_order(in_features: int, groups: int) -> None:
    """Every input once, in blocks of 32 of one group."""
    input_groups = torch.randint(0, groups, (in_features,))
    order = padded_order(input_groups, groups, padded_width(in_features, groups))
    assert sorted(order[order < in_features].tolist()) == list(range(in_features))
    for block in order.split(32):
        assert len(set(input_groups[block[block < in_features]].tolist())) <= 1
