"""From a plain module on the meta device to one FX graph: capture is Dynamo's, naming what it lifted is ours.

Nothing is allocated and nothing runs: parameters and inputs are meta tensors. The captured graph is all that the rest
needs; Dynamo's own guarded callable is thrown away, so there is nothing that could recompile while serving.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from compile_and_serve.compiler.capture.repeated_blocks import block_classes, inline_regions, traced_once
from compile_and_serve.compiler.compat import (
    FakeTensorMode,
    GraphBreakError,
    capture_full_graph,
    mark_token_dimension,
    regions_are_reused,
)
from compile_and_serve.compiler.weights.quantized_expressions import checkpoint_specs, plain_expressions
from compile_and_serve.compiler.weights.transforms import TensorSpec, WeightTable
from compile_and_serve.custom_ops.quantization import QuantizedWeight

log = logging.getLogger(__name__)

TOKENS, ROWS = "tokens", "rows"  # the two symbolic lengths: tokens of a step, rows of logits wanted
EXAMPLE_TOKENS, EXAMPLE_ROWS = 37, 5  # what they are while the graph is captured; nothing may depend on it


class CaptureError(ValueError):
    """The model could not be captured as one graph."""


@dataclass(kw_only=True, slots=True)
class CapturedGraph:
    """One whole-model graph. Every placeholder has meta["weight"] (a parameter's name) or meta["input"] (an argument's name)."""

    gm: GraphModule
    weights: WeightTable
    fake_mode: FakeTensorMode
    bytecode: list[CodeType] = field(default_factory=list)  # what Dynamo made of `forward`, for dumps
    regions: int = 0  # blocks that came as calls of regions, which Dynamo traces once for those that are alike


def example_inputs(kv_cache_shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Meta tensors of a step's arguments by name, in the order of `forward`; the caches are `kv_cache.0`, `kv_cache.1`, …"""
    ids = {name: torch.empty(EXAMPLE_TOKENS, dtype=torch.int64, device="meta") for name in ("input_ids", "positions")}
    caches = {
        f"kv_cache.{i}": torch.empty(shape, dtype=dtype, device="meta") for i, shape in enumerate(kv_cache_shapes)
    }
    rows = torch.empty(EXAMPLE_ROWS, dtype=torch.int64, device="meta")
    for tensor in ids.values():
        mark_token_dimension(tensor, TOKENS)
    mark_token_dimension(rows, ROWS)
    return {**ids, **caches, "logits_indices": rows}


def capture(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], *, quantized: Mapping[str, QuantizedWeight] | None = None,
    with_bytecode: bool = False,
) -> CapturedGraph:  # fmt: skip
    """Capture `module(input_ids, positions, kv_caches, logits_indices)` with symbolic token dimensions.

    module: on the meta device. inputs: from `example_inputs`. quantized: parameters that the checkpoint holds quantized.
    with_bytecode: keep what Dynamo makes of `forward`.
    Raises `CaptureError` with Dynamo's reason where the model's code cannot be one graph.
    """
    kv_caches = [tensor for name, tensor in inputs.items() if name.startswith("kv_cache.")]
    args = (inputs["input_ids"], inputs["positions"], kv_caches, inputs["logits_indices"])
    blocks = block_classes(module) if regions_are_reused() else []
    try:
        traced = _trace(module, args, with_bytecode, blocks)
    except CaptureError as error:
        if not blocks:
            raise
        traced = _trace(module, args, with_bytecode, [])  # raises where the blocks were not what it failed on
        names = ", ".join(cls.__name__ for cls in blocks)
        log.info("Every %s is traced by itself, since one could not be traced for all: %s", names, error)
    gm, examples, bytecode = traced
    graph = _name_placeholders(module, inputs, quantized or {}, gm, examples)
    graph.bytecode = bytecode
    graph.regions = inline_regions(gm)
    return graph


def _trace(
    module: nn.Module, args: tuple[Any, ...], with_bytecode: bool, blocks: list[type[nn.Module]]
) -> tuple[GraphModule, list[Any], list[CodeType]]:
    """The graph of `module(*args)`, what its placeholders stand for, and bytecode. blocks: these classes' modules are regions."""
    taken: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        taken.append((gm, list(examples)))
        return gm.forward

    try:
        with traced_once(blocks):
            bytecode = capture_full_graph(module, backend, args, with_bytecode=with_bytecode)
    except GraphBreakError as error:
        reason = str(error).strip().split("\n\n")[0]
        raise CaptureError(f"The model's forward cannot be captured as one graph: {reason}") from error
    assert len(taken) == 1, f"capture gave {len(taken)} graphs"
    return *taken[0], bytecode


def _name_placeholders(
    module: nn.Module, inputs: Mapping[str, torch.Tensor], quantized: Mapping[str, QuantizedWeight], gm: GraphModule,
    examples: Sequence[Any],
) -> CapturedGraph:  # fmt: skip
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weight_names = {id(tensor): name for name, tensor in tensors.items()}
    input_names = {id(tensor): name for name, tensor in inputs.items()}
    specs, fake_mode = {}, None
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        if isinstance(example, torch.SymInt):
            continue  # a length; `canonicalize` removes it
        if id(example) in input_names:
            node.meta["input"] = input_names[id(example)]
        else:
            assert id(example) in weight_names, f"captured input {node.name} is neither a parameter nor an argument"
            node.meta["weight"] = name = weight_names[id(example)]
            specs[name] = TensorSpec(shape=tuple(example.shape), dtype=example.dtype)
        fake_mode = node.meta["example_value"].fake_mode
    assert fake_mode is not None, "the captured graph has no tensor input"
    here = {name: stored for name, stored in quantized.items() if name in specs}
    weights = WeightTable(
        specs,
        sources=checkpoint_specs(specs, here),
        expressions=plain_expressions(specs, here),
        aliases=_aliases(module),
    )
    return CapturedGraph(gm=gm, weights=weights, fake_mode=fake_mode)


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of parameters that have several, by their first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}
