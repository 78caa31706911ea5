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
from compile_and_serve.compiler.compat import FakeTensorMode, GraphBreakError, capture_full_graph, mark_symbolic, regions_are_reused
from compile_and_serve.compiler.weights.transforms import WeightTable
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import StepInput, declarations_by_name
from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.custom_ops.weight_functions import TensorSpec

log = logging.getLogger(__name__)

EXAMPLE_TOKENS, EXAMPLE_ROWS = 37, 5  # lengths while the graph is captured; nothing may depend on them


class CaptureError(ValueError):
    """The model could not be captured as one graph."""


@dataclass(kw_only=True, slots=True)
class CapturedGraph:
    """One whole-model graph.

    Every placeholder has meta["weight"], a parameter's name, or meta["input"], an input's or a state tensor's name, and then
    meta["declaration"], its `StepInput` or `StateGroup`.
    """

    gm: GraphModule
    weights: WeightTable
    fake_mode: FakeTensorMode
    bytecode: list[CodeType] = field(default_factory=list)  # what Dynamo made of `forward`, for dumps
    regions: int = 0  # blocks that came as calls of regions, which Dynamo traces once for those that are alike


def example_tensors(inputs: Sequence[StepInput], groups: Sequence[StateGroup], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Meta tensors of a step's inputs and state by name. dtype: of the KV cache."""
    tensors = {one.name: torch.empty(one.shape(EXAMPLE_TOKENS, EXAMPLE_ROWS), dtype=one.dtype, device="meta") for one in inputs}
    for one in inputs:
        if one.symbolic_dim is not None and one.length is not None:
            mark_symbolic(tensors[one.name], one.symbolic_dim, one.length)
    for group in groups:
        tensors |= example_state(group, dtype)
    return tensors


def example_state(group: StateGroup, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Meta tensors of a group's state by name. dtype: of the KV cache."""
    layout, meta = group.example_layout(dtype), torch.device("meta")
    pages = layout.num_example_pages
    tensors = {name: torch.empty((pages, *placed.shape), dtype=placed.dtype, device=meta) for name, placed in layout.tensors.items()}
    return tensors | layout.column_tensors(meta)


def capture(
    module: nn.Module,
    inputs: Sequence[StepInput],
    groups: Sequence[StateGroup],
    dtype: torch.dtype,
    *,
    quantized: Mapping[str, StoredWeight] | None = None,
    with_bytecode: bool = False,
) -> CapturedGraph:
    """Capture a step of `module` with symbolic lengths.

    module: on the meta device. inputs, groups: what its `forward` takes by name. dtype: of the KV cache.
    quantized: parameters that the checkpoint holds in another form. with_bytecode: keep what Dynamo makes of `forward`.
    Raises `CaptureError` with Dynamo's reason where the model's code cannot be one graph.
    """
    tensors = example_tensors(inputs, groups, dtype)
    arguments: dict[str, Any] = {one.name: tensors[one.name] for one in inputs}
    arguments |= {group.name: group.argument(tensors) for group in groups}
    blocks = block_classes(module) if regions_are_reused() else []
    try:
        traced = _trace(module, arguments, with_bytecode, blocks)
    except CaptureError as error:
        if not blocks:
            raise
        traced = _trace(module, arguments, with_bytecode, [])  # raises where the blocks were not what it failed on
        names = ", ".join(cls.__name__ for cls in blocks)
        log.info("Every %s is traced by itself, since one could not be traced for all: %s", names, error)
    gm, examples, bytecode = traced
    graph = _name_placeholders(module, tensors, declarations_by_name(inputs, groups), quantized or {}, gm, examples)
    graph.bytecode = bytecode
    graph.regions = inline_regions(gm)
    return graph


def _trace(
    module: nn.Module, arguments: Mapping[str, Any], with_bytecode: bool, blocks: list[type[nn.Module]]
) -> tuple[GraphModule, list[Any], list[CodeType]]:
    """The graph of `module(**arguments)`, what its placeholders stand for, and bytecode. blocks: these classes' modules are regions."""
    taken: list[tuple[GraphModule, list[Any]]] = []

    def backend(gm: GraphModule, examples: Sequence[Any]) -> Any:
        taken.append((gm, list(examples)))
        return gm.forward

    try:
        with traced_once(blocks):
            bytecode = capture_full_graph(module, backend, arguments, with_bytecode=with_bytecode)
    except GraphBreakError as error:
        raise CaptureError(
            f"The model's forward cannot be captured as one graph: {error}; change that line, or run the model with --enforce-eager."
        ) from error
    assert len(taken) == 1, f"capture gave {len(taken)} graphs"
    return *taken[0], bytecode


def _name_placeholders(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    declarations: Mapping[str, StepInput | StateGroup],
    quantized: Mapping[str, StoredWeight],
    gm: GraphModule,
    examples: Sequence[Any],
) -> CapturedGraph:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weight_names = {id(tensor): name for name, tensor in tensors.items()}
    input_names = {id(tensor): name for name, tensor in inputs.items()}
    specs, fake_mode = {}, None
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        if isinstance(example, torch.SymInt):
            continue  # a length; `canonicalize` removes it
        if id(example) in input_names:
            name = node.meta["input"] = input_names[id(example)]
            node.meta["declaration"] = declarations[name]
        else:
            assert id(example) in weight_names, f"captured input {node.name} is neither a parameter nor an argument"
            node.meta["weight"] = name = weight_names[id(example)]
            specs[name] = TensorSpec(shape=tuple(example.shape), dtype=example.dtype)
        fake_mode = node.meta["example_value"].fake_mode
    assert fake_mode is not None, "the captured graph has no tensor input"
    weights = WeightTable(specs, stored=quantized, aliases=_aliases(module))
    return CapturedGraph(gm=gm, weights=weights, fake_mode=fake_mode)


def _aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of parameters that have several, by their first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}
