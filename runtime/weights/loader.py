"""Weights from a checkpoint into a compiled model, tensor by tensor, through the transforms that its passes recorded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from compiler.weights import TensorSpec, WeightTransform
from models.spec import ModelSpec
from runtime.weights.checkpoint import open_checkpoint
from runtime.weights.dummy import dummy_tensors
from runtime.weights.errors import WeightError

logger = logging.getLogger(__name__)

_NAMES_IN_A_MESSAGE = 5


class WeightTarget(Protocol):
    """What the loader needs of a compiled model (`compiler.CompiledModel` is one)."""

    @property
    def source_specs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def transforms(self) -> Sequence[WeightTransform]: ...

    def assign(self, name: str, tensor: torch.Tensor) -> None: ...

    def finish_loading(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """num_bytes: of the tensors as they arrived; unexpected: checkpoint tensors that the model has no use for."""

    num_tensors: int
    num_bytes: int
    seconds: float
    unexpected: tuple[str, ...] = ()


def load_weights(
    compiled: WeightTarget,
    spec: ModelSpec,
    path: Path,
    *,
    load_format: Literal["auto", "dummy"],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> LoadReport:
    """Fill `compiled` from the folder or GGUF file at `path` ("dummy": with random values, nothing but the config is needed).

    Floating-point tensors are converted to `dtype` on `device` before a transform sees them. A source is held only until the
    last transform that needs it has run. Raises `WeightError` (missing or truncated file, missing tensor, wrong shape) before
    any data is read.
    """
    started = time.perf_counter()
    unexpected: tuple[str, ...] = ()
    # a buffer that the compiled model holds is a source like any other, but no checkpoint has it
    buffers = [name for name in compiled.source_specs if name in spec.buffers]
    sources = {name: tensor for name, tensor in compiled.source_specs.items() if name not in spec.buffers}
    if load_format == "dummy":
        std = float(spec.config.get("initializer_range", 0.02))
        tensors = dummy_tensors(sources, device=device, seed=seed, std=std)
    else:
        method = (spec.config.get("quantization_config") or {}).get("quant_method")
        if method is not None:
            raise WeightError(
                f"The checkpoint is quantized with {method!r}, which is not supported: use an unquantized one."
            )
        tensors, unexpected = _checked_stream(sources, spec.weight_map, path)
    num_tensors, num_bytes = 0, 0
    with torch.no_grad():
        sink = _Transforms(compiled)
        for name, tensor in tensors:
            num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.nbytes
            sink.add(name, tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None))
        for name in buffers:
            sink.add(name, spec.buffers[name].to(device))
    compiled.finish_loading()
    seconds = time.perf_counter() - started
    return LoadReport(num_tensors=num_tensors, num_bytes=num_bytes, seconds=seconds, unexpected=unexpected)


def _checked_stream(
    specs: Mapping[str, TensorSpec], weight_map: Mapping[str, str | None], path: Path
) -> tuple[Iterator[tuple[str, torch.Tensor]], tuple[str, ...]]:
    """Compare the checkpoint's names and shapes with the model's, then stream under the model's names."""
    checkpoint = open_checkpoint(path)
    wanted: dict[str, str] = {}  # checkpoint name → parameter name
    unexpected: list[str] = []
    for name, shape in checkpoint.shapes.items():
        parameter = weight_map.get(name, name)
        if parameter is None:
            continue
        if parameter not in specs:
            unexpected.append(name)
            continue
        wanted[name] = parameter
        expected = tuple(specs[parameter].shape)
        if shape != expected:
            raise WeightError(
                f"{name} in {path} has shape {list(shape)}, but the model's config makes it {list(expected)}: "
                "use the config.json that belongs to these weights."
            )
    missing = sorted(specs.keys() - wanted.values(), key=list(specs).index)
    if missing:
        raise WeightError(
            f"{path} lacks {_some(missing)}, which the model's config asks for: use complete weights of the same model."
        )
    if unexpected:
        logger.warning("%s holds tensors that the model does not use: %s.", path, _some(unexpected))
    stream = ((wanted[name], tensor) for name, tensor in checkpoint.stream(set(wanted)))
    return stream, tuple(unexpected)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_A_MESSAGE])
    more = len(names) - _NAMES_IN_A_MESSAGE
    return shown if more <= 0 else f"{shown} and {more} more"


class _Transforms:
    """Runs each transform as soon as its last source has come, and forgets a source after its last use."""

    def __init__(self, compiled: WeightTarget) -> None:
        self._compiled = compiled
        self._by_source: dict[str, list[int]] = {}
        self._waiting_for = [set(transform.sources) for transform in compiled.transforms]
        for index, transform in enumerate(compiled.transforms):
            for source in set(transform.sources):
                self._by_source.setdefault(source, []).append(index)
        self._held: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self._by_source:
            self._compiled.assign(name, tensor)
            return
        self._held[name] = tensor
        ready = []
        for index in self._by_source[name]:
            self._waiting_for[index].discard(name)
            if not self._waiting_for[index]:
                ready.append(index)
        for index in ready:
            self._run(self._compiled.transforms[index], index)

    def _run(self, transform: WeightTransform, index: int) -> None:
        result = transform.fn(*(self._held[source] for source in transform.sources))
        assert tuple(result.shape) == tuple(transform.spec.shape), (
            f"{transform.target}: {result.shape} != {transform.spec}"
        )
        assert result.dtype == transform.spec.dtype, f"{transform.target}: {result.dtype} != {transform.spec}"
        self._compiled.assign(transform.target, result)
        for source in set(transform.sources):
            self._by_source[source].remove(index)
            if not self._by_source[source]:
                del self._held[source]
