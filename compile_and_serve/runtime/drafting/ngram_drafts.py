"""`NgramDrafts`: drafts what followed the last tokens earlier in the same sequence, on the device.

Shape legend: R batch slots, W tokens of the longest sequence and of drafts behind it, S sequences that get drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.sampling.ngram_drafts import append_tokens, find_drafts
from compile_and_serve.custom_ops.step import LOGITS_INDICES
from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts, DraftSetup, TargetStep
from compile_and_serve.runtime.sampling_params import SamplingParams


class NgramDrafts(DeviceDrafts):
    """`follow` writes the tokens of each step behind the histories. Tokens behind a wrong draft are overwritten by the steps after."""

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        batch, device = setup.batch, setup.device
        self._lengths = setup.config.ngram_lengths
        self._repeats = setup.config.synthetic_acceptance_rate is not None  # the last token, where nothing is found
        width = setup.max_len + self._num_drafts + 1
        self._history_RW = torch.zeros(batch.num_slots + 1, width, dtype=torch.int32, device=device)
        self._rows_version = -1
        # Of each sampled row of the layout with this version: its batch slot, and its sequence's place in the step. int64 [2, L]
        self._rows = torch.zeros(2, 1, dtype=torch.int64, device=device)

    def add(self, slot: int, token_ids: np.ndarray, params: SamplingParams, num_prompt: int) -> None:
        """See `DeviceDrafts.add`."""
        self._history_RW[slot, : len(token_ids)] = self._upload(token_ids.astype(np.int32), through_pinned=True)

    def follow(self, target: TargetStep, *, keeps_state_only: bool = False) -> None:
        """Append the sampled tokens. Arguments: `DeviceDrafts.follow`."""
        step, layout, sampled = target.step, target.layout, target.sampled
        lengths = next(iter(step.metadata.values()))
        if layout is None:  # a warm-up
            self._ask([], [], 1)
            self._make_drafts(1, self._num_drafts, 0, is_ahead=False)
            row = torch.zeros(1, dtype=torch.int64, device=self.drafts.device)
            append_tokens(self._history_RW, row + self._batch.num_slots, row, row, lengths, row)
            return
        if sampled is None:
            return
        if self._rows_version != layout.version:
            counts = layout.sampled_counts or [1] * len(layout.sampled_ids)
            places = {slot: place for place, slot in enumerate(layout.slots_S.tolist())}
            sequences = [places[slot] for slot in layout.sampled_slots.tolist()]
            self._rows = self._upload(np.repeat(np.stack((layout.sampled_slots, sequences)), counts, axis=1), through_pinned=True)
            self._rows_version = layout.version
        rows_L = step.inputs[LOGITS_INDICES.name][: sampled.shape[0]]
        append_tokens(self._history_RW, self._rows[0], self._rows[1], rows_L, lengths, sampled)

    def _make_drafts(self, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        asked = self._asked.device
        find_drafts(
            self._history_RW,
            asked["slots"][:num_seqs],
            (self._known_positions() + 1)[:num_seqs],
            asked["counts"][:num_seqs],
            self.drafts,
            *self._lengths,
            repeats=self._repeats,
        )
