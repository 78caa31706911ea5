"""Load a checkpoint into a compiled model, tensor by tensor, through the transforms that its passes recorded."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from compile_and_serve.compiler.weights.transforms import WeightTransform, select, source_of
from compile_and_serve.custom_ops.library import EXPERT_SLOTS
from compile_and_serve.custom_ops.mesh import ORIGIN, Coordinates
from compile_and_serve.custom_ops.quantization import LARGEST
from compile_and_serve.custom_ops.stored_weight import StoredTensor
from compile_and_serve.custom_ops.weight_functions import Expression, TensorSpec
from compile_and_serve.models.cache_scales import CACHE_SCALES, UnfoldableScalesError, cache_scale_names, weight_factors
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from compile_and_serve.runtime.weights.dummy import dummy_tensors
from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.merged import MergedCheckpoint
from compile_and_serve.runtime.weights.own_experts import own_experts
from compile_and_serve.runtime.weights.renamed import with_model_names

logger = logging.getLogger(__name__)

_NAMES_IN_A_MESSAGE = 5


class WeightTarget(Protocol):
    """What the loader needs of a compiled model; `compiler.CompiledModel` has it."""

    @property
    def source_specs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def transforms(self) -> Sequence[WeightTransform]: ...

    def assign(self, name: str, tensor: torch.Tensor) -> None: ...

    def finish_loading(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What was loaded.

    num_bytes: of the parts of tensors that this rank took, in the checkpoint's dtype. unexpected: names of checkpoint
    tensors that the model does not use. max_waiting_bytes: the most memory of tensors that waited for others of their transform.
    """

    num_tensors: int
    num_bytes: int
    max_waiting_bytes: int
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
    coordinates: Coordinates = ORIGIN,
    checkpoint: Checkpoint | None = None,
    merge_lora: Path | None = None,
    fold_cache_scales: bool = False,
) -> LoadReport:
    """Load the folder or GGUF file at `path` into `compiled`; the load format "dummy" makes random values instead.

    Floating-point tensors are converted to `dtype` on `device` before they are transformed, except quantized values and
    their scales. A source is held only until its last transform has run. coordinates: of this rank; only its part of a sharded tensor is
    read, converted and held. checkpoint: what to read in place of the files at `path`. merge_lora: an adapter
    that is merged into the weights. fold_cache_scales: as `models/cache_scales.py` does,
    for a float8 KV cache without adapters.

    Raises `WeightError` before any data is read if a file is missing or truncated, or a tensor is missing or has a wrong
    shape.
    """
    started = time.perf_counter()
    unexpected: tuple[str, ...] = ()
    # Buffers of the compiled model are sources like parameters, but no checkpoint contains them.
    buffers = [name for name in compiled.source_specs if name in spec.buffers]
    sources = {name: tensor for name, tensor in compiled.source_specs.items() if name not in spec.buffers}
    experts: dict[str, list[int]] = {}
    if load_format == "dummy":
        std = float(spec.config.get("initializer_range", 0.02))
        tensors = dummy_tensors(sources, device=device, seed=seed, std=std, stored=spec.quantized_weights)
    else:
        in_parts = {part.parameter for part in spec.parts.values()}
        experts = {name: own for name, own in own_experts(compiled.transforms, sources, coordinates).items() if name in in_parts}
        tensors, unexpected = _checked_stream(sources, spec, path, checkpoint, fold_cache_scales, merge_lora, experts)
        tensors = _joined(tensors, sources, spec, experts, device=device, dtype=dtype)
    num_tensors = 0
    with torch.no_grad():
        # A float32 parameter beside others (a router's bias) keeps its values.
        stored = _stored_tensors(spec)
        dtypes = {n: one.dtype for n, one in sources.items() if n in stored or one.dtype == torch.float32}
        sink = _Transforms(compiled, coordinates=coordinates, device=device, dtype=dtype, dtypes=dtypes, experts=experts)
        for name, tensor in tensors:
            num_tensors += 1
            sink.add(name, tensor)
        num_bytes = sink.num_bytes
        for name in buffers:
            sink.add(name, spec.buffers[name], convert=False)
    compiled.finish_loading()
    seconds = time.perf_counter() - started
    return LoadReport(
        num_tensors=num_tensors, num_bytes=num_bytes, max_waiting_bytes=sink.max_waiting_bytes, seconds=seconds, unexpected=unexpected
    )


