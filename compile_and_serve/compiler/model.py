"""What the runtime holds of a model: a callable with weights to fill, compiled or eager."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from compile_and_serve.compiler.inductor import PieceCallable
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, OpStep
from compile_and_serve.compiler.pieces.plan_function import PlanFunction, make_plan_function, step_calls
from compile_and_serve.compiler.pieces.trace import is_tracing, named_calls
from compile_and_serve.compiler.weights.arena import WeightArena
from compile_and_serve.compiler.weights.transforms import WeightTable, WeightTransform, checkpoint_specs
from compile_and_serve.custom_ops.mesh import AlongAxis, ColwiseParts
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import Step, StepInput, StepOutput, running
from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.custom_ops.weight_functions import TensorSpec


class WeightMismatchError(ValueError):
    """A weight that the model cannot take."""


Outputs = dict[str, torch.Tensor]
StepModel = Callable[[Step], Outputs]
JoinPieces = Callable[[], Mapping[str, PieceCallable]]


class ModelSource(Protocol):
    """What the compiler reads of a model's spec.

    module: on the meta device. config: plain data that, with the module's source, says what the module computes.
    inputs, state, outputs: what a step takes, keeps and gives. buffers: values of the buffers that no checkpoint holds.
    tp_plan: glob over module names → how its weight is sharded over ranks.
    quantized_weights: how the checkpoint holds the parameters that it holds quantized.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def inputs(self) -> Sequence[StepInput]: ...

    @property
    def state(self) -> Sequence[StateGroup]: ...

    @property
    def outputs(self) -> Sequence[StepOutput]: ...

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def tp_plan(self) -> Mapping[str, str | AlongAxis | ColwiseParts]: ...

    @property
    def quantized_weights(self) -> Mapping[str, StoredWeight]: ...


class Model(Protocol):
    """`model(step)` → the step's outputs by name.

    inputs, state: what a step takes and keeps: the model's own, and what passes added.
    source_specs: what a checkpoint must hold, by parameter name (with the scales of those that it holds quantized).
    transforms: how the weights are made of it.
    plans: what runs the model's steps once its weights are loaded: any step first, steps that use no optional input last.
    report: what was done and how long it took.
    """

    report: dict[str, Any]

    @property
    def plans(self) -> Sequence[StepModel]: ...

    @property
    def inputs(self) -> Sequence[StepInput]: ...

    @property
    def state(self) -> Sequence[StateGroup]: ...

    @property
    def source_specs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def transforms(self) -> Sequence[WeightTransform]: ...

    def assign(self, target: str, tensor: torch.Tensor) -> None: ...

    def finish_loading(self) -> None: ...

    def weight_memory(self) -> list[torch.Tensor]:
        """Tensors whose storages hold all weights and buffers. `assign` and `finish_loading` may fill them again."""
        ...

    def __call__(self, step: Step) -> Outputs: ...


