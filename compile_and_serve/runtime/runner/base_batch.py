"""`BaseBatch`: the requests that a runner holds, and the inputs of a step made from them.

Shape legend: R batch slots, S sequences of the step (rows of the batch), T tokens of the step, M block-table columns.

A request keeps a batch slot while it is held. Per-slot numbers live in numpy arrays, so that a step costs a fixed number of
array operations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import RequestArrays, StepArray, StepDatum
from compile_and_serve.runtime.pooling_params import PoolingParams
from compile_and_serve.runtime.runner.block_tables import BlockTables, SlotTables
from compile_and_serve.runtime.runner.state_memory import PageLayout
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_messages import NewRequestData, SchedulerOutput


@dataclass(kw_only=True, slots=True)
class HeldRequest:
    """token_ids: int64, what was known when the request came; later tokens are read from the device's last tokens."""

    request_id: str
    slot: int
    token_ids: np.ndarray
    num_prompt_tokens: int
    params: SamplingParams
    step_data: Mapping[str, StepDatum]
    arrays: RequestArrays
    pooling: PoolingParams | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """Rows of logits that speak of a prompt. begin: first row; targets: int64 token ids that the rows are asked
    about. request: whose prompt it is.
    """

    request: HeldRequest
    begin: int
    targets: np.ndarray
    count: int  # alternatives a row

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """What a step's composition says. Rows are sequences: decodes first, the longest of them first, so that the tail is short
    (attention takes rows in order). The first rows of logits are the sampled ones.

    version: unique to the composition. scheduled_ids: the requests in the order in which they were scheduled; request_ids, step_data,
    arrays: in the order of rows; no arrays where no request has any. num_decodes: leading rows whose first token is the device's last
    token of the batch slot. query_len: tokens of each sequence, where is_decode_only.
    sampled_ids, sampled_slots: of the sequences that sample. sampled_counts, sampled_drafts: rows of each of them, and the
    guessed tokens that all rows but the last are compared with (empty lists: one row each). has_drafts: the host knows the tokens of
    decodes, and guesses behind them. is_on_device: the device makes this step's inputs from the step before; the host's arrays are not
    filled. uses_optional: as in `Step`; None: not known yet.
    """

    version: int = 0
    scheduled_ids: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    step_data: list[Mapping[str, StepDatum]] = field(default_factory=list)
    arrays: list[RequestArrays] = field(default_factory=list)
    slots_S: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_decodes: int = 0
    query_len: int = 1
    is_decode_only: bool = False
    num_tokens: int = 0
    max_query_len: int = 1
    sampled_ids: list[str] = field(default_factory=list)
    sampled_slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prompt_rows: list[PromptRows] = field(default_factory=list)
    sampled_counts: list[int] = field(default_factory=list)
    sampled_drafts: list[np.ndarray] = field(default_factory=list)
    num_logits: int = 0
    max_seq_len: int = 0
    has_drafts: bool = False
    is_on_device: bool = False
    uses_optional: bool | None = None