def _stored_tensors(spec: ModelSpec) -> dict[str, StoredTensor]:
    """The checkpoint's tensors of quantized weights, by name."""
    return {tensor.name: tensor for one in spec.quantized_weights.values() if one.is_quantized for tensor in one.tensors}


def _checked_stream(
    specs: Mapping[str, TensorSpec],
    spec: ModelSpec,
    path: Path,
    checkpoint: Checkpoint | None,
    fold_cache_scales: bool,
    merge_lora: Path | None,
    experts: Mapping[str, Sequence[int]],
) -> tuple[Iterator[tuple[str, torch.Tensor]], tuple[str, ...]]:
    """Check the checkpoint's names and shapes against the model's. Returns the stream under the model's names, and the names
    of unexpected tensors.
    """
    packed = frozenset(name for name in (*specs, *spec.parts) if _is_packed(name, specs, spec))
    checkpoint = checkpoint or open_checkpoint(path, packed)
    stored = _stored_tensors(spec)
    unused = {name for one in spec.quantized_weights.values() for name in one.unused}
    checkpoint = with_model_names(checkpoint, specs.keys() | spec.parts.keys() | spec.weight_map.keys() | unused)
    if merge_lora is not None:
        checkpoint = MergedCheckpoint(checkpoint, merge_lora, spec)
    scales = stored.keys() - spec.quantized_weights.keys()
    wanted: dict[str, str] = {}  # checkpoint name → parameter name; of a part, its own name
    part_names: dict[str, set[str]] = {}  # parameter → names of its parts in the checkpoint
    unexpected: list[str] = []
    for name, shape in checkpoint.shapes.items():
        part = spec.parts.get(name)
        if part is not None and part.parameter in specs:
            part_names.setdefault(part.parameter, set()).add(name)
            wanted[name] = name
            expected = (part.num_rows, *specs[part.parameter].shape[2:])
            if _is_padded(part.parameter, shape, expected, stored):
                continue
            if not (part.parameter in scales and _without_ones(shape) == _without_ones(expected)):
                _check_shape(name, shape, expected, path)
            continue
        parameter = spec.weight_map.get(name, name)
        if parameter is None:
            continue
        if parameter not in specs:
            if parameter not in unused and parameter not in scales:  # this compilation does not use the scale
                unexpected.append(name)
            continue
        wanted[name] = parameter
        expected = tuple(specs[parameter].shape)
        if _is_padded(parameter, shape, expected, stored):
            continue
        if not (parameter in scales and _without_ones(shape) == _without_ones(expected)):
            _check_shape(name, shape, expected, path)
    missing = sorted(specs.keys() - wanted.values() - part_names.keys(), key=list(specs).index)
    missing += [n for n, part in spec.parts.items() if n not in part_names.get(part.parameter, (n,))]
    if missing:
        raise WeightError(
            f"{path} lacks {_abbreviate(missing)}, which the model's config requires: use complete weights of the same model."
        )
    cache_scales = [name for name in unexpected if name.rpartition(".")[2] in CACHE_SCALES]
    others = [name for name in unexpected if name not in cache_scales]
    factors = _cache_scale_factors(spec, checkpoint, cache_scales, fold_cache_scales) if cache_scales else {}
    if factors is None:
        factors = {}
    else:
        unexpected = others
    if others:
        logger.warning("%s has tensors that the model does not use: %s.", path, _abbreviate(others))

    def is_read(name: str) -> bool:
        """Not an expert of other ranks."""
        part = spec.parts.get(name)
        return part is None or part.parameter not in experts or part.index in experts[part.parameter]

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint.stream(set(filter(is_read, wanted))):
            is_part = name in spec.parts and wanted[name] == name
            expected = specs[spec.parts[name].parameter if is_part else wanted[name]]
            if tensor.dtype != expected.dtype and (tensor.dtype in LARGEST or expected.dtype in LARGEST):
                raise WeightError(
                    f"{name} in {path} is stored as {tensor.dtype}, but the model's config makes it {expected.dtype}: use the "
                    "config.json with the quantization_config that belongs to these weights."
                )
            known = stored.get(spec.parts[name].parameter if is_part else wanted[name])
            if known is not None and known.padding is not None:
                tensor = F.pad(tensor, (0, (spec.parts[name].num_rows if is_part else known.shape[0]) - len(tensor)), value=known.padding)
            if is_part:
                yield name, tensor
                continue
            if known is not None:
                _check_exact(name, tensor, expected.dtype, path)
            if (factor := factors.get(wanted[name])) is not None:
                tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor
            yield wanted[name], tensor.view(expected.shape)

    return stream(), tuple(unexpected)


