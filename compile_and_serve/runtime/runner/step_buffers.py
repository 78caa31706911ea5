"""The persistent arrays that every step lies in.

All steps of one size lie in the same memory, as CUDA graphs need it. Each array is a flat buffer. A step uses its first elements, viewed
in the step's shape, so that the tensor is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.staged_arrays import StagedArrays
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import Step, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_builder import build_step
from compile_and_serve.runtime.runner.block_tables import BlockTables, SlotTables
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS

_INPUT, _SLOT_MAPPING = "input.", "slot_mapping."


class StepBuffers(StagedArrays):
    """Arrays for steps of up to max_tokens tokens, max_seqs sequences and max_rows rows, max_sampled of which are sampled.

    host: the arrays to fill by name: `input.<name>`, `slot_mapping.<group whose pages hold tokens>`, and what every step has. device: the
    same, and the inputs that the device fills. Optional inputs have arrays of their own, which steps that
    use none neither fill nor copy.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        groups: Sequence[StateGroup],
        token_groups: Sequence[str] = (),
        *,
        max_tokens: int,
        max_seqs: int,
        max_sampled: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._inputs, self._groups = tuple(inputs), tuple(groups)
        self._host_inputs = [one for one in inputs if one.source == "host" and not one.optional]
        self._writes = [one.write or partial(_write_filled, one, _host_fill(one)) for one in self._host_inputs]
        self._optional_inputs = [one for one in inputs if one.optional]
        lengths = {one.name: math.prod(one.shape(max_tokens, max_rows)) for one in inputs}
        self._token_groups = tuple(token_groups)
        fields: dict[str, tuple[type[np.generic], int]] = {
            _INPUT + one.name: (_numpy_type(one.dtype), lengths[one.name]) for one in self._host_inputs
        }
        fields |= {_SLOT_MAPPING + name: (np.int64, max_tokens) for name in self._token_groups}
        fields |= {
            "slots": (np.int64, max_tokens),
            "sampled_slots": (np.int64, max_seqs),
            "query_start_loc": (np.int32, max_tokens + 1),
            "seq_lens": (np.int32, max_tokens),
            "has_run": (np.int32, max_seqs),
            "verdicts": (np.int32, max_sampled),
            "uniforms": (np.float32, max_sampled),
            **{name: (dtype, max_sampled) for name, dtype in SAMPLING_FIELDS.items()},
        }
        super().__init__(fields, device)
        optional = {_INPUT + one.name: (_numpy_type(one.dtype), lengths[one.name]) for one in self._optional_inputs}
        self._optional = StagedArrays(optional, device) if optional else None
        self._uploads_optional = False
        if self._optional is not None:
            self.device |= self._optional.device
        for one in inputs:
            name = _INPUT + one.name
            if one.source == "device":
                self.device[name] = torch.zeros(lengths[one.name], dtype=one.dtype, device=device)
            else:
                self.device[name] = self.device[name].view(one.dtype)
        self._filled = (-1, 0, 0)  # what `_arrays`, the inputs of the last step on the host, belong to
        self._arrays: list[np.ndarray] = []

    def host_input(self, one: StepInput, tokens: int, rows: int) -> np.ndarray:
        """The host's array of an input in a step of so many tokens and rows."""
        shape, optional = one.shape(tokens, rows), self._optional
        host = optional.host if one.optional and optional is not None else self.host
        return host[_INPUT + one.name][: math.prod(shape)].reshape(shape)

    def host_slot_mapping(self, group: str) -> np.ndarray:
        """int64 [max_tokens] of a group whose pages hold tokens."""
        return self.host[_SLOT_MAPPING + group]

    def fill(self, batch: TokenBatch, tokens: int, rows: int, *, uses_optional: bool = True) -> None:
        """Write the values and padding of every input of the host. uses_optional: of the optional ones, too."""
        key = (self._current, tokens, rows)
        if key != self._filled:
            self._filled, self._arrays = key, [self.host_input(one, tokens, rows) for one in self._host_inputs]
        for write, array in zip(self._writes, self._arrays, strict=True):
            write(batch, array)
        self._uploads_optional = uses_optional and self._optional is not None
        if self._uploads_optional:
            assert self._optional is not None
            self._optional.rotate()
            for one in self._optional_inputs:
                _write_filled(one, _host_fill(one), batch, self.host_input(one, tokens, rows))

    def upload(self) -> None:
        super().upload()
        if self._uploads_optional:
            assert self._optional is not None
            self._optional.upload()

    def upload_used(self, tokens: int, rows: int) -> None:
        """As `upload`, but of each input only what a step of so many tokens and rows reads."""
        self.upload_parts({_INPUT + one.name: math.prod(one.shape(tokens, rows)) for one in self._host_inputs})

    def uses_optional(self, batch: TokenBatch) -> bool:
        """Whether an optional input has values other than 0."""
        return any((values := one.values(batch)) is not None and bool(values.any()) for one in self._optional_inputs)

    def pad_slot_mapping(self, begin: int, end: int) -> None:
        """Make tokens begin … end - 1 padding, for which no keys and values are written."""
        for name in self._token_groups:
            self.host_slot_mapping(name)[begin:end] = -1

    def pad_sequences(self, begin: int, end: int, query_len: int, padding_slot: int) -> None:
        """Make sequences begin … end - 1 padding of length 0, with `query_len` tokens each. padding_slot: that nobody has."""
        self.pad_slot_mapping(begin * query_len, end * query_len)
        host = self.host
        host["query_start_loc"][begin + 1 : end + 1] = np.arange(begin + 1, end + 1) * query_len
        host["seq_lens"][begin:end] = 0
        host["slots"][begin:end] = padding_slot
        host["temperatures"][begin * query_len : end * query_len] = 0.0

    def step(
        self,
        tokens: int,
        seqs: int,
        rows: int,
        *,
        state: Mapping[str, torch.Tensor],
        tables: Mapping[str, BlockTables | SlotTables],
        backends: Mapping[str, Any],
        num_tokens: int,
        num_seqs: int,
        max_query_len: int,
        max_seq_len: int,
        uses_optional: bool,
    ) -> Step:
        """The step that lies in the first `tokens`, `seqs` and `rows` elements. num_tokens, num_seqs: without padding."""
        device, host = self.device, self.host
        lengths = StepLengths(
            query_start_loc=device["query_start_loc"][: seqs + 1],
            seq_lens=device["seq_lens"][:seqs],
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_start_loc_cpu=host["query_start_loc"][: seqs + 1],
            seq_lens_cpu=host["seq_lens"][:seqs],
            num_segments=self._num_segments(tokens, rows),
        )
        pages = {name: table.pages(seqs) for name, table in tables.items()}
        for name in self._token_groups:
            pages[name] += (device[_SLOT_MAPPING + name][:tokens],)
        inputs = {}
        for one in self._inputs:
            shape = one.shape(tokens, rows)
            inputs[one.name] = device[_INPUT + one.name][: math.prod(shape)].view(shape)
        return build_step(
            self._groups,
            lengths,
            pages=pages,
            backends=backends,
            inputs=inputs,
            state=state,
            num_rows=rows,
            padded_tokens=tokens,
            uses_optional=uses_optional,
        )

    def _num_segments(self, tokens: int, rows: int) -> int | None:
        """Of the input that was filled with their ends; None: there is none."""
        for one in self._host_inputs:
            if one.ends_segments:
                return int(np.argmax(self.host_input(one, tokens, rows))) + 1  # the first of the largest values
        return None

    def update(self, step: Step, max_seq_len: int) -> None:
        """Reuse an earlier step of the same sequences: set their lengths, and the host's arrays that are filled now."""
        for metadata in step.metadata.values():
            metadata.max_seq_len = max_seq_len
            metadata.query_start_loc_cpu = self.host["query_start_loc"][: step.padded_seqs + 1]
            metadata.seq_lens_cpu = self.host["seq_lens"][: step.padded_seqs]


