"""A step as data: its inputs, the state that is kept between steps, and its outputs.

Shape legend: T tokens of the step, S sequences, L rows of output.

A model declares its inputs, its state and its outputs. The compiler and the runner iterate over the declarations. The only name that
they know is that of the logits, from which tokens are sampled. A step's metadata is not an argument of a graph: while the step runs, ops
read it with `current_metadata`, by the name of their state group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import torch

from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step_data import ArrayInfo, RequestArrays, StepDatum

TOKENS, ROWS = "tokens", "rows"  # the two symbolic lengths: tokens of a step, rows of its outputs
LOGITS = "logits"
ALIGNMENT_QUERIES = "alignment_queries"  # of the heads of cross-attention that tell which rows a token speaks of
HIDDEN_STATES = "hidden_states"  # after the last norm: what embeddings are pooled from
SEQUENCES = "sequences"  # where ops of a model without state find the step's `StepLengths`
CLASS_LOGITS = "class_logits"  # of a sequence classifier

Advance = Literal["sampled", "next", "same"]
InputSource = Literal["host", "device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """A step's tokens on the host. Sequences lie one after another on T.

    token_ids: int64 [T]; 0 where only the device knows the token (the input of a decode). positions: int64 [T], of each token in its
    sequence. query_start_loc: int32 [S + 1]. row_indices: int64 [L], the tokens whose output rows are wanted. request_ids: S ids.
    step_data: the data that each of the S requests came with; empty in synthetic steps. arrays: theirs; empty where no token can have a
    row of one.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_start_loc: np.ndarray
    row_indices: np.ndarray
    request_ids: Sequence[str] = ()
    step_data: Sequence[Mapping[str, StepDatum]] = ()
    arrays: Sequence[RequestArrays] = ()

    def rows_of(self, name: str, *, goes_on: bool = False, holds: bool = False) -> Iterator[tuple[slice, np.ndarray]]:
        """The rows that requests brought for tokens of this step: (tokens of T, [tokens, *row_shape]) of each piece of an array `name`.

        Where two pieces overlap, the later one counts. Behind a piece, up to the next, each token has the row before it plus 1 (goes_on)
        or the same (holds).
        """
        for sequence, arrays in enumerate(self.arrays):
            pieces = arrays.get(name)
            if not pieces:
                continue
            first = int(self.query_start_loc[sequence])
            begin = int(self.positions[first])
            end = begin + int(self.query_start_loc[sequence + 1]) - first
            for number, array in enumerate(pieces):
                reach = end if number + 1 == len(pieces) else min(end, pieces[number + 1].start)
                start, stop, behind = max(begin, array.start), min(reach, array.end), max(begin, array.end)
                if start < stop:
                    yield slice(first + start - begin, first + stop - begin), array.rows(start, stop)
                if (goes_on or holds) and behind < reach:
                    last = array.rows(array.end - 1, array.end)
                    steps = (np.arange(behind, reach) - (array.end - 1)) * goes_on
                    yield slice(first + behind - begin, first + reach - begin), last + steps.reshape(-1, *[1] * (last.ndim - 1))

    def with_rows_of(self, name: str, default: np.ndarray, *, axis: int = 0, goes_on: bool = False, holds: bool = False) -> np.ndarray:
        """`default`, with the rows of the requests' arrays `name` in place of those of their tokens, as `rows_of` gives them.

        axis: the dimension of tokens.
        """
        values = default
        for tokens, rows in self.rows_of(name, goes_on=goes_on, holds=holds):
            if values is default:
                values = default.copy()
            np.moveaxis(values, axis, 0)[tokens] = rows
        return values

    def write_rows_of(self, name: str, array: np.ndarray) -> None:
        """Write the rows of the requests' arrays `name` into `array` [T or more, …], and 0 for tokens without one: of large rows, which
        are copied once.
        """
        end = 0
        for tokens, rows in self.rows_of(name):
            array[end : tokens.start] = 0
            array[tokens] = rows
            end = max(end, tokens.stop)
        array[end:] = 0

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

    dims: numbers and at most one of "tokens" and "rows". source: "host": `fill` gives the values, without padding (padding is 0), or
    `write` writes the values of all tokens and the padding into the step's own array, in numpy's type of `dtype`: for large inputs;
    "device": what runs before the step (a receive, another graph) writes them to `Step.inputs[name]`, which is the same memory at every
    step of a size; what it does not write has any finite value. arrays: of requests, that `fill` reads (`TokenBatch.rows_of`).
    advance: of an input of the host: how the device makes the next decode step's values from this step's: "sampled": the tokens that
    were sampled last; "next": each value plus the number of tokens that its sequence gained; "same": unchanged; None: the host fills it
    at each step. optional: where it is 0 for all tokens (`fill` may then give None), the step may run without it: without the pass that
    added it, or, of a model's own input, without that argument of `forward`. All decodes of a sequence have the same value.
    ends_segments: the first values are where segments of the step end, in tokens, ascending; the others are 0 or repeat the last one. The
    step's metadata then says how many segments there are (`StepLengths.num_segments`). Of one input at most.
    Raises `ValueError` for an input of the host without `fill` and `write`, or with both, and for one of the device with `fill`, or which
    is optional.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]
    fill: Callable[[TokenBatch], np.ndarray | None] | None = None
    write: Callable[[TokenBatch, np.ndarray], None] | None = None
    source: InputSource = "host"
    advance: Advance | None = None
    optional: bool = False
    ends_segments: bool = False
    arrays: tuple[ArrayInfo, ...] = ()

    def __post_init__(self) -> None:
        if self.source == "host" and (self.fill is None) == (self.write is None):
            raise ValueError(f"Input {self.name} is filled by the host: give it either fill= or write=, or source='device'.")
        if self.write is not None and (self.optional or self.length != TOKENS or self.dtype == torch.bfloat16):
            raise ValueError(f"Input {self.name} has write=: it must have a dimension of tokens, no bfloat16, and not be optional.")
        if self.source == "device" and (self.fill is not None or self.advance is not None or self.optional):
            raise ValueError(f"Input {self.name} is filled by the device: leave out fill=, advance= and optional=.")

    def values(self, batch: TokenBatch) -> np.ndarray | None:
        """The host's values, without padding; None: 0 for all tokens."""
        if self.write is not None:
            array = np.empty(self.shape(len(batch.token_ids), 0), dtype=str(self.dtype).removeprefix("torch."))
            self.write(batch, array)
            return array
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


def declarations_by_name(inputs: Sequence[StepInput], groups: Sequence[StateGroup]) -> dict[str, StepInput | StateGroup]:
    """The declaration of each tensor of a step: inputs by their name, state by the names of `StateGroup.tensor_names`."""
    declarations: dict[str, StepInput | StateGroup] = {one.name: one for one in inputs}
    for group in groups:
        declarations |= dict.fromkeys(group.tensor_names, group)
    return declarations


@dataclass(kw_only=True, slots=True)
class Step:
    """One step's tensors by name and the metadata of each state group. It is the only argument of a model.

    inputs: by the name of their `StepInput`. state: by the names of `StateGroup.tensor_names`. metadata: by the name of the state
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