def _is_padded(parameter: str, shape: tuple[int, ...], expected: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is filled up to the expected shape."""
    return parameter in stored and stored[parameter].padding is not None and len(shape) == 1 and shape <= expected


def _is_packed(name: str, specs: Mapping[str, TensorSpec], spec: ModelSpec) -> bool:
    """Whether the model takes the bytes of a checkpoint's tensor as they are stored."""
    part = spec.parts.get(name)
    expected = specs.get(name if part is None else part.parameter)
    return expected is not None and expected.dtype == torch.uint8


def _cache_scale_factors(spec: ModelSpec, checkpoint: Checkpoint, names: Sequence[str], is_wanted: bool) -> dict[str, float] | None:
    """Tensor → its factor, from the scales of a KV cache called `names` in the checkpoint; None: they are not used, for a logged reason."""
    try:
        if not is_wanted:
            raise UnfoldableScalesError("only a float8 KV cache without LoRA adapters takes them, and an int8 cache has its own")
        sites = cache_scale_names(spec, names)
        if not sites:
            raise UnfoldableScalesError("no attention module of ours has projections by these names")
        stored = dict(checkpoint.stream({name for pair in sites.values() for name in pair if name is not None}))
        scales = {name: float(scale.max()) for name, scale in stored.items()}  # one, or one per head
        values = {module: (scales.get(k or "", 1.0), scales.get(v or "", 1.0)) for module, (k, v) in sites.items()}
        factors = weight_factors(spec, values)
    except UnfoldableScalesError as reason:
        logger.warning("The checkpoint's scales of the KV cache are not used: %s (%s).", reason, _abbreviate(names))
        return None
    logger.info("The KV cache of %d layers has the checkpoint's scales, rounded up to powers of two (of heads: the largest).", len(sites))
    return factors


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], path: Path) -> None:
    if shape != expected:
        raise WeightError(
            f"{name} in {path} has shape {list(shape)}, but the model's config makes it {list(expected)}: "
            "use the config.json that belongs to these weights."
        )