def _host_fill(one: StepInput) -> Callable[[TokenBatch], Any]:
    """What gives an input's values as its host array holds them: an array, or None for zeros."""
    fill = one.fill
    assert fill is not None
    if one.dtype != torch.bfloat16:
        return fill

    def bits(batch: TokenBatch) -> np.ndarray | None:
        values = fill(batch)
        if values is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).view(torch.int16).numpy()

    return bits


def _write_filled(one: StepInput, fill: Callable[[TokenBatch], np.ndarray | None], batch: TokenBatch, array: np.ndarray) -> None:
    """Write an input's values into its host array, and 0 for the padding behind them."""
    values = fill(batch)
    if values is None or values.shape == array.shape:
        array[...] = 0 if values is None else values
        return
    dim = one.symbolic_dim
    assert dim is not None, f"{one.name} has shape {array.shape}, its fill gave {values.shape}"
    before, count = (slice(None),) * dim, values.shape[dim]
    array[(*before, slice(None, count))] = values
    array[(*before, slice(count, None))] = 0


def _numpy_type(dtype: torch.dtype) -> type[np.generic]:
    """The type of the host's array: numpy has no bfloat16, whose bits are written as integers."""
    return np.int16 if dtype == torch.bfloat16 else np.dtype(str(dtype).removeprefix("torch.")).type