class BaseBatch(ABC):
    """`remove`, `settle`, `add` and `append_blocks` as the scheduler says, then `prepare` the step. A subclass says which rows of output it
    needs.

    tables: of each group by name; token_tables: of those whose pages hold tokens. layout: of the step prepared last, or an empty one where
    its sequences are not those of the next.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        groups: Sequence[StateGroup],
        pages: PageLayout,
        num_pages: int,
        *,
        num_slots: int,
        max_num_tokens: int,
        max_padded_size: int,
        max_model_len: int,
        device: torch.device,
        max_sampled: int | None = None,
    ) -> None:
        """pages: of the groups. num_pages: of the pool. max_num_tokens: of one step. max_padded_size: that a step is padded to.
        max_sampled: rows of a step that are sampled; None: one of each slot's sequence.
        """
        self.num_slots = num_slots
        self.max_sampled = num_slots if max_sampled is None else max_sampled
        self.tokens_per_page = pages.tokens_per_page
        self.token_tables = {
            name: BlockTables(num_slots, -(-(max_model_len + 1) // size), device) for name, size in self.tokens_per_page.items()
        }
        self._slot_tables = {name: SlotTables(num_slots, count, device, padding=num_pages) for name, count in pages.pages_per_slot.items()}
        of_items = {name: BlockTables(num_slots, count, device) for name, count in pages.columns_of_items(groups).items()}
        tables = self.token_tables | self._slot_tables | of_items
        self.tables = {group.name: tables[group.name] for group in groups}
        self.layout = BatchLayout()
        self._make_buffers = lambda max_tokens: StepBuffers(
            inputs,
            groups,
            tuple(self.tokens_per_page),
            max_tokens=max(max_tokens, max_padded_size),
            max_seqs=num_slots,
            max_sampled=self.max_sampled,
            max_rows=max(max_tokens, max_padded_size) + self.max_sampled,
            device=device,
        )
        self._mixed_buffers = self._make_buffers(max_num_tokens)
        self._requests: dict[str, HeldRequest] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._computed = np.zeros(num_slots, dtype=np.int64)
        self._known = np.zeros(num_slots, dtype=np.int64)  # length of token_ids
        self._num_versions = 0
        self._num_with_arrays = 0  # held requests that brought some

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, data: NewRequestData) -> HeldRequest:
        """Take in a request; its slot is free until `remove`."""
        assert data.request_id not in self._requests, f"the runner holds {data.request_id!r} already"
        slot = self._free_slots.pop()
        request = HeldRequest(
            request_id=data.request_id,
            slot=slot,
            token_ids=np.array(data.token_ids, dtype=np.int64),
            num_prompt_tokens=data.num_prompt_tokens,
            params=data.sampling_params,
            step_data=data.step_data,
            arrays=data.arrays,
            pooling=data.pooling,
        )
        self._requests[data.request_id] = request
        self._num_with_arrays += bool(data.arrays)
        self._computed[slot] = data.num_computed_tokens
        self._known[slot] = len(request.token_ids)
        for table, ids in zip(self.tables.values(), data.block_ids, strict=True):
            table.begin(slot, ids)
        self._forget_layout()
        return request

    def remove(self, request_id: str) -> HeldRequest | None:
        """Forget a request; None when it is not held (it was never scheduled)."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._free_slots.append(request.slot)
            self._num_with_arrays -= bool(request.arrays)
            for table in self._slot_tables.values():
                table.forget(request.slot)
            self._forget_layout()
        return request

    def settle(self) -> None:
        """The step before is launched, and the requests that are gone are removed."""
        for table in self._slot_tables.values():
            table.settle()

    def lay_padding(self) -> None:
        """There is no sequence in the batch: a step of padding will lie in the buffers."""
        if self._slot_tables:
            for table in self._slot_tables.values():
                table.set_batch(np.empty(0, dtype=np.int64))
                table.commit()
            self._forget_layout()

    def wrong_tables(self, expected: Mapping[str, Sequence[tuple[int, int, Sequence[int]]]]) -> dict[str, str]:
        """Requests in the device's tables of the step prepared last whose blocks are not these, each with a sentence. Waits for the
        device. expected: of `StateChecks`.
        """
        tables, wrong = list(self.tables.values()), {}
        for request_id, groups in expected.items():
            for number, num_freed, block_ids in groups:
                table = tables[number]
                held = self._requests.get(request_id)
                if held is None or not isinstance(table, BlockTables):
                    continue
                found = table.on_device(held.slot, len(block_ids))
                places = [place for place in range(num_freed, len(found)) if found[place] != block_ids[place]]
                if places:
                    place = places[0]
                    wrong[request_id] = (
                        f"it has block {found[place]} in place {place} of group {number}, where block {block_ids[place]} belongs."
                    )
        return wrong

    def slot_of(self, request_id: str) -> int:
        """The batch slot of a request that is held."""
        return self._requests[request_id].slot

    def num_prompt_tokens(self, request_id: str) -> int:
        """Tokens of the prompt of a request that is held."""
        return self._requests[request_id].num_prompt_tokens

    def known_tokens(self, request_id: str) -> np.ndarray:
        """int64: the tokens that a request that is held came with."""
        return self._requests[request_id].token_ids

    def lengths(self, slots_S: np.ndarray) -> np.ndarray:
        """int64 [S]: tokens of the slots' sequences that are computed once the step prepared last has run."""
        return self._computed[slots_S]

    def add_array(self, request_id: str, name: str, array: StepArray) -> None:
        """Give a request that is held a further piece of its array `name`, behind those that it has."""
        request = self._requests[request_id]
        self._num_with_arrays += not request.arrays
        request.arrays = {**request.arrays, name: [*request.arrays.get(name, ()), array]}

    def append_blocks(self, request_id: str, block_ids: list[list[int]]) -> None:
        """The request's sequence goes on in `block_ids`, a list for each group."""
        slot = self._requests[request_id].slot
        for table, ids in zip(self.tables.values(), block_ids, strict=True):
            if ids:
                table.append(slot, ids)

    def prepare(self, scheduled: SchedulerOutput) -> tuple[BatchLayout, StepBuffers, TokenBatch | None]:
        """Lay out a step of prompts and move the requests on; the buffers that it goes to and its tokens."""
        num_scheduled = scheduled.num_scheduled_tokens
        rows = [self._requests[request_id] for request_id in num_scheduled]
        slots_S = np.array([request.slot for request in rows], dtype=np.int64)
        counts_S = np.fromiter(num_scheduled.values(), dtype=np.int64, count=len(rows))
        layout = self._new_layout(num_scheduled, rows, slots_S, counts_S)
        return layout, self._mixed_buffers, self._lay_mixed(layout, rows, counts_S)

    def _new_layout(
        self, num_scheduled: Mapping[str, int], rows: list[HeldRequest], slots_S: np.ndarray, counts_S: np.ndarray, **decodes: Any
    ) -> BatchLayout:
        """counts_S: tokens of each sequence in the step. decodes: further fields."""
        self._num_versions += 1
        self.layout = BatchLayout(
            version=self._num_versions,
            scheduled_ids=list(num_scheduled),
            request_ids=[request.request_id for request in rows],
            step_data=[request.step_data for request in rows],
            arrays=[request.arrays for request in rows] if self._num_with_arrays else [],
            slots_S=slots_S,
            num_tokens=int(counts_S.sum()),
            max_query_len=int(counts_S.max()),
            **decodes,
        )
        for table in self.tables.values():
            table.set_batch(slots_S)
        return self.layout

    def _lay_mixed(self, layout: BatchLayout, rows: list[HeldRequest], counts_S: np.ndarray) -> TokenBatch:
        """Any number of tokens of each sequence, in `_mixed_buffers`."""
        buffers = self._mixed_buffers
        host = buffers.rotate()
        slots_S, num_seqs, num_tokens = layout.slots_S, len(rows), layout.num_tokens
        computed_S = self._computed[slots_S]
        ends_S = computed_S + counts_S
        starts = host["query_start_loc"][: num_seqs + 1]
        starts[0] = 0
        np.cumsum(counts_S, out=starts[1:])
        row_T = np.repeat(np.arange(num_seqs), counts_S)
        positions_T = np.arange(num_tokens) - starts[row_T] + computed_S[row_T]
        self._map_slots(buffers, slots_S[row_T], positions_T)
        host["seq_lens"][:num_seqs] = ends_S
        host["slots"][:num_seqs] = slots_S
        token_ids_T = np.zeros(num_tokens, dtype=np.int64)
        self._fill_decodes(layout, starts, token_ids_T)
        for row in range(layout.num_decodes, num_seqs):
            token_ids_T[starts[row] : starts[row + 1]] = rows[row].token_ids[computed_S[row] : ends_S[row]]
        indices = self._choose_rows(layout, rows, computed_S, ends_S, starts)
        num_logits = sum(map(len, indices))
        if num_logits == 0:  # a model needs a row to compute; nobody reads it
            indices = [np.zeros(1, dtype=np.int64)]
        layout.num_logits = max(1, num_logits)
        self._computed[slots_S] = ends_S
        layout.max_seq_len = int(ends_S.max())
        return TokenBatch(
            token_ids=token_ids_T,
            positions=positions_T,
            query_start_loc=starts,
            row_indices=np.concatenate(indices),
            request_ids=layout.request_ids,
            step_data=layout.step_data,
            arrays=layout.arrays,
        )

    def _fill_decodes(self, layout: BatchLayout, starts: np.ndarray, token_ids_T: np.ndarray) -> None:  # noqa: B027 (not all have decodes)
        """Write the tokens of the leading `num_decodes` sequences. Sequence s has tokens starts[s] … starts[s + 1] - 1 of the step."""

    @abstractmethod
    def _choose_rows(
        self, layout: BatchLayout, rows: list[HeldRequest], computed_S: np.ndarray, ends_S: np.ndarray, starts: np.ndarray
    ) -> list[np.ndarray]:
        """int64: the tokens whose rows of output the requests need. computed_S, ends_S: tokens computed before and after the step."""

    def _map_slots(self, buffers: StepBuffers, slots_T: np.ndarray, positions_T: np.ndarray) -> None:
        """slot mapping = block · P + position % P of each group. slots_T: batch slot of each token's sequence."""
        for name, table in self.token_tables.items():
            size = self.tokens_per_page[name]
            columns_T = positions_T // size
            places_T = slots_T * table.num_columns
            places_T += columns_T
            out = buffers.host_slot_mapping(name)[: len(positions_T)]
            np.multiply(table.flat_slot_table.take(places_T), size, out=out)
            columns_T *= -size
            out += columns_T
            out += positions_T

    def _forget_layout(self) -> None:
        self.layout = BatchLayout()