def _joined(
    tensors: Iterator[tuple[str, torch.Tensor]],
    specs: Mapping[str, TensorSpec],
    spec: ModelSpec,
    experts: Mapping[str, Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream with parts joined into their parameters, on `device` in `dtype`. A parameter is yielded when its last part arrives.

    experts: see `own_experts`; such a parameter has the rank's slots only.
    """
    joining: dict[str, torch.Tensor] = {}
    stored = _stored_tensors(spec)
    left = Counter(part.parameter for part in spec.parts.values() if part.parameter not in experts or part.index in experts[part.parameter])
    for name, tensor in tensors:
        part = spec.parts.get(name)
        if part is None:
            yield name, tensor
            continue
        parameter = part.parameter
        if parameter not in joining:
            own = specs[parameter].dtype
            kept = own if parameter in stored or own == torch.float32 else dtype
            shape = specs[parameter].shape
            length = len(experts[parameter]) if parameter in experts else shape[0]
            joining[parameter] = torch.empty((length, *shape[1:]), dtype=kept, device=device)
        places = [i for i, one in enumerate(experts[parameter]) if one == part.index] if parameter in experts else [part.index]
        for place in places:
            rows = joining[parameter][place, part.first_row : part.first_row + part.num_rows]
            rows.copy_(tensor.view(rows.shape))
        left[parameter] -= 1
        if left[parameter] == 0:
            yield parameter, joining.pop(parameter)


def _check_exact(name: str, tensor: torch.Tensor, dtype: torch.dtype, path: Path) -> None:
    """Raise `WeightError` if a tensor of a quantized weight would lose values as `dtype`. Scales are rounded to float32."""
    if tensor.dtype == dtype:
        return
    is_float = tensor.is_floating_point() and dtype.is_floating_point
    if not is_float or (dtype != torch.float32 and not torch.equal(tensor.to(dtype).double(), tensor.double())):
        raise WeightError(
            f"{name} in {path} is stored as {tensor.dtype}, but quantization_config makes it {dtype}: use the config.json that belongs "
            "to these weights (for scales of compressed-tensors, its torch_dtype)."
        )


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _abbreviate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_IN_A_MESSAGE])
    more = len(names) - _NAMES_IN_A_MESSAGE
    return shown if more <= 0 else f"{shown} and {more} more"


class _Transforms:
    """Runs each transform when its last input arrives, and drops an input after its last use.

    An input is a source or this rank's part of one. The rest of a sharded source is neither read nor converted.
    """

    def __init__(
        self,
        compiled: WeightTarget,
        *,
        coordinates: Coordinates,
        device: torch.device,
        dtype: torch.dtype,
        dtypes: Mapping[str, torch.dtype],
        experts: Mapping[str, Sequence[int]],
    ) -> None:
        self.num_bytes = self.max_waiting_bytes = 0
        self._waiting_bytes: dict[Expression, int] = {}
        self._compiled, self._experts = compiled, experts
        self._coordinates, self._device, self._dtype, self._dtypes = coordinates, device, dtype, dtypes
        self._inputs_of: dict[str, list[Expression]] = {}  # source → the parts that transforms use
        self._users: dict[Expression, set[int]] = {}  # input → transforms that have yet to run
        self._transforms = compiled.transforms
        self._waiting_for = [set(transform.inputs) for transform in self._transforms]
        for index, transform in enumerate(self._transforms):
            for part in transform.inputs:
                if part not in self._users:
                    self._inputs_of.setdefault(source_of(part), []).append(part)
                self._users.setdefault(part, set()).add(index)
        self._held: dict[Expression, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor, *, convert: bool = True) -> None:
        """Add a source and run the transforms that it completes. convert: floating-point values to the model's dtype."""
        dtype = self._dtypes.get(name, self._dtype) if convert else None
        if name not in self._inputs_of:
            self.num_bytes += tensor.nbytes
            self._compiled.assign(name, self._on_device(tensor, dtype))
            return
        for part in self._inputs_of[name]:
            is_taken = name in self._experts and isinstance(part, tuple) and part[0] == EXPERT_SLOTS
            taken = tensor if is_taken else select(part, tensor, coordinates=self._coordinates)
            self.num_bytes += taken.nbytes
            self._held[part] = self._on_device(taken, dtype)
        for part in self._inputs_of[name]:
            for index in sorted(self._users[part]):
                self._waiting_for[index].discard(part)
                if not self._waiting_for[index]:
                    self._run(self._transforms[index], index)
            if part in self._held and isinstance(part, tuple):
                self._held[part] = _compact(self._held[part])
            if part in self._held:
                self._waiting_bytes[part] = self._held[part].untyped_storage().nbytes()
        self.max_waiting_bytes = max(self.max_waiting_bytes, sum(self._waiting_bytes.values()))

    def _on_device(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=dtype if tensor.is_floating_point() else None)

    def _run(self, transform: WeightTransform, index: int) -> None:
        result = transform.evaluate(self._held, coordinates=self._coordinates)
        assert tuple(result.shape) == tuple(transform.spec.shape), f"{transform.target}: {result.shape} != {transform.spec}"
        assert result.dtype == transform.spec.dtype, f"{transform.target}: {result.dtype} != {transform.spec}"
        self._compiled.assign(transform.target, result)
        for part in transform.inputs:
            self._users[part].discard(index)
            if not self._users[part]:
                del self._held[part]
                self._waiting_bytes.pop(part, None)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A copy if the tensor is a view of a larger storage, which it would keep in memory while it waits; else the tensor."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