@dataclass(kw_only=True)
class CompiledModel:
    """A model as its plan and its compiled pieces.

    inputs, state: of the spec, then those that passes added.
    plain_plan: of steps that use no optional input, over some of the same weights; None: there is one plan for all.
    join_pieces: returns the distinct pieces by fingerprint once they are loaded (they may load while weights are read).
    is_last_stage: whether it gives the outputs of the spec; an earlier stage gives what the next one receives. whole_transforms: of all
    stages; None: of the plan. sources_of_others: what the checkpoint holds for other stages alone.
    """

    spec: ModelSource
    inputs: tuple[StepInput, ...]
    state: tuple[StateGroup, ...]
    plan: ExecutionPlan
    join_pieces: JoinPieces
    device: torch.device
    report: dict[str, Any]
    work_dir: tempfile.TemporaryDirectory[str]  # Inductor's files; removed with the model
    plain_plan: ExecutionPlan | None = None
    is_last_stage: bool = True
    whole_transforms: tuple[WeightTransform, ...] | None = None
    sources_of_others: frozenset[str] = frozenset()
    _weights: dict[str, torch.Tensor] = field(default_factory=dict)
    _loaded: LoadedPlan | None = field(default=None, init=False)
    _plain: LoadedPlan | None = field(default=None, init=False)  # of plain_plan, after `finish_loading`

    @property
    def plans(self) -> tuple[StepModel, ...]:
        return (self,) if self._plain is None else (self, self._plain)

    @property
    def source_specs(self) -> dict[str, TensorSpec]:
        specs = stored_specs(self.spec.module, self.spec.buffers)
        return _used(checkpoint_specs(specs, self.spec.quantized_weights), self.transforms)

    @property
    def transforms(self) -> tuple[WeightTransform, ...]:
        # Those of buffers, and those without sources (slots of adapters), are not loaded from a checkpoint.
        return tuple(t for t in self.plan.transforms if not set(t.sources) <= self.spec.buffers.keys())

    @cached_property
    def pieces(self) -> Mapping[str, PieceCallable]:
        """The distinct pieces by fingerprint; waits until they are loaded."""
        return self.join_pieces()

    @cached_property
    def _arena(self) -> WeightArena:
        return WeightArena({t.target: t.spec for t in self.plan.transforms}, self.device)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The model's own weights by name; read only."""
        return self._weights

    def weight_memory(self) -> list[torch.Tensor]:
        """See `Model.weight_memory`."""
        return [self._arena.memory]

    def assign(self, target: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` into the model's own storage as weight `target`. Raises `WeightMismatchError` for a wrong shape."""
        self._weights[target] = _fill(target, self._arena.tensor(target), tensor)

    def finish_loading(self) -> None:
        """Bind the weights; raises `WeightMismatchError` naming the ones that are missing."""
        for name, value in self.spec.buffers.items():
            for transform in self.plan.transforms:
                if transform.sources == (name,):
                    self.assign(transform.target, transform.fn(value.to(self.device)))
        for transform in self.plan.transforms:
            if not transform.sources:
                self.assign(transform.target, transform.fn())
        _require(self._weights, [t.target for t in self.plan.transforms])
        self._loaded = LoadedPlan(self, self.plan)
        if self.plain_plan is not None:
            self._plain = LoadedPlan(self, self.plain_plan)

    def __call__(self, step: Step) -> Outputs:
        assert self._loaded is not None, "the model's weights are not loaded"
        return self._loaded(step)

    @cached_property
    def writes_state(self) -> LoadedPlan:
        """The model up to its last op that may write state: what is left to do where nobody reads the outputs."""
        last = max(i for i, step in enumerate(self.plan.steps) if isinstance(step, OpStep))
        return LoadedPlan(self, self.plan.cut(last + 1)[0])


class LoadedPlan:
    """One plan of a compiled model, over its weights and pieces."""

    def __init__(self, model: CompiledModel, plan: ExecutionPlan) -> None:
        self.plan, self.inputs, self.pieces, self.weights = plan, model.inputs, model.pieces, model.weights
        self._forward = make_plan_function(plan, step_calls(plan, model.pieces), model.weights)
        self._traced: PlanFunction | None = None  # with names for a trace

    def __call__(self, step: Step) -> Outputs:
        with running(step.metadata):
            forward = self._forward if not is_tracing() else self._forward_traced
            return dict(zip(self.plan.outputs, forward(step.values), strict=True))

    @property
    def _forward_traced(self) -> PlanFunction:
        if self._traced is None:
            self._traced = make_plan_function(self.plan, named_calls(self.plan, step_calls(self.plan, self.pieces)), self.weights)
        return self._traced


@dataclass(kw_only=True)
class EagerModel:
    """The plain module, run as it is written: the yardstick of the compiled one, and one flag away."""

    spec: ModelSource
    device: torch.device
    report: dict[str, Any]

    def __post_init__(self) -> None:
        self.module = _materialized(self.spec.module, self.device)
        self._assigned: set[str] = set()
        self._optional = frozenset(one.name for one in self.spec.inputs if one.optional)

    @property
    def inputs(self) -> Sequence[StepInput]:
        return self.spec.inputs

    @property
    def state(self) -> Sequence[StateGroup]:
        return self.spec.state

    @property
    def plans(self) -> tuple[StepModel, ...]:
        return (self,)

    @property
    def source_specs(self) -> dict[str, TensorSpec]:
        return _used(checkpoint_specs(self._specs(), self.spec.quantized_weights), self.transforms)

    def _specs(self) -> dict[str, TensorSpec]:
        return stored_specs(self.module, self.spec.buffers)

    @property
    def transforms(self) -> tuple[WeightTransform, ...]:
        specs = self._specs()
        return WeightTable(specs, stored=self.spec.quantized_weights).keep(list(specs))

    def weight_memory(self) -> list[torch.Tensor]:
        """See `Model.weight_memory`."""
        return [tensor.data for tensor in (*self.module.parameters(), *self.module.buffers())]

    def assign(self, target: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` into the parameter or buffer `target`. Raises `WeightMismatchError` for a wrong shape."""
        module, _, leaf = target.rpartition(".")
        _fill(target, getattr(self.module.get_submodule(module), leaf).data, tensor)
        self._assigned.add(target)

    def finish_loading(self) -> None:
        """Fill the buffers; raises `WeightMismatchError` naming the parameters that are missing."""
        _require(self._assigned, list(self._specs()))
        for name, value in self.spec.buffers.items():
            self.module.get_buffer(name).copy_(value)

    def __call__(self, step: Step) -> Outputs:
        state = {group.name: group.argument(step.state) for group in self.spec.state}
        inputs = step.inputs
        if self._optional and not step.uses_optional:
            inputs = {name: tensor for name, tensor in inputs.items() if name not in self._optional}
        with torch.no_grad(), running(step.metadata):
            results = self.module(**inputs, **state)
        names = [output.name for output in self.spec.outputs]
        return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))


StageCallback = Callable[[str, float, str], None]


def parameter_specs(module: nn.Module) -> dict[str, TensorSpec]:
    """Name → spec of a module's parameters; tied ones once, under their first name."""
    return {n: TensorSpec(shape=tuple(p.shape), dtype=p.dtype) for n, p in module.named_parameters()}


def stored_specs(module: nn.Module, computed: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """`parameter_specs`, and those of the buffers that a checkpoint holds. computed: the other buffers."""
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in computed}
    specs = {name: TensorSpec(shape=tuple(b.shape), dtype=b.dtype) for name, b in buffers.items()}
    return parameter_specs(module) | specs


def _used(specs: Mapping[str, TensorSpec], transforms: Sequence[WeightTransform]) -> dict[str, TensorSpec]:
    used = {source for transform in transforms for source in transform.sources}
    return {name: spec for name, spec in specs.items() if name in used}


def _materialized(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with uninitialized tensors on `device`; parameters that were one (tied) stay one, unlike with `to_empty`."""
    made: dict[int, torch.Tensor] = {}

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for child in module.modules():
        tensors = itertools.chain(
            child.named_parameters(recurse=False, remove_duplicate=False), child.named_buffers(recurse=False, remove_duplicate=False)
        )
        for name, tensor in list(tensors):
            setattr(child, name, on_device(tensor))
    return module


def _fill(name: str, place: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape != place.shape:
        raise WeightMismatchError(
            f"Weight {name} has shape {list(tensor.shape)}, expected {list(place.shape)}: the checkpoint does not fit its config."
        )
    return place.copy_(tensor)


def _require(present: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WeightMismatchError(f"The checkpoint lacks {', '.join(missing[:3])}{more}.")
