"""Dumps of tiny models, for tests of the commands and pages that show them."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.reports.dump import add_to_report
from compile_and_serve.compiler.reports.dump_format import REPORT
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.serve.inspect.data import load_dump
from tests.support.tiny_models import tiny_spec

LAYERS = 4
FUSED = frozenset({"rope_attention", "fused_linear", "silu_mul", "add_rms_norm"})


def make_dump(folder: Path, spec: ModelSpec, *, kernels: frozenset[str] = FUSED) -> Path:
    """Compile without weights, verified and measured, and dump to `folder`."""
    dtype = next(spec.module.parameters()).dtype
    config = CompileConfig(use_cache=False, verify_passes=True, dump_dir=folder, profile_tokens=(1, 2))
    backend = TorchAttention()
    cpu = torch.device("cpu")
    small = {"CPU_GEMM_SIZE": 16, "CPU_STREAM_BYTES": 1 << 16, "RUNS": 2}  # sizes of the measurements
    with patch.multiple("compile_and_serve.compiler.reports.profile", **small):
        compile_model(spec, config, device=cpu, dtype=dtype, kernels=kernels, attention_backends={"kv_caches": backend})
    graphs = {"sizes": [1, 2, 4], "full_graphs": 2, "used_bytes": 3 << 20}
    memory = {"total": 80, "others": 1, "weights": 15, "largest_step": 2, "sampling": 0.5, "graphs": 0.25}
    facts = {
        "attention_backend": "torch",
        "kv_cache_tokens": 512,
        "kv_cache_bytes": 1 << 20,
        "block_size": 16,
        "memory": {name: int(gib * 2**30) for name, gib in memory.items()},
    }
    add_to_report(folder, "engine", facts | {"cudagraphs": graphs})  # as an engine on CUDA does
    return folder


def spec_with_near_misses(layers: int = LAYERS) -> ModelSpec:
    """A tiny bfloat16 Llama whose first norm of each layer has a float32 weight, which no pass takes."""
    spec = tiny_spec(layers=layers, dtype=torch.bfloat16)
    for layer in spec.module.model.layers:
        layer.input_layernorm.weight.data = layer.input_layernorm.weight.data.float()
    return spec


def repeats(folder: Path) -> int:
    """How many times the final graph repeats its repeated group."""
    return max(block["count"] for block in load_dump(folder)["graphs"][-1]["blocks"])


def deepen(folder: Path, layers: int) -> None:
    """Make a dump with `LAYERS` layers one of a model with `layers` layers, by repeating its second."""
    report = json.loads((folder / REPORT).read_text())
    report["model"]["layers"] = layers
    for graph in report["graphs"]:
        steps = graph["steps"]
        graph["steps"] = steps[:1] + steps[1:3] * (layers - LAYERS) + steps[1:]
        graph["nodes"] *= layers
    for row in report["compilation"]["passes"]:
        if "verification" in row:  # it ran
            row["verification"]["sites"] *= layers
        row["near_misses"] = row.get("near_misses", []) * layers
    (folder / REPORT).write_text(json.dumps(report))
