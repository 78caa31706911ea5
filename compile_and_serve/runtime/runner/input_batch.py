"""`InputBatch`: the requests of a model that generates, and the inputs of their steps.

Shape legend: R batch slots, S sequences of the step (rows of the batch), T tokens of the step.

A step that decodes the same sequences as the step before, both without drafts or both with as many, reuses its
`BatchLayout` and only moves positions on; where the device advances its own inputs, the host fills nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import StepInput, TokenBatch
from compile_and_serve.runtime.runner.base_batch import BaseBatch, BatchLayout, HeldRequest, PromptRows
from compile_and_serve.runtime.runner.state_memory import PageLayout
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput


class InputBatch(BaseBatch):
    """Adds decodes, drafts and rows that are sampled.

    On the device, by batch slot, with an element for padding: `last_tokens`: int64 [R + 1], sampled last. `num_new_tokens`:
    int64 [R + 1], tokens that the last step with drafts has given the slot's sequence.
    """

    def __init__(
        self,
        inputs: Sequence[StepInput],
        groups: Sequence[StateGroup],
        pages: PageLayout,
        num_pages: int,
        *,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
        max_drafts: int = 0,
        max_drafted_rows: int = 0,
        max_padded_drafts: int = 0,
        resumes: bool = True,
        **options: Any,
    ) -> None:
        """max_drafts: of a decode. max_drafted_rows: of a step with drafts. max_padded_drafts: steps of up to so many decodes are padded to
        `max_drafts` each. resumes: a sequence of which all but the last known token is computed decodes at once, where there are no drafts.
        options: and the others, of `BaseBatch`.
        """
        super().__init__(
            inputs,
            groups,
            pages,
            num_pages,
            num_slots=num_slots,
            max_model_len=max_model_len,
            device=device,
            max_sampled=max(num_slots, max_drafted_rows),
            **options,
        )
        self._max_len = max_model_len
        self._max_padded_drafts = max_padded_drafts
        self._resumes = resumes and not max_drafts  # with drafts the host says what a decode's tokens are, and drafters follow prompts
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.num_new_tokens = torch.zeros_like(self.last_tokens)
        # The host's view of them; where it has none, zeros stand for tokens that only the device knows.
        self._platform = platform_of(device)
        shares_memory = self._platform.shares_host_memory
        self.host_last_tokens = self.last_tokens.numpy() if shares_memory else np.zeros(num_slots + 1, dtype=np.int64)
        self._numbers = np.arange(num_slots)
        # A step of decodes only copies what it needs, not arrays as long as the token budget.
        self.decode_buffers = self._make_buffers(num_slots)
        # Of sequences with guessed tokens, which the host knows: the token sampled last, and the guesses behind it.
        self._last_tokens = np.zeros(num_slots, dtype=np.int64)
        self._drafts = np.zeros((num_slots, max_drafts), dtype=np.int64)
        self._advanced_version = 0  # of the layout whose next step lies in the device's arrays

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
        if self._resumes:
            self._resume(rows, slots_S, counts_S, computed_S)
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
        layout = self._new_layout(
            num_scheduled,
            rows,
            slots_S,
            counts_S,
            num_decodes=num_decodes,
            query_len=query_len,
            is_decode_only=num_decodes == len(rows) and bool((counts_S == query_len).all()),
            has_drafts=bool(drafts),
        )
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
        return layout, self._mixed_buffers, self._lay_mixed(layout, rows, counts_S)

    def _resume(self, rows: list[HeldRequest], slots_S: np.ndarray, counts_S: np.ndarray, computed_S: np.ndarray) -> None:
        """Let sequences be decodes of which all but the last known token is computed, as behind a prefix from another engine: a step of
        decodes alone has a graph.
        """
        resumed = np.flatnonzero((computed_S > 0) & (computed_S == self._known[slots_S] - 1) & (counts_S == 1))
        if not len(resumed):
            return
        slots = slots_S[resumed]
        tokens = np.array([rows[row].token_ids[-1] for row in resumed], dtype=np.int64)
        self._known[slots] -= 1
        if self._platform.shares_host_memory:
            self.host_last_tokens[slots] = tokens
        else:
            upload = self._platform.upload
            self.last_tokens.index_copy_(0, upload(slots, through_pinned=True), upload(tokens, through_pinned=True))

    def draft_ends(self, request_id: str) -> frozenset[int]:
        """Tokens at which drafts of a request that is held end."""
        structured = self._requests[request_id].params.structured_outputs
        return frozenset() if structured is None else structured.draft_ends

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
            arrays=layout.arrays,
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
            arrays=layout.arrays,
        )

    def _fill_decodes(self, layout: BatchLayout, starts: np.ndarray, token_ids_T: np.ndarray) -> None:
        slots_S = layout.slots_S
        if not layout.has_drafts:
            token_ids_T[: layout.num_decodes] = self.host_last_tokens[slots_S[: layout.num_decodes]]
            return
        for row in range(layout.num_decodes):
            known = (self._last_tokens[slots_S[row], None], self._drafts[slots_S[row]])
            token_ids_T[starts[row] : starts[row + 1]] = np.concatenate(known)[: starts[row + 1] - starts[row]]
        # Where a draft is shorter than the step has room for, -1 stands for its other tokens.
        self._unmap(self._mixed_buffers, np.flatnonzero(token_ids_T < 0))
        np.maximum(token_ids_T, 0, out=token_ids_T)

    def _choose_rows(
        self, layout: BatchLayout, rows: list[HeldRequest], computed_S: np.ndarray, ends_S: np.ndarray, starts: np.ndarray
    ) -> list[np.ndarray]:
        """The rows to sample, then those that prompts' logprobs need."""
        slots_S = layout.slots_S
        sampled_rows = np.flatnonzero(ends_S >= self._known[slots_S])
        layout.sampled_ids = [rows[row].request_id for row in sampled_rows]
        layout.sampled_slots = slots_S[sampled_rows]
        self._mixed_buffers.host["sampled_slots"][: len(sampled_rows)] = layout.sampled_slots
        if not layout.has_drafts:
            indices = [starts[1:][sampled_rows].astype(np.int64) - 1]
        else:
            indices = [self._sampled_rows(layout, int(row), rows[row].slot, starts) for row in sampled_rows]
        num_logits = sum(map(len, indices))
        for row in range(layout.num_decodes, len(rows)):
            request = rows[row]
            if request.params.prompt_logprobs is None:
                continue
            # The logits at a position are those of the token after it.
            first = int(computed_S[row])
            targets = request.token_ids[first + 1 : min(int(ends_S[row]) + 1, request.num_prompt_tokens)]
            if len(targets):
                indices.append(starts[row] + np.arange(len(targets)))
                layout.prompt_rows.append(
                    PromptRows(request=request, begin=num_logits, targets=targets, count=request.params.prompt_logprobs)
                )
                num_logits += len(targets)
        return indices

    def _sampled_rows(self, layout: BatchLayout, row: int, slot: int, starts: np.ndarray) -> np.ndarray:
        """The tokens of a sequence whose rows are sampled: of a decode all of them."""
        end = int(starts[row + 1])
        count = 1 if row >= layout.num_decodes else end - int(starts[row])
        layout.sampled_counts.append(count)
        layout.sampled_drafts.append(self._drafts[slot, : count - 1].copy())
        return np.arange(end - count, end)

    def _unmap(self, buffers: StepBuffers, tokens: np.ndarray) -> None:
        """Nothing is written for these tokens: they are padding."""
        for name in self.tokens_per_page:
            buffers.host_slot_mapping(name)[tokens] = -1
