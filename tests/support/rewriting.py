"""Passes over captured graphs: run them, read what they say, and compute what the rewritten graph computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.apply_lora import ADAPTER_INDEX
from compile_and_serve.compiler.rewrite.graph_pass import GraphPass, PassContext, PassResult, SkipReason
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier, Verification
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.models.spec import ModelSpec
from tests.support.tiny_models import capture_spec

KERNELS = frozenset({"rope_attention", "fused_linear"})
Records = dict[str, PassRecord]  # by the name of the pass


def pass_context(captured: CapturedGraph, dtype: torch.dtype, **options: Any) -> PassContext:
    return PassContext(device=torch.device("cpu"), dtype=dtype, weights=captured.weights, fake_mode=captured.fake_mode, **options)


def _unchanged(module: Any) -> None:
    """Models are captured as they are."""


_captures: dict[str | None, CapturedGraph] = {}  # a capture takes longer than all passes


def _copied(captured: CapturedGraph) -> CapturedGraph:
    graph = Graph()
    graph.output(graph.graph_copy(captured.gm.graph, {}))
    gm = GraphModule(captured.gm, graph)
    for node, original in zip(gm.graph.nodes, captured.gm.graph.nodes, strict=True):
        node.name, node.meta = original.name, dict(original.meta)
    return replace(captured, gm=gm, weights=deepcopy(captured.weights))


def rewrite(
    spec: ModelSpec,
    config: CompileConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kernels: frozenset[str] = KERNELS,
    disabled: frozenset[str] = frozenset(),
    change: Callable[[Any], object] = _unchanged,
    plan: Callable[[dict[str, str]], dict[str, str]] = lambda plan: plan,
    passes: Sequence[GraphPass] | None = None,
    verify: bool = True,
    mesh: Mesh | None = None,
) -> tuple[CapturedGraph, PassContext, Records]:
    """Every pass over a model, each verified in float64 unless `verify` is off. change: the module, plan: its tp_plan, before.

    mesh: None: the config's.
    """
    config = config or CompileConfig()
    change(spec.module)
    key = None if change is not _unchanged or spec.quantized_weights else f"{dict(spec.config)} {dtype} {type(spec.module)}"
    captured = _copied(_captures[key]) if key in _captures else capture_spec(spec, dtype, quantized=spec.quantized_weights)
    if key and key not in _captures:
        _captures[key] = _copied(captured)
    ctx = pass_context(
        captured,
        dtype,
        kernels=kernels,
        mesh=mesh or config.mesh,
        tp_plan=plan(dict(spec.tp_plan)),
        declared={ADAPTER_INDEX.name: ADAPTER_INDEX} if config.max_loras else {},
    )
    verifier = PassVerifier(spec.buffers) if verify else None
    records = run_passes(captured.gm, passes or default_passes(config), ctx, disabled, verifier)
    return captured, ctx, {record.name: record for record in records}


def result_of(records: Records, name: str) -> PassResult:
    """What a pass did that was not skipped."""
    result = records[name].result
    assert isinstance(result, PassResult), f"{name}: {result}"
    return result


def check_verified(records: Records, name: str | None = None) -> Verification:
    """The verification of one pass, or of the last of those that had something to verify. All of them are right."""
    found = {one: record.verification for one, record in records.items() if record.verification is not None}
    for one, verification in found.items():
        assert verification.passed, f"{one}: {verification.reason}"
        assert verification.relative_error < 1e-12, one
    return found[name] if name else [*found.values()][-1]


def check_unchanged(captured: CapturedGraph, ctx: PassContext, passes: Sequence[GraphPass], disabled: frozenset[str] = frozenset()) -> None:
    """Passes that run once more find nothing and change nothing. Those without a kernel are skipped."""
    before = str(captured.gm.graph)
    for record in run_passes(captured.gm, passes, ctx, disabled):
        assert isinstance(record.result, SkipReason) or record.result.matched == 0, record.name
    assert str(captured.gm.graph) == before


def compute(
    captured: CapturedGraph, weights: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The graph's one result. weights: transforms by name. tensors: a checkpoint's, in the dtypes that were captured."""
    args: list[Any] = []
    sizes = (len(inputs[name]) for name in ("input_ids", "logits_indices"))
    for node in captured.gm.graph.find_nodes(op="placeholder"):
        if name := node.meta.get("weight"):
            args.append(weights[name].fn(*(tensors[source].clone() for source in weights[name].sources)))
        else:
            args.append(inputs[node.meta["input"]] if "input" in node.meta else next(sizes))
    captured.gm.recompile()
    [out] = captured.gm(*args)
    return out
