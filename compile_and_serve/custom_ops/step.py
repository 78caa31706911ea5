"""A step as data: its inputs, the state that is kept between steps, and its outputs.

Shape legend: T tokens of the step, S sequences, L rows of output, R batch slots, N pages, P tokens per page.

A model declares its inputs, its state and its outputs. The compiler and the runner iterate over the declarations. The only name that
they know is that of the logits, from which tokens are sampled. A step's metadata is not an argument of a graph: while the step runs, ops
read it with `current_metadata`, by the name of their state group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.step_data import StepDatum

TOKENS, ROWS = "tokens", "rows"  # the two symbolic lengths: tokens of a step, rows of its outputs
KV_CACHES = "kv_caches"  # the state group of full attention
WINDOW_CACHES = "window_caches"  # the state group of attention with a window
LOGITS = "logits"
SCALE_BYTES = 4  # of a token's keys or values in a head of an int8 cache
HIDDEN_STATES = "hidden_states"  # after the last norm: what embeddings are pooled from
CLASS_LOGITS = "class_logits"  # of a sequence classifier

Advance = Literal["sampled", "next", "same"]
InputSource = Literal["host", "device"]
ScoreFeature = Literal["soft_cap", "sinks", "alibi"]
AttentionFeature = Literal["soft_cap", "sinks", "alibi", "window", "chunks", "latent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """A step's tokens on the host. Sequences lie one after another on T.

    token_ids: int64 [T]; 0 where only the device knows the token (the input of a decode). positions: int64 [T], of each token in its
    sequence. query_start_loc: int32 [S + 1]. row_indices: int64 [L], the tokens whose output rows are wanted. request_ids: S ids.
    step_data: the data that each of the S requests came with; empty in synthetic steps.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    row_indices: np.ndarray
    request_ids: Sequence[str] = ()
    step_data: Sequence[Mapping[str, StepDatum]] = ()

    def data_of_token(self, key: str, default: StepDatum) -> np.ndarray:
        """[T]: the entry `key` of the data of each token's request; `default` where a request has none."""
        if not self.step_data:
            return np.full(len(self.token_ids), default)
        values = np.array([data.get(key, default) for data in self.step_data])
        return np.repeat(values, np.diff(self.query_start_loc))

    @property
    def sequence_of_token(self) -> np.ndarray:
        """int64 [T]: the sequence that each token belongs to."""
        lengths = np.diff(self.query_start_loc)
        return np.repeat(np.arange(len(lengths)), lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """A tensor that a step takes.

    dims: numbers and at most one of "tokens" and "rows". source: "host": `fill` gives the values, without padding (padding is 0);
    "device": what runs before the step (a receive, another graph) writes them to `Step.inputs[name]`, which is the same memory at every
    step of a size; what it does not write has any finite value.
    advance: of an input of the host: how the device makes the next decode step's values from this step's: "sampled": the tokens that
    were sampled last; "next": each value plus the number of tokens that its sequence gained; "same": unchanged; None: the host fills it
    at each step. optional: where it is 0 for all tokens, the step may run without the pass that added it.
    Raises `ValueError` for an input of the host without `fill`, and for one of the device with it, or which is optional.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]
    fill: Callable[[TokenBatch], np.ndarray] | None = None
    source: InputSource = "host"
    advance: Advance | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.source == "host" and self.fill is None:
            raise ValueError(f"Input {self.name} is filled by the host: give it fill=, or source='device'.")
        if self.source == "device" and (self.fill is not None or self.advance is not None or self.optional):
            raise ValueError(f"Input {self.name} is filled by the device: leave out fill=, advance= and optional=.")

    def values(self, batch: TokenBatch) -> np.ndarray:
        """The host's values, without padding."""
        assert self.fill is not None, f"input {self.name} is filled by the device"
        return self.fill(batch)

    @property
    def length(self) -> str | None:
        """The symbolic length among the dimensions, if there is one."""
        return next((dim for dim in self.dims if isinstance(dim, str)), None)

    @property
    def symbolic_dim(self) -> int | None:
        """Which dimension is symbolic."""
        return next((i for i, dim in enumerate(self.dims) if isinstance(dim, str)), None)

    def shape(self, tokens: int, rows: int) -> tuple[int, ...]:
        """The tensor's shape in a step of so many tokens and rows."""
        return tuple([tokens if dim == TOKENS else rows if dim == ROWS else int(dim) for dim in self.dims])


INPUT_IDS = StepInput(name="input_ids", dtype=torch.int64, dims=(TOKENS,), fill=lambda batch: batch.token_ids, advance="sampled")
POSITIONS = StepInput(name="positions", dtype=torch.int64, dims=(TOKENS,), fill=lambda batch: batch.positions, advance="next")
LOGITS_INDICES = StepInput(name="logits_indices", dtype=torch.int64, dims=(ROWS,), fill=lambda batch: batch.row_indices, advance="same")
DECODER_INPUTS = (INPUT_IDS, POSITIONS, LOGITS_INDICES)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """An output tensor of a step, in the order of the model's results. dims: as in `StepInput`."""

    name: str
    dims: tuple[int | str, ...] = (ROWS, "vocabulary")


class LayerState(Protocol):
    """What one layer keeps."""

    def shapes(self, tokens_per_page: int) -> tuple[tuple[int, ...], ...]:
        """Shape of each of its tensors for one page (paged state) or one sequence (a slot)."""
        ...

    def of_rank(self, mesh: Mesh) -> LayerState:
        """What one rank of the mesh keeps."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """Keys and values of one attention layer: [2, K, P, E] per page; in int8 [2, K, P, E + 4], as `int8_cache.py` says."""

    num_kv_heads: int
    head_dim: int

    def shapes(self, tokens_per_page: int) -> tuple[tuple[int, ...], ...]:
        return ((2, self.num_kv_heads, tokens_per_page, self.head_dim),)

    def int8_shapes(self, tokens_per_page: int) -> tuple[tuple[int, ...], ...]:
        return ((2, self.num_kv_heads, tokens_per_page, self.head_dim + SCALE_BYTES),)

    def of_rank(self, mesh: Mesh) -> KVCacheSpec:
        """One rank's share of the heads, or one head that several ranks keep."""
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // mesh.tensor))


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCacheSpec:
    """What one layer of multi-head latent attention keeps: [P, C + R] per page, the latent and the rotated key that all heads share."""

    latent_size: int
    rope_size: int

    @property
    def num_kv_heads(self) -> int:
        """Every head reads the same entry."""
        return 1

    @property
    def head_dim(self) -> int:
        """Values of a token's entry."""
        return self.latent_size + self.rope_size

    def shapes(self, tokens_per_page: int) -> tuple[tuple[int, ...], ...]:
        return ((tokens_per_page, self.head_dim),)

    def of_rank(self, mesh: Mesh) -> LatentCacheSpec:
        """Every rank keeps all of it."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """Recurrent state of one layer: tensors of fixed shapes, one of each for every running sequence. Every rank keeps it whole."""

    tensors: tuple[tuple[int, ...], ...]

    def shapes(self, tokens_per_page: int) -> tuple[tuple[int, ...], ...]:
        return self.tensors

    def of_rank(self, mesh: Mesh) -> SlotState:
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class StateGroup:
    """State of layers that are alike, kept from step to step.

    name: of the model's argument: a list with one entry per layer, a tensor or (if a layer keeps several) a tuple of tensors.
    paged: [N, …] tensors in pages of P tokens, found through a block table; else [R + 1, …] tensors, one row for each batch slot and
    one for padding. window: a token reads itself and the `window` - 1 tokens before it; None: full attention. chunked: it reads only
    tokens of its own chunk of `window` tokens instead (Llama 4). scores: what the group's attention ops do to their scores.
    dtype: None is the KV cache's.
    """

    name: str
    layers: tuple[LayerState, ...]
    paged: bool = True
    window: int | None = None
    chunked: bool = False
    scores: frozenset[ScoreFeature] = frozenset()
    dtype: torch.dtype | None = None

    @property
    def is_attention(self) -> bool:
        """Whether the group's ops are `cas::attention` or `cas::mla_attention`, which need an attention backend."""
        return self.paged and all(isinstance(layer, KVCacheSpec | LatentCacheSpec) for layer in self.layers)

    @property
    def features(self) -> frozenset[AttentionFeature]:
        """What the group needs of an attention backend beyond causal softmax attention."""
        masks: set[AttentionFeature] = set() if self.window is None else {"chunks" if self.chunked else "window"}
        if any(isinstance(layer, LatentCacheSpec) for layer in self.layers):
            masks.add("latent")
        return self.scores | masks

    def of_rank(self, mesh: Mesh) -> StateGroup:
        """What one rank of the mesh keeps."""
        return replace(self, layers=tuple(layer.of_rank(mesh) for layer in self.layers))

    def tensor_shapes(self, tokens_per_page: int, dtype: torch.dtype | None = None) -> dict[str, tuple[int, ...]]:
        """Name of each tensor → its shape for one page or slot, e.g. "kv_caches.3"; "states.3.1" where a layer keeps several.

        dtype: of the KV cache; None: any but int8, which has its scales beside the values.
        """
        shapes = {}
        for index, layer in enumerate(self.layers):
            if dtype == torch.int8 and isinstance(layer, KVCacheSpec):
                parts = layer.int8_shapes(tokens_per_page)
            else:
                parts = layer.shapes(tokens_per_page)
            for part, shape in enumerate(parts):
                shapes[f"{self.name}.{index}" if len(parts) == 1 else f"{self.name}.{index}.{part}"] = shape
        return shapes

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in all layers of a paged group. dtype: of the KV cache."""
        per_token = sum(int(np.prod(shape)) for shape in self.tensor_shapes(1, dtype).values())
        return per_token * (self.dtype or dtype).itemsize

    def argument(self, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
        """The model's argument: one entry per layer. tensors: by name."""
        entries: list[Any] = []
        for index, layer in enumerate(self.layers):
            parts = len(layer.shapes(1))
            one = tensors[f"{self.name}.{index}"] if parts == 1 else None
            entries.append(one if parts == 1 else tuple(tensors[f"{self.name}.{index}.{i}"] for i in range(parts)))
        return entries


def declarations_by_name(inputs: Sequence[StepInput], groups: Sequence[StateGroup]) -> dict[str, StepInput | StateGroup]:
    """The declaration of each tensor of a step: inputs by their name, state by the names of `StateGroup.tensor_shapes`."""
    declarations: dict[str, StepInput | StateGroup] = {one.name: one for one in inputs}
    for group in groups:
        declarations |= dict.fromkeys(group.tensor_shapes(1), group)
    return declarations


@dataclass(kw_only=True, slots=True)
class SlotMetadata:
    """One step's batch as ops over slot state see it. Tensors live on the model's device; integers are the host's.

    slots: int64 [S], row of the state of each sequence (the last row for padding). query_start_loc: int32 [S + 1]. seq_lens: int32 [S],
    tokens after this step; a sequence whose seq_len is its number of new tokens begins from zeros.
    """

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_seqs: int
    num_tokens: int
    max_query_len: int


@dataclass(kw_only=True, slots=True)
class Step:
    """One step's tensors by name and the metadata of each state group. It is the only argument of a model.

    inputs: by the name of their `StepInput`. state: by the names of `StateGroup.tensor_shapes`. metadata: by the name of the state
    group. num_tokens, num_seqs: without padding. padded_tokens, padded_seqs: the lengths of the tensors. num_rows: rows of output.
    max_query_len: the largest number of new tokens of a sequence. uses_optional: an optional input has values other than 0.
    """

    inputs: dict[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Any]
    num_tokens: int
    num_seqs: int
    padded_tokens: int
    padded_seqs: int
    num_rows: int
    max_query_len: int
    uses_optional: bool = True
    _values: dict[str, torch.Tensor] | None = field(default=None, init=False, repr=False)
    _addresses: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Inputs and state by name: what a plan's steps read."""
        if self._values is None:
            self._values = {**self.inputs, **self.state}
        return self._values

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses and strides of the tensors, which a CUDA graph of the step depends on."""
        if self._addresses is None:
            tensors = [*self.inputs.values(), *(t for m in self.metadata.values() for t in _tensors(m))]
            first = next(iter(self.state.values()), None)  # all state is one allocation
            state = () if first is None else (first.data_ptr(),)
            self._addresses = (*state, *(t.data_ptr() for t in tensors), *(s for t in tensors for s in t.stride()))
        return self._addresses


def _tensors(metadata: Any) -> Iterator[torch.Tensor]:
    values = (getattr(metadata, one.name) for one in fields(metadata) if one.compare)
    return (value for value in values if isinstance(value, torch.Tensor))


# Of each thread, so that several engines of one process may step at the same time.
_running: ContextVar[Mapping[str, Any] | None] = ContextVar("running", default=None)


@contextmanager
def running(metadata: Mapping[str, Any]) -> Iterator[None]:
    """Ops of this thread read `metadata` (by state group) inside the block."""
    before = _running.set(metadata)
    try:
        yield
    finally:
        _running.reset(before)


def current_metadata(group: str = KV_CACHES) -> Any:
    """The metadata of a state group in the running step."""
    metadata = _running.get()
    assert metadata is not None, "an op that reads the step's metadata ran outside of a step"
    return metadata[group]
