"""The requests that the runner holds, and the inputs of a step made from them.

Shape legend: R slots, S sequences of the step (rows of the batch), T tokens of the step, M block-table columns.

A request keeps a slot while it is held. Per-slot numbers live in numpy arrays, so that a step costs a fixed number of
array operations. A step that decodes the same sequences as the step before reuses its `BatchLayout` and only moves
positions on; where the device does that, nothing is filled in at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from compile_and_serve.runtime.runner.block_tables import BlockTables
from compile_and_serve.runtime.runner.staged_arrays import StagedArrays
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS
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
    num_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """Rows of logits that speak of a prompt. begin: first row; targets: int64 token ids that the rows are asked
    about.
    """

    request_id: str
    begin: int
    targets: np.ndarray
    count: int  # alternatives a row


@dataclass(kw_only=True, slots=True)
class BatchLayout:
    """What a step's composition says. Rows are sequences, decodes first, the longest of them first: attention takes rows
    in order, and the device is idle the less at its end the shorter the last ones are. The first rows of logits are the
    sampled ones.

    version: unique to the composition. scheduled_ids: the same requests as request_ids, in the order in which they were
    scheduled. num_decodes: leading rows of one token that is the device's last token of the slot.
    """

    version: int = 0
    scheduled_ids: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    slots_S: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    table_base_S: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # slot · M
    num_decodes: int = 0
    is_decode_only: bool = False
    num_tokens: int = 0
    max_query_len: int = 1
    sampled_ids: list[str] = field(default_factory=list)
    sampled_slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    prompt_rows: list[PromptRows] = field(default_factory=list)
    num_logits: int = 0
    max_seq_len: int = 0
    # The device makes this step's inputs of the step before's; the host's arrays are not filled.
    is_on_device: bool = False


class InputBatch:
    """`add`, `remove` and `append_blocks` as the scheduler says, then `prepare` the step.

    `last_tokens`: int64 [R] on the device, the last sampled token of each slot.
    """

    def __init__(
        self, *, num_slots: int, max_num_tokens: int, max_padded_size: int, max_model_len: int, block_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """max_num_tokens: of one step. max_padded_size: largest size that a step's tokens may be padded to."""
        self.block_size = block_size
        self.device = device
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.tables = BlockTables(num_slots, -(-(max_model_len + 1) // block_size), device)
        self.layout = BatchLayout()
        self._flat_slot_table = self.tables.slot_table.reshape(-1)
        # Two sets of arrays: a step of decodes only copies what it needs, not arrays as long as the token budget.
        self.decode_arrays = StagedArrays(_fields(num_slots, max(num_slots, max_padded_size)), device)
        self._mixed_arrays = StagedArrays(_fields(num_slots, max(max_num_tokens, max_padded_size)), device)
        self._requests: dict[str, HeldRequest] = {}
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._computed = np.zeros(num_slots, dtype=np.int64)
        self._known = np.zeros(num_slots, dtype=np.int64)  # length of token_ids
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
            num_blocks=len(data.block_ids[0]),
        )
        self._requests[data.request_id] = request
        self._computed[slot] = data.num_computed_tokens
        self._known[slot] = len(request.token_ids)
        self.tables.write(slot, 0, data.block_ids[0])
        self._forget_layout()
        return request

    def remove(self, request_id: str) -> HeldRequest | None:
        """Forget a request; None when it is not held (it was never scheduled)."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._free_slots.append(request.slot)
            self._forget_layout()
        return request

    def append_blocks(self, request_id: str, block_ids: list[int]) -> None:
        """The request's sequence goes on in `block_ids`."""
        request = self._requests[request_id]
        self.tables.write(request.slot, request.num_blocks, block_ids)
        request.num_blocks += len(block_ids)

    def prepare(self, scheduled: SchedulerOutput) -> tuple[BatchLayout, StagedArrays]:
        """Fill the host arrays of a step and move the requests on. `StagedArrays.upload` is left to the caller."""
        num_scheduled = scheduled.num_scheduled_tokens
        layout = self.layout
        advanced_version, self._advanced_version = self._advanced_version, 0
        if (
            layout.is_decode_only
            and scheduled.total_num_scheduled_tokens == len(num_scheduled)
            and layout.scheduled_ids == list(num_scheduled)
        ):
            arrays = self.decode_arrays
            layout.is_on_device = layout.version == advanced_version
            if layout.is_on_device:
                self._computed[layout.slots_S] += 1
                layout.max_seq_len += 1
                return layout, arrays
            host = arrays.rotate()
            self._fill_decodes(layout, host)
            if arrays.needs(layout.version):
                self._fill_decode_constants(layout, host)
            return layout, arrays

        rows = [self._requests[request_id] for request_id in num_scheduled]
        slots_S = np.array([request.slot for request in rows], dtype=np.int64)
        counts_S = np.fromiter(num_scheduled.values(), dtype=np.int64, count=len(rows))
        computed_S = self._computed[slots_S]
        is_decode_S = computed_S >= self._known[slots_S]
        num_decodes = int(is_decode_S.sum())
        order = np.argsort(np.where(is_decode_S, -computed_S, 1), kind="stable")
        rows = [rows[i] for i in order]
        slots_S, counts_S = slots_S[order], counts_S[order]
        self._num_versions += 1
        layout = self.layout = BatchLayout(
            version=self._num_versions,
            scheduled_ids=list(num_scheduled),
            request_ids=[request.request_id for request in rows],
            slots_S=slots_S,
            table_base_S=slots_S * self.tables.num_columns,
            num_decodes=num_decodes,
            is_decode_only=num_decodes == len(rows),
            num_tokens=int(counts_S.sum()),
            max_query_len=int(counts_S.max()),
        )
        self.tables.set_batch(slots_S)
        if layout.is_decode_only:
            layout.sampled_ids, layout.sampled_slots, layout.num_logits = layout.request_ids, slots_S, len(rows)
            arrays = self.decode_arrays
            host = arrays.rotate()
            self._fill_decodes(layout, host)
            arrays.needs(layout.version)
            self._fill_decode_constants(layout, host)
        else:
            arrays = self._mixed_arrays
            self._fill_mixed(layout, rows, counts_S, arrays.rotate())
        return layout, arrays

    def will_advance_on_device(self) -> None:
        """A next step of the same sequences will make its inputs of those that the step prepared last has left on the device."""
        self._advanced_version = self.layout.version

    def forget_advanced(self) -> None:
        """The next step's inputs are to come from the host."""
        self._advanced_version = 0

    def _fill_decodes(self, layout: BatchLayout, host: dict[str, np.ndarray]) -> None:
        slots_S, num_seqs = layout.slots_S, len(layout.slots_S)
        positions_S = host["positions"][:num_seqs]
        self._computed.take(slots_S, out=positions_S, mode="clip")  # "raise" would go through a buffer
        columns_S = positions_S // self.block_size
        blocks_S = self._flat_slot_table.take(layout.table_base_S + columns_S)
        # block · P + position % P
        columns_S *= -self.block_size
        columns_S += positions_S
        np.multiply(blocks_S, self.block_size, out=host["slot_mapping"][:num_seqs])
        host["slot_mapping"][:num_seqs] += columns_S
        np.add(positions_S, 1, out=host["seq_lens"][:num_seqs], casting="unsafe")
        host["has_run"][:num_seqs] = 0
        self._computed[slots_S] += 1
        layout.max_seq_len = int(positions_S.max()) + 1

    def _fill_decode_constants(self, layout: BatchLayout, host: dict[str, np.ndarray]) -> None:
        num_seqs = len(layout.slots_S)
        host["query_start_loc"][: num_seqs + 1] = np.arange(num_seqs + 1)
        host["logits_indices"][:num_seqs] = np.arange(num_seqs)
        host["slots"][:num_seqs] = layout.slots_S
        host["sampled_slots"][:num_seqs] = layout.slots_S

    def _fill_mixed(
        self, layout: BatchLayout, rows: list[HeldRequest], counts_S: np.ndarray, host: dict[str, np.ndarray]
    ) -> None:
        slots_S, num_seqs, num_tokens = layout.slots_S, len(rows), layout.num_tokens
        computed_S = self._computed[slots_S]
        ends_S = computed_S + counts_S
        starts = host["query_start_loc"][: num_seqs + 1]
        starts[0] = 0
        np.cumsum(counts_S, out=starts[1:])
        row_T = np.repeat(np.arange(num_seqs), counts_S)
        positions_T = np.arange(num_tokens) - starts[row_T] + computed_S[row_T]
        columns_T = positions_T // self.block_size
        blocks_T = self._flat_slot_table.take(layout.table_base_S[row_T] + columns_T)
        host["positions"][:num_tokens] = positions_T
        host["slot_mapping"][:num_tokens] = (blocks_T - columns_T) * self.block_size + positions_T
        host["seq_lens"][:num_seqs] = ends_S
        host["slots"][:num_seqs] = slots_S
        for row in range(layout.num_decodes, num_seqs):
            host["input_ids"][starts[row] : starts[row + 1]] = rows[row].token_ids[computed_S[row] : ends_S[row]]

        sampled_rows = np.flatnonzero(ends_S >= self._known[slots_S])
        num_sampled = len(sampled_rows)
        layout.sampled_ids = [rows[row].request_id for row in sampled_rows]
        layout.sampled_slots = slots_S[sampled_rows]
        host["sampled_slots"][:num_sampled] = layout.sampled_slots
        indices = host["logits_indices"]
        indices[:num_sampled] = starts[1:][sampled_rows] - 1
        num_logits = num_sampled
        for row in range(layout.num_decodes, num_seqs):
            request = rows[row]
            if request.params.prompt_logprobs is None:
                continue
            # The logits of a position speak of the token after it.
            first = int(computed_S[row])
            targets = request.token_ids[first + 1 : min(int(ends_S[row]) + 1, request.num_prompt_tokens)]
            if len(targets):
                indices[num_logits : num_logits + len(targets)] = starts[row] + np.arange(len(targets))
                layout.prompt_rows.append(
                    PromptRows(
                        request_id=request.request_id, begin=num_logits, targets=targets,
                        count=request.params.prompt_logprobs,
                    )
                )  # fmt: skip
                num_logits += len(targets)
        if num_logits == 0:  # a model needs a row to compute; nobody reads it
            indices[0] = 0
            num_logits = 1
        layout.num_logits = num_logits
        self._computed[slots_S] = ends_S
        layout.max_seq_len = int(ends_S.max())

    def _forget_layout(self) -> None:
        self.layout = BatchLayout()


def _fields(num_slots: int, num_tokens: int) -> dict[str, tuple[type[np.generic], int]]:
    return {
        "positions": (np.int64, num_tokens),
        "input_ids": (np.int64, num_tokens),
        "slot_mapping": (np.int64, num_tokens),
        "logits_indices": (np.int64, num_tokens + num_slots),
        "slots": (np.int64, num_slots),
        "sampled_slots": (np.int64, num_slots),
        "query_start_loc": (np.int32, num_tokens + 1),
        "seq_lens": (np.int32, num_tokens),
        "has_run": (np.int32, num_slots),
        "uniforms": (np.float32, num_slots),
        **{name: (dtype, num_slots) for name, dtype in SAMPLING_FIELDS.items()},
    }
