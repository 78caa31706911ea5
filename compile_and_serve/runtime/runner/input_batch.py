"""The requests that the runner holds, and the inputs of a step made from them.

Shape legend: R batch slots, S sequences of the step (rows of the batch), T tokens of the step, M block-table columns.

A request keeps a batch slot while it is held. Per-slot numbers live in numpy arrays, so that a step costs a fixed number of
array operations. A step that decodes the same sequences as the step before, both without drafts or both with as many, reuses its
`BatchLayout` and only moves positions on; where the device advances its own inputs, the host fills nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import StateGroup, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import StepDatum
from compile_and_serve.runtime.pooling_params import PoolingParams, RowPooling
from compile_and_serve.runtime.runner.block_tables import BlockTables
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
    num_blocks: list[int]  # of each paged group
    step_data: Mapping[str, StepDatum]
    pooling: PoolingParams | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """Rows of logits that speak of a prompt. begin: first row; targets: int64 token ids that the rows are asked
    about.
    """

    request_id: str
    begin: int
    targets: np.ndarray
    count: int  # alternatives a row


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRows:
    """The next `count` rows of a step's output are this pooling request's. is_last: its prompt ends in the step."""

    request_id: str
    slot: int
    pooling: RowPooling
    count: int
    num_prompt_tokens: int
    is_last: bool


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """What a step's composition says. Rows are sequences: decodes first, the longest of them first, so that the tail is short
    (attention takes rows in order). The first rows of logits are the sampled ones.

    version: unique to the composition. scheduled_ids: the requests in the order in which they were scheduled; request_ids, step_data: in
    the order of rows. num_decodes: leading rows whose first token is the device's last token of the batch slot.
    query_len: tokens of each sequence, where is_decode_only.
    sampled_ids, sampled_slots: of the sequences that sample. sampled_counts, sampled_drafts: rows of each of them, and the
    guessed tokens that all rows but the last are compared with (empty lists: one row each). has_drafts: the host knows the tokens of
    decodes, and guesses behind them. is_on_device: the device makes this step's inputs from the step before; the host's arrays are not
    filled. uses_optional: as in `Step`; None: not known yet.
    """

    version: int = 0
    scheduled_ids: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    step_data: list[Mapping[str, StepDatum]] = field(default_factory=list)
    slots_S: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_decodes: int = 0
    query_len: int = 1
    is_decode_only: bool = False
    num_tokens: int = 0
    max_query_len: int = 1
    sampled_ids: list[str] = field(default_factory=list)
    sampled_slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prompt_rows: list[PromptRows] = field(default_factory=list)
    pooled_rows: list[PooledRows] = field(default_factory=list)
    sampled_counts: list[int] = field(default_factory=list)
    sampled_drafts: list[np.ndarray] = field(default_factory=list)
    num_logits: int = 0
    max_seq_len: int = 0
    has_drafts: bool = False
    is_on_device: bool = False
    uses_optional: bool | None = None


class InputBatch:
    """`add`, `remove` and `append_blocks` as the scheduler says, then `prepare` the step.

    On the device, by batch slot, with an element for padding: `last_tokens`: int64 [R + 1], sampled last. `gained`: int64 [R + 1], tokens
    that the last step with drafts has given the slot's sequence.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        groups: Sequence[StateGroup],
        tokens_per_page: Mapping[str, int],
        *,
        num_slots: int,
        max_num_tokens: int,
        max_padded_size: int,
        max_model_len: int,
        device: torch.device,
        max_drafts: int = 0,
        max_drafted_rows: int = 0,
        max_padded_drafts: int = 0,
    ) -> None:
        """tokens_per_page: of the paged groups. max_num_tokens: of one step. max_padded_size: that a step is padded to.
        max_drafts: of a decode. max_drafted_rows: of a step with drafts. max_padded_drafts: steps of up to so many decodes are padded to
        `max_drafts` each.
        """
        self.num_slots = num_slots
        self._max_len = max_model_len
        self._max_padded_drafts = max_padded_drafts
        self.max_sampled = max(num_slots, max_drafted_rows)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.gained = torch.zeros_like(self.last_tokens)
        # The host's view of them; where it has none, zeros stand for tokens that only the device knows.
        shares_memory = platform_of(device).shares_host_memory
        self.host_last_tokens = self.last_tokens.numpy() if shares_memory else np.zeros(num_slots + 1, dtype=np.int64)
        self.tables = {name: BlockTables(num_slots, -(-(max_model_len + 1) // size), device) for name, size in tokens_per_page.items()}
        self.tokens_per_page = dict(tokens_per_page)
        self.layout = BatchLayout()
        self._numbers = np.arange(num_slots)

        def buffers(max_tokens: int) -> StepBuffers:
            return StepBuffers(
                inputs,
                groups,
                max_tokens=max_tokens,
                max_seqs=num_slots,
                max_sampled=self.max_sampled,
                max_rows=max_tokens + self.max_sampled,
                device=device,
            )

        # Two sets of arrays: a step of decodes only copies what it needs, not arrays as long as the token budget.
        self.decode_buffers = buffers(max(num_slots, max_padded_size))
        self._mixed_buffers = buffers(max(max_num_tokens, max_padded_size))
        self._requests: dict[str, HeldRequest] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._computed = np.zeros(num_slots, dtype=np.int64)
        self._known = np.zeros(num_slots, dtype=np.int64)  # length of token_ids
        # Of sequences with guessed tokens, which the host knows: the token sampled last, and the guesses behind it.
        self._last_tokens = np.zeros(num_slots, dtype=np.int64)
        self._drafts = np.zeros((num_slots, max_drafts), dtype=np.int64)
        self._num_versions = 0
        self._advanced_version = 0  # of the layout whose next step lies in the device's arrays

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
            num_blocks=[0] * len(self.tables),
            step_data=data.step_data,
            pooling=data.pooling,
        )
        self._requests[data.request_id] = request
        self._computed[slot] = data.num_computed_tokens
        self._known[slot] = len(request.token_ids)
        self.append_blocks(data.request_id, data.block_ids)
        self._forget_layout()
        return request

    def remove(self, request_id: str) -> HeldRequest | None:
        """Forget a request; None when it is not held (it was never scheduled)."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._free_slots.append(request.slot)
            self._forget_layout()
        return request

    def slot_of(self, request_id: str) -> int:
        """The batch slot of a request that is held."""
        return self._requests[request_id].slot

    def num_prompt_tokens(self, request_id: str) -> int:
        """Tokens of the prompt of a request that is held."""
        return self._requests[request_id].num_prompt_tokens

    def draft_ends(self, request_id: str) -> frozenset[int]:
        """Tokens at which drafts of a request that is held end."""
        structured = self._requests[request_id].params.structured_outputs
        return frozenset() if structured is None else structured.draft_ends

    def known_tokens(self, request_id: str) -> np.ndarray:
        """int64: the tokens that a request that is held came with."""
        return self._requests[request_id].token_ids

    def lengths(self, slots_S: np.ndarray) -> np.ndarray:
        """int64 [S]: tokens of the slots' sequences that are computed once the step prepared last has run."""
        return self._computed[slots_S]

    def append_blocks(self, request_id: str, block_ids: list[list[int]]) -> None:
        """The request's sequence goes on in `block_ids`, a list for each paged group."""
        request = self._requests[request_id]
        if not self.tables:  # the scheduler's blocks only count tokens
            return
        for index, (table, ids) in enumerate(zip(self.tables.values(), block_ids, strict=True)):
            if ids:
                table.write(request.slot, request.num_blocks[index], ids)
                request.num_blocks[index] += len(ids)

    def prepare(self, scheduled: SchedulerOutput, *, is_ahead: bool = False) -> tuple[BatchLayout, StepBuffers, TokenBatch | None]:
        """Lay out a step and move the requests on; the buffers that it goes to and its tokens. The tokens are None where the
        device makes the step's inputs. is_ahead: `can_run_ahead` said so, and the device moves the step's inputs on.
        """
        num_scheduled, drafts = scheduled.num_scheduled_tokens, scheduled.drafts
        layout = self.layout
        advanced_version, self._advanced_version = self._advanced_version, 0
        if (
            not drafts
            and not layout.has_drafts
            and layout.is_decode_only
            and scheduled.total_num_scheduled_tokens == len(num_scheduled)
            and layout.scheduled_ids == list(num_scheduled)
        ):
            buffers = self.decode_buffers
            layout.is_on_device = layout.version == advanced_version
            if layout.is_on_device:
                self._computed[layout.slots_S] += 1
                layout.max_seq_len += 1
                return layout, buffers, None
            buffers.rotate()
            return layout, buffers, self._lay_decodes(layout, buffers)
        if (
            drafts
            and layout.query_len > 1
            and layout.scheduled_ids == list(num_scheduled)
            and int(self._computed[layout.slots_S].max()) + layout.query_len <= self._max_len
        ):
            self.decode_buffers.rotate()
            return layout, self.decode_buffers, self._lay_drafted(layout, self.decode_buffers, is_ahead=is_ahead)

        rows = [self._requests[request_id] for request_id in num_scheduled]
        slots_S = np.array([request.slot for request in rows], dtype=np.int64)
        counts_S = np.fromiter(num_scheduled.values(), dtype=np.int64, count=len(rows))
        computed_S = self._computed[slots_S]
        is_decode_S = computed_S >= self._known[slots_S]
        num_decodes = int(is_decode_S.sum())
        order = np.argsort(np.where(is_decode_S, -computed_S, 1), kind="stable")
        rows = [rows[i] for i in order]
        slots_S, counts_S = slots_S[order], counts_S[order]
        query_len = 1
        if drafts and num_decodes == len(rows) <= self._max_padded_drafts:
            longest = 1 + self._drafts.shape[1]
            if int(computed_S.max()) + longest <= self._max_len:
                query_len, counts_S = longest, np.full_like(counts_S, longest)
        self._num_versions += 1
        layout = self.layout = BatchLayout(
            version=self._num_versions,
            scheduled_ids=list(num_scheduled),
            request_ids=[request.request_id for request in rows],
            step_data=[request.step_data for request in rows],
            slots_S=slots_S,
            num_decodes=num_decodes,
            query_len=query_len,
            is_decode_only=num_decodes == len(rows) and bool((counts_S == query_len).all()),
            num_tokens=int(counts_S.sum()),
            max_query_len=int(counts_S.max()),
            has_drafts=bool(drafts),
        )
        for table in self.tables.values():
            table.set_batch(slots_S)
        if layout.is_decode_only and not layout.has_drafts:
            layout.sampled_ids, layout.sampled_slots, layout.num_logits = layout.request_ids, slots_S, len(rows)
            buffers = self.decode_buffers
            buffers.rotate()
            return layout, buffers, self._lay_decodes(layout, buffers)
        if query_len > 1:
            layout.sampled_ids, layout.sampled_slots, layout.num_logits = layout.request_ids, slots_S, layout.num_tokens
            layout.sampled_counts = [query_len] * len(rows)
            self.decode_buffers.rotate()
            return layout, self.decode_buffers, self._lay_drafted(layout, self.decode_buffers, is_ahead=is_ahead)
        assert not is_ahead, "a step that runs ahead is no padded step of decodes"
        self._mixed_buffers.rotate()
        return layout, self._mixed_buffers, self._lay_mixed(layout, rows, counts_S, self._mixed_buffers)

    def can_run_ahead(self, last_tokens: Mapping[str, tuple[int, int]]) -> bool:
        """Whether a step of these decodes is padded to as many draft tokens each, whatever the step before it gains. last_tokens: of
        `SchedulerOutput`.
        """
        longest = max(num_tokens for num_tokens, _ in last_tokens.values())
        steps_len = 2 * (1 + self._drafts.shape[1])
        return len(last_tokens) <= self._max_padded_drafts and longest - 1 + steps_len <= self._max_len

    def correct(self, slot: int, num_tokens: int, last_token: int, draft: Sequence[int]) -> None:
        """A slot's sequence has `num_tokens` tokens, of which only the last is not computed. draft: guesses behind it."""
        self._computed[slot] = num_tokens - 1
        self._last_tokens[slot] = last_token
        self._drafts[slot] = -1
        self._drafts[slot, : len(draft)] = draft

    def will_advance_on_device(self) -> None:
        """A next step of the same sequences will make its inputs of those that the step prepared last has left on the device."""
        self._advanced_version = self.layout.version

    def forget_advanced(self) -> None:
        """The next step's inputs are to come from the host."""
        self._advanced_version = 0

    def _lay_decodes(self, layout: BatchLayout, buffers: StepBuffers) -> TokenBatch:
        """One token of each sequence; the device knows which."""
        slots_S, num_seqs, host = layout.slots_S, len(layout.slots_S), buffers.host
        positions_S = self._computed.take(slots_S, mode="clip")  # "raise" would go through a buffer
        self._map_slots(buffers, slots_S, positions_S)
        np.add(positions_S, 1, out=host["seq_lens"][:num_seqs], casting="unsafe")
        host["has_run"][:num_seqs] = 0
        self._computed[slots_S] += 1
        layout.max_seq_len = int(positions_S.max()) + 1
        if buffers.needs(layout.version):
            host["query_start_loc"][: num_seqs + 1] = np.arange(num_seqs + 1)
            host["slots"][:num_seqs] = slots_S
            host["sampled_slots"][:num_seqs] = slots_S
        return TokenBatch(
            token_ids=self.host_last_tokens.take(slots_S, mode="clip"),
            positions=positions_S,
            query_start_loc=host["query_start_loc"][: num_seqs + 1],
            row_indices=self._numbers[:num_seqs],
            request_ids=layout.request_ids,
            step_data=layout.step_data,
        )

    def _lay_drafted(self, layout: BatchLayout, buffers: StepBuffers, *, is_ahead: bool) -> TokenBatch:
        """`query_len` tokens of each sequence: the one sampled last, and guesses behind it, padded with -1. is_ahead: they are filled in
        as if the step before had gained nothing.
        """
        slots_S, num_seqs, q, host = layout.slots_S, len(layout.slots_S), layout.query_len, buffers.host
        computed_S, drafts_SK = self._computed[slots_S], self._drafts[slots_S]
        token_ids_T = np.concatenate((self._last_tokens[slots_S, None], drafts_SK), axis=1).ravel()
        positions_T = (computed_S[:, None] + np.arange(q)).ravel()
        self._map_slots(buffers, np.repeat(slots_S, q), positions_T)
        self._unmap(buffers, np.flatnonzero(token_ids_T < 0))
        host["seq_lens"][:num_seqs] = computed_S + q
        self._computed[slots_S] += q
        layout.max_seq_len = int(computed_S.max()) + q * (1 + is_ahead)
        layout.sampled_drafts = list(drafts_SK)
        host["has_run"][:num_seqs] = is_ahead
        if buffers.needs(layout.version):
            host["query_start_loc"][: num_seqs + 1] = np.arange(num_seqs + 1) * q
            host["slots"][:num_seqs] = slots_S
        return TokenBatch(
            token_ids=np.maximum(token_ids_T, 0),
            positions=positions_T,
            query_start_loc=host["query_start_loc"][: num_seqs + 1],
            row_indices=np.arange(num_seqs * q),
            request_ids=layout.request_ids,
            step_data=layout.step_data,
        )

    def _lay_mixed(self, layout: BatchLayout, rows: list[HeldRequest], counts_S: np.ndarray, buffers: StepBuffers) -> TokenBatch:
        host = buffers.host
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
        if not layout.has_drafts:
            token_ids_T[: layout.num_decodes] = self.host_last_tokens[slots_S[: layout.num_decodes]]
        else:
            for row in range(layout.num_decodes):
                known = (self._last_tokens[slots_S[row], None], self._drafts[slots_S[row]])
                token_ids_T[starts[row] : starts[row + 1]] = np.concatenate(known)[: counts_S[row]]
            # Where a draft is shorter than the step has room for, -1 stands for its other tokens.
            self._unmap(buffers, np.flatnonzero(token_ids_T < 0))
            np.maximum(token_ids_T, 0, out=token_ids_T)
        for row in range(layout.num_decodes, num_seqs):
            token_ids_T[starts[row] : starts[row + 1]] = rows[row].token_ids[computed_S[row] : ends_S[row]]

        if rows[0].pooling is not None:  # then all requests pool
            indices = self._lay_pooled(layout, rows, computed_S, ends_S, starts)
            return self._mixed_batch(layout, token_ids_T, positions_T, starts, indices, ends_S)
        sampled_rows = np.flatnonzero(ends_S >= self._known[slots_S])
        layout.sampled_ids = [rows[row].request_id for row in sampled_rows]
        layout.sampled_slots = slots_S[sampled_rows]
        host["sampled_slots"][: len(sampled_rows)] = layout.sampled_slots
        if not layout.has_drafts:
            indices = [starts[1:][sampled_rows].astype(np.int64) - 1]
        else:
            indices = [self._lay_rows(layout, int(row), rows[row].slot, int(counts_S[row]), starts) for row in sampled_rows]
        num_logits = sum(map(len, indices))
        for row in range(layout.num_decodes, num_seqs):
            request = rows[row]
            if request.params.prompt_logprobs is None:
                continue
            # The logits at a position are those of the token after it.
            first = int(computed_S[row])
            targets = request.token_ids[first + 1 : min(int(ends_S[row]) + 1, request.num_prompt_tokens)]
            if len(targets):
                indices.append(starts[row] + np.arange(len(targets)))
                layout.prompt_rows.append(
                    PromptRows(request_id=request.request_id, begin=num_logits, targets=targets, count=request.params.prompt_logprobs)
                )
                num_logits += len(targets)
        return self._mixed_batch(layout, token_ids_T, positions_T, starts, indices, ends_S)

    def _mixed_batch(
        self,
        layout: BatchLayout,
        token_ids_T: np.ndarray,
        positions_T: np.ndarray,
        starts: np.ndarray,
        indices: list[np.ndarray],
        ends_S: np.ndarray,
    ) -> TokenBatch:
        num_logits = sum(map(len, indices))
        if num_logits == 0:  # a model needs a row to compute; nobody reads it
            indices = [np.zeros(1, dtype=np.int64)]
        layout.num_logits = max(1, num_logits)
        self._computed[layout.slots_S] = ends_S
        layout.max_seq_len = int(ends_S.max())
        return TokenBatch(
            token_ids=token_ids_T,
            positions=positions_T,
            query_start_loc=starts,
            row_indices=np.concatenate(indices),
            request_ids=layout.request_ids,
            step_data=layout.step_data,
        )

    def _lay_pooled(
        self, layout: BatchLayout, rows: list[HeldRequest], computed_S: np.ndarray, ends_S: np.ndarray, starts: np.ndarray
    ) -> list[np.ndarray]:
        """The tokens of each sequence whose rows its pooling needs."""
        indices = []
        for row, request in enumerate(rows):
            first, last = int(starts[row]), int(starts[row + 1]) - 1
            pooling = None if request.pooling is None else request.pooling.pooling
            assert pooling is not None, "the engine core fills it in"
            is_last = bool(ends_S[row] >= len(request.token_ids))
            if pooling == "last":
                wanted = range(last, last + 1) if is_last else range(0)
            elif pooling == "cls":
                wanted = range(first, first + 1) if computed_S[row] == 0 else range(0)
            else:
                wanted = range(first, last + 1)
            indices.append(np.arange(wanted.start, wanted.stop, dtype=np.int64))
            layout.pooled_rows.append(
                PooledRows(
                    request_id=request.request_id,
                    slot=request.slot,
                    pooling=pooling,
                    count=len(wanted),
                    num_prompt_tokens=request.num_prompt_tokens,
                    is_last=is_last,
                )
            )
        return indices

    def _lay_rows(self, layout: BatchLayout, row: int, slot: int, num_tokens: int, starts: np.ndarray) -> np.ndarray:
        """The tokens of a sequence whose rows are sampled: of a decode all of them."""
        count = 1 if row >= layout.num_decodes else num_tokens
        layout.sampled_counts.append(count)
        layout.sampled_drafts.append(self._drafts[slot, : count - 1].copy())
        end = int(starts[row + 1])
        return np.arange(end - count, end)

    def _map_slots(self, buffers: StepBuffers, slots_T: np.ndarray, positions_T: np.ndarray) -> None:
        """slot mapping = block · P + position % P of each paged group. slots_T: batch slot of each token's sequence."""
        for name, table in self.tables.items():
            size = self.tokens_per_page[name]
            columns_T = positions_T // size
            places_T = slots_T * table.num_columns
            places_T += columns_T
            out = buffers.host_slot_mapping(name)[: len(positions_T)]
            np.multiply(table.flat_slot_table.take(places_T), size, out=out)
            columns_T *= -size
            out += columns_T
            out += positions_T

    def _unmap(self, buffers: StepBuffers, tokens: np.ndarray) -> None:
        """Nothing is written for these tokens: they are padding."""
        for name in self.tables:
            buffers.host_slot_mapping(name)[tokens] = -1

    def _forget_layout(self) -> None:
        self.layout = BatchLayout()
