"""`MergedCheckpoint`: a checkpoint with one LoRA adapter merged into its weights while they are read, W + scale · B A.

Shape legend: R the adapter's rank, I and O a linear's input and output features, V tokens of the vocabulary, D features of an embedding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.peft_files import open_adapter
from compile_and_serve.runtime.lora.request import AdapterTarget
from compile_and_serve.runtime.weights.checkpoint import Checkpoint
from compile_and_serve.runtime.weights.errors import WeightError

logger = logging.getLogger(__name__)

_ANY_RANK = 1 << 20
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class _Change:
    """What an adapter adds to a weight: B A, transposed for an embedding. a_RI, b_OR: float32; B has the scale."""

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    is_embedding: bool

    def added_to(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum, float32 or float64: rounded where the weight is converted to the engine's dtype."""
        change_OI = self.b_OR @ self.a_RI
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + (change_OI.T if self.is_embedding else change_OI)


class MergedCheckpoint:
    """A `Checkpoint` whose weights are W + scale · B A where the adapter changes them. Its A and B stay in host memory.

    Raises `WeightError` if the adapter cannot be read, or changes a weight that is quantized, shared or not in the checkpoint.
    """

    def __init__(self, base: Checkpoint, adapter: Path, spec: ModelSpec) -> None:
        self._base = base
        self.shapes = base.shapes
        try:
            self._changes = _read(adapter, base.shapes, spec)
        except (AdapterError, OSError) as error:
            raise WeightError(f"merge_lora: {error}") from None
        logger.info("The adapter %s is merged into %d weights.", adapter, len(self._changes))

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """As of the base checkpoint, with merged weights."""
        for name, tensor in self._base.stream(names):
            change = self._changes.get(name)
            yield name, tensor if change is None else change.added_to(tensor)


def _read(adapter: Path, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> dict[str, _Change]:
    """By the name of a tensor, what the adapter adds to it."""
    names, refused = _weights_by_module(shapes, spec), _unmergeable(spec)
    matrices = {module: shapes[name] for module, name in names.items()} | {module: shape for module, (shape, _) in refused.items()}
    targets = {
        module: (AdapterTarget(module, columns, rows), AdapterTarget(module, rows, columns, is_embedding=True))
        for module, (rows, columns) in matrices.items()
    }
    changes: dict[str, _Change] = {}
    with open_adapter(adapter, targets, _ANY_RANK) as opened:
        for part, a_RI, b_OR in opened.tensors(torch.float32):
            module = part.target.module
            if module in refused:
                raise AdapterError(f"{adapter} changes {module}, {refused[module][1]}.")
            if names[module] in changes:
                raise AdapterError(f"{adapter} changes {module} twice.")
            changes[names[module]] = _Change(a_RI, b_OR, part.target.is_embedding)
    return changes


def _weights_by_module(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> dict[str, str]:
    """Module → the tensor of its weight, a matrix. Modules go by their names in the checkpoint and in the model."""
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        for known in (name, spec.weight_map.get(name, name)):
            if known is not None and known.endswith(_WEIGHT) and len(shape) == 2:
                found.setdefault(known.removesuffix(_WEIGHT), name)
    return found


def _unmergeable(spec: ModelSpec) -> dict[str, tuple[torch.Size, str]]:
    """Module → its weight's shape, and why nothing can be added to it."""
    modules_of: dict[int, list[str]] = {}
    found: dict[str, tuple[torch.Size, str]] = {}
    for name, parameter in spec.module.named_parameters(remove_duplicate=False):
        if not name.endswith(_WEIGHT) or parameter.dim() != 2:
            continue
        module = name.removesuffix(_WEIGHT)
        modules_of.setdefault(id(parameter), []).append(module)
        stored = spec.quantized_weights.get(name)
        if stored is not None:
            how = "which is quantized: give the unquantized model" if stored.is_quantized else "which is stored in another order"
            found[module] = parameter.shape, how
        elif (shared := modules_of[id(parameter)])[1:]:
            found |= {one: (parameter.shape, f"which shares its weight: {' and '.join(shared)} would both change") for one in shared}
    return found
