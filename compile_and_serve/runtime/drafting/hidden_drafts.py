"""Drafts of heads that read the target's hidden states.

Shape legend: T tokens of the target's step, S sequences that get drafts, K draft tokens at most, D hidden size, R batch slots.

A head reads the hidden state of each token and the token behind it. When it follows the target, it keeps the first draft token, and the
hidden state to go on from, of the row that the device finds to be the last accepted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS, LOGITS_INDICES, POSITIONS, Step
from compile_and_serve.runtime.drafting.chained_drafts import ChainedDrafts
from compile_and_serve.runtime.drafting.device_drafts import DraftSetup, TargetLayout, TargetStep
from compile_and_serve.runtime.sampling.decode_step import DecodeStep


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Sequences of a step, all int64 [S]: the batch slot, the row of the first token, and that of the last token that is right."""

    slots: torch.Tensor
    firsts: torch.Tensor
    lasts: torch.Tensor


class HiddenDrafts(ChainedDrafts):
    """The drafts of an EAGLE head, or of one layer for multi-token prediction."""

    tokens_ahead = 2  # at the position of a hidden state, whose next token is known

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        # By batch slot, then a row for padding sequences: the first draft token and the hidden state to go on from.
        num_slots, size = setup.batch.num_slots, self._compiled.drafter.hidden_size
        self._tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=setup.device)
        self._hidden = torch.zeros(num_slots + 1, size, dtype=self._compiled.hidden_dtype, device=setup.device)

    def _follow_step(self, target: TargetStep, *, keeps_state_only: bool) -> None:
        step, layout, sampled = target.step, target.layout, target.sampled
        metadata = self._metadata_of(step, layout)
        self._plan(metadata)
        rows, slots = step.inputs[LOGITS_INDICES.name][: step.num_seqs], None
        if layout is not None:
            rows = self._one_row
            if sampled is not None and not keeps_state_only:
                rows, slots = self._accepted_rows(step, layout, sampled), self._upload(layout.sampled_slots)
        tokens_T = self._next_tokens(step, layout, sampled)
        sequences = None if layout is None else self._sequences(metadata, layout, rows, has_sampled=slots is not None)
        self._run_head(step, metadata, target.outputs[HIDDEN_STATES], tokens_T, rows, slots, sequences, keeps_state_only=keeps_state_only)

    def _sequences(
        self, metadata: Mapping[str, AttentionMetadata], layout: TargetLayout, rows: torch.Tensor, *, has_sampled: bool
    ) -> SequenceRows | None:
        """All sequences of a step, for further layers. rows: int64, where those that sampled go on."""
        return None

    def _follow_decodes(self, step: DecodeStep, metadata: Mapping[str, AttentionMetadata], *, keeps_state_only: bool) -> None:
        self._fill_rows(step, metadata)
        size, q = step.padded_seqs, step.max_query_len
        sampled, hidden_TD = self._sampled_rows[: size * q], self._hidden_rows[: size * q]
        if keeps_state_only:
            self._run_head(step, metadata, hidden_TD, sampled, self._one_row, None, keeps_state_only=True)
            return
        rows = firsts = torch.arange(size, device=sampled.device) * q
        if q > 1:
            is_right = sampled.view(size, q)[:, :-1] == self.drafts[step.slots]
            rows = firsts + is_right.long().cumprod(dim=1).sum(dim=1)
        self._run_head(step, metadata, hidden_TD, sampled, rows, step.slots, SequenceRows(step.slots, firsts, rows))

    def _run_head(
        self,
        step: Step,
        metadata: Mapping[str, AttentionMetadata],
        hidden_TD: torch.Tensor,
        next_T: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor | None,
        sequences: SequenceRows | None = None,
        *,
        keeps_state_only: bool = False,
    ) -> None:
        """The head's pass over a step. next_T: int64, the token behind each of the step's. rows, slots: int64 [S], where each sequence
        goes on; slots is None where none does. sequences: all of the step, for further layers; None: a dummy step.
        """
        if "fc.weight" in self._extras:
            hidden_TD = F.linear(hidden_TD, self._extras["fc.weight"], self._extras.get("fc.bias"))
        inputs = self._inputs(next_T, step.inputs[POSITIONS.name], rows, hidden_TD)
        step = self._step_like(step, inputs, metadata, num_rows=rows.shape[0])
        given = self._run(step, keeps_state_only=keeps_state_only)
        self._keep_hidden(step, given, slots, sequences)
        if slots is not None:
            places = step.inputs[POSITIONS.name][rows] + self.tokens_ahead
            self._tokens.index_copy_(0, slots, self._choose(given[LOGITS], slots, places))

    def _keep_hidden(
        self, step: Step, given: Mapping[str, torch.Tensor], slots: torch.Tensor | None, sequences: SequenceRows | None
    ) -> None:
        """Keep what the next drafts go on from. step: the head's. given: its outputs. slots, sequences: of `_run_head`."""
        if slots is not None:
            self._hidden.index_copy_(0, slots, given[HIDDEN_STATES])

    def _new_drafts(self, num_seqs: int, num_drafts: int, host: Mapping[str, np.ndarray] | None) -> torch.Tensor:
        slots_S = self._asked.device["slots"][:num_seqs]
        first_S = self._tokens[slots_S]
        more_SK = self._chain(num_seqs, num_drafts - 1, 1, host, first_S, self._hidden[slots_S])
        return torch.cat((first_S[:, None], more_SK), dim=1)

    def _next_tokens(self, step: Step, layout: TargetLayout | None, sampled: torch.Tensor | None) -> torch.Tensor:
        """int64 [T]: the token behind each of the step's. Behind a sampled row that is the sampled one, for the host does not know more."""
        if layout is None or layout.num_decodes == len(layout.request_ids):
            tokens_T = self._one_row.new_zeros(step.padded_tokens)
        else:
            next_T = np.zeros(step.padded_tokens, dtype=np.int64)
            starts = next(iter(step.metadata.values())).query_start_loc_cpu
            ends_S = self._batch.lengths(layout.slots_S)
            for row in range(layout.num_decodes, len(layout.request_ids)):
                begin, count = int(starts[row]), int(starts[row + 1] - starts[row])
                first = int(ends_S[row]) - count + 1
                known = self._batch.known_tokens(layout.request_ids[row])[first : first + count]
                next_T[begin : begin + len(known)] = known
            tokens_T = self._upload(next_T, through_pinned=True)
        if sampled is not None:
            tokens_T.index_copy_(0, step.inputs[LOGITS_INDICES.name][: sampled.shape[0]], sampled)
        return tokens_T

    def _accepted_rows(self, step: Step, layout: TargetLayout, sampled: torch.Tensor) -> torch.Tensor:
        """int64: the token of the step behind which each sampled sequence goes on: that of its last right draft (`accepted_tokens`)."""
        indices = step.inputs[LOGITS_INDICES.name][: sampled.shape[0]]
        if not layout.sampled_counts:
            return indices
        counts = np.array(layout.sampled_counts)
        is_draft_SK = np.zeros((len(counts), self._num_drafts), dtype=np.bool_)
        for row, draft in zip(is_draft_SK, layout.sampled_drafts, strict=True):
            row[: len(draft)] = draft >= 0
        firsts_S = np.cumsum(counts) - counts
        places_SK = np.minimum(firsts_S[:, None] + np.arange(self._num_drafts), len(sampled) - 1)
        drafts_SK = self.drafts[self._upload(layout.sampled_slots)]
        is_right = (sampled[self._upload(places_SK)] == drafts_SK) & self._upload(is_draft_SK)
        return indices[self._upload(firsts_S) + is_right.long().cumprod(dim=1).sum(dim=1)]
