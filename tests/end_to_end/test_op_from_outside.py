"""An op from outside, by `define` alone: captured, verified in its exact form, sharded over two ranks, compiled and run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.reports.profile import piece_work
from compile_and_serve.compiler.rewrite.graph_pass import PassError
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.library import OPS, define
from compile_and_serve.models.spec import ModelSpec
from tests.support.outside_op import ROUNDED_DOWN
from tests.support.ranks import run_ranks
from tests.support.tiny_models import caches, fill, step, tiny_spec

CPU = torch.device("cpu")
LAYERS, PROMPT = 2, [3, 141, 59, 26, 5, 35, 8]


class RoundedMlp(nn.Module):
    """Llama's MLP, whose down projection is in the op."""

    def __init__(self, mlp: Any, op: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.op = mlp.gate_proj, mlp.up_proj, op
        self.down = nn.Parameter(mlp.down_proj.weight)
        self.scale = nn.Parameter(torch.empty(self.down.shape[1], dtype=self.down.dtype, device="meta"))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.op(self.gate_proj(x_TD), self.up_proj(x_TD), self.scale, self.down)


def outside_spec(op: Any = ROUNDED_DOWN, dtype: torch.dtype = torch.float32) -> ModelSpec:
    spec = tiny_spec("LlamaForCausalLM", LAYERS, dtype)
    for layer in spec.module.model.layers:  # type: ignore[union-attr]
        layer.mlp = RoundedMlp(layer.mlp, op)  # type: ignore[union-attr]
    spec.module.requires_grad_(False)
    return spec


def run_size(size: int, rank: int, mode: Any, folder: str | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the prompt, and what the compiler reports."""
    spec = outside_spec()
    cache = {"use_cache": False} if folder is None else {"cache_dir": Path(folder)}
    config = CompileConfig(mode=mode, tensor_parallel_size=size, verify_passes=mode == "compile", **cache)  # type: ignore[arg-type]
    model = compile_model(spec, config, device=CPU, dtype=torch.float32)
    fill(model, rank=rank)
    return step(model, PROMPT, 0, caches(spec, torch.float32, tensor_parallel_size=size), TorchAttention()), dict(model.report)


def run_rank(rank: int, size: int, folder: str) -> tuple[torch.Tensor, dict[str, Any]]:
    logits, report = run_size(size, rank, "compile", folder)
    passes = {row["name"]: row["verification"] for row in report["passes"] if row.get("verification")}
    return logits, {"passes": passes, "failed": report["failed_passes"], "pieces": report["distinct_pieces"]}


@pytest.mark.exhaustive
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    whole, _ = run_size(1, 0, "eager")
    ranks = run_ranks(2, run_rank, 2, str(tmp_path / "artifacts"), folder=tmp_path)
    for logits, report in ranks:
        torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)
        assert torch.equal(logits, ranks[0][0])
        assert report["failed"] == {}
        assert report["pieces"] == 3
        assert report["passes"]["tensor_parallel"]["relative_error"] < 1e-12  # exact: the kernel takes no float64, the reference rounds


@pytest.mark.slow
def test_another_version_of_the_op_is_not_found_among_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def artifact() -> str:
        config = CompileConfig(cache_dir=tmp_path)
        return compile_model(outside_spec(), config, device=CPU, dtype=torch.float32).report["artifact"]

    assert [artifact(), artifact()] == ["made", "hit"]
    name = "cas::test_rounded_down"
    monkeypatch.setitem(OPS, name, replace(OPS[name], version=2))
    assert [artifact(), artifact()] == ["made", "hit"]


def test_the_kernel_is_the_reference() -> None:
    args = [torch.randn(*shape) for shape in ((5, 24), (5, 24), (24,), (16, 24))]
    torch.testing.assert_close(ROUNDED_DOWN(*args), torch.ops.cas.test_rounded_down_reference(*args))


def test_the_profiler_counts_its_product() -> None:
    graph = Graph()
    args = [graph.placeholder(name) for name in ("gate", "up", "scale", "weight")]
    for node, shape in zip(args, ((3, 24), (3, 24), (24,), (16, 24)), strict=True):
        node.meta["example_value"] = torch.empty(shape, device="meta")
    call = graph.call_function(ROUNDED_DOWN, tuple(args))
    call.meta["example_value"] = torch.empty(3, 16, device="meta")
    graph.output((call,))
    assert piece_work(GraphModule({}, graph), 3) == {"bytes": 4 * (2 * 3 * 24 + 24 + 16 * 24 + 3 * 16), "flops": 2 * 3 * 24 * 16}


def test_an_op_that_says_nothing_of_sharding_is_an_error_with_its_place() -> None:
    info = OPS["cas::test_rounded_down"]
    assert info.reference is not None
    silent = define(
        "test_silent_down(Tensor gate, Tensor up, Tensor scale, Tensor weight) -> Tensor",
        version=1,
        fake=lambda gate_TF, up_TF, scale_F, weight_DF: gate_TF.new_empty(gate_TF.shape[0], weight_DF.shape[0]),
        reference=info.reference,
    )
    config = CompileConfig(use_cache=False, tensor_parallel_size=2)
    with pytest.raises(PassError, match=r"cannot follow test_silent_down\S* at .*test_op_from_outside.py:\d+, in forward: dimension 1"):
        compile_model(outside_spec(silent), config, device=CPU, dtype=torch.float32)
