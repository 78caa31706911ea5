"""The state of structured sequences, and the masks that they put on a step's logits.

Shape legend: S rows of logits, V vocabulary, M masked rows of a step, W words of a mask (32 tokens each).

`GrammarSequence` follows one sequence's tokens. `TokenMasks` computes the masks of a step on the host, while the device runs the
model, and applies them to the logits before sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.sampling.token_masks import mask_tokens
from compile_and_serve.runtime.structured.compiler import CompiledGrammar
from compile_and_serve.runtime.structured.distinct_items import DistinctItems
from compile_and_serve.runtime.structured.grammar_error import GRAMMAR_FAILED

_PARALLEL_ROWS = 4  # fewer rows are not worth the threads
_MAX_THREADS = 8


class GrammarSequence:
    """Where one sequence is in its grammar.

    begins_after, thinking_token_budget, thinking_starts, is_free: see `StructuredOutputsParams`. min_tokens: output tokens before
    which none of stop_ids may follow, unless nothing else can. error: why no mask can be computed any more, as a sentence.
    """

    __slots__ = (
        "_begins_after",
        "_budget",
        "_distinct",
        "_is_free",
        "_recent",
        "_starts",
        "_thinking_tokens",
        "error",
        "has_begun",
        "has_ended",
        "matcher",
        "min_tokens",
        "num_tokens",
        "stop_ids",
    )

    def __init__(
        self,
        grammar: CompiledGrammar,
        begins_after: Sequence[Sequence[int]],
        min_tokens: int,
        stop_ids: Sequence[int],
        *,
        thinking_token_budget: int | None = None,
        thinking_starts: Sequence[int] = (),
        is_free: bool = False,
    ) -> None:
        self.matcher = grammar.matcher.deep_copy()
        self._distinct = None if grammar.distinct is None else DistinctItems(grammar.distinct)
        self.min_tokens = min_tokens
        self.stop_ids = np.array(list(stop_ids), dtype=np.int64)
        self.num_tokens = 0
        self.has_begun = not begins_after
        self.has_ended = False
        self.error: str | None = None
        self._begins_after = [list(marker) for marker in begins_after]
        self._recent: list[int] = []
        self._budget = thinking_token_budget
        self._starts = list(thinking_starts)
        self._thinking_tokens: int | None = None if thinking_starts else 0  # None: not started
        self._is_free = is_free

    @property
    def is_masked(self) -> bool:
        """Whether the grammar restricts the next token."""
        return (self.has_begun and not self.has_ended and not self._is_free) or self.forced_token is not None

    @property
    def forced_token(self) -> int | None:
        """The next token of the marker that ends free text whose budget is used up."""
        if self.has_begun or self._budget is None or (self._thinking_tokens or 0) < self._budget:
            return None
        if self._thinking_tokens is None:
            return None
        marker = self._begins_after[0]
        known = next(n for n in range(len(marker) - 1, -1, -1) if self._recent[len(self._recent) - n :] == marker[:n])
        return marker[known]

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that the sequence generated."""
        for token in tokens:
            self.num_tokens += 1
            if not self.has_begun:
                longest = max(len(self._starts), *map(len, self._begins_after))
                self._recent = [*self._recent, token][-longest:]
                if self._thinking_tokens is not None:
                    self._thinking_tokens += 1
                elif self._recent[-len(self._starts) :] == self._starts:
                    self._thinking_tokens = 0
                self.has_begun = any(self._recent[-len(marker) :] == marker for marker in self._begins_after)
                continue
            if self.has_ended or self._is_free:
                return
            if not self.matcher.consume_token(token):
                self.error = self.error or describe(self.matcher)
            if self._distinct is not None:
                self._distinct.advance(token)
            # After an end token, steps in flight sample on.
            self.has_ended = self.matcher.is_stopped() and self.matcher.is_accepting() and token in self.stop_ids

    def exclude_repeated(self, masks: np.ndarray, drafts: Sequence[int]) -> None:
        """Clear the bits of tokens that would repeat an item which must be distinct. masks: int32 [1 + len(drafts), W]."""
        if self._distinct is None:
            return
        state = self._distinct.copy() if drafts else self._distinct
        for mask_W, draft in zip(masks, [*drafts, None], strict=True):
            state.exclude(mask_W)
            if not mask_W.any():
                self.error = f"{GRAMMAR_FAILED}: no token can follow without repeating an item."
                mask_W[:] = -1
            if draft is not None:
                state.advance(draft)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedRows:
    """Consecutive rows of logits that belong to one sequence. drafts: guessed tokens; row i + 1 follows drafts[i]."""

    first_row: int
    sequence: GrammarSequence
    drafts: list[int]


class TokenMasks:
    """Buffers for the masks of `num_rows` rows. The device's copy is written in stream order, the host's when `apply` is called: the
    step that used them last must have ended.
    """

    def __init__(self, num_rows: int, num_words: int, device: torch.device, num_cores: int) -> None:
        platform = platform_of(device)
        self._shares_memory = platform.shares_host_memory
        self._masks_MW = platform.host_zeros(num_rows * num_words, torch.int32).view(num_rows, num_words)
        self._rows_M = platform.host_zeros(num_rows, torch.int32)
        self._device_masks_MW, self._device_rows_M = self._masks_MW, self._rows_M
        if not self._shares_memory:
            self._device_masks_MW = torch.zeros_like(self._masks_MW, device=device)
            self._device_rows_M = torch.zeros_like(self._rows_M, device=device)
        self._executor = llguidance.LLExecutor(num_threads=max(1, min(_MAX_THREADS, num_cores)))

    def fill(self, batch: Sequence[MaskedRows]) -> int:
        """Compute the masks of the rows whose next token is restricted; → M, how many. Sets `error` where it fails."""
        masked = [rows for rows in batch if rows.sequence.is_masked and rows.sequence.error is None]
        masks, rows_M = self._masks_MW.numpy(), self._rows_M.numpy()
        count = 0
        jobs: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        forced: list[tuple[int, int]] = []
        for rows in masked:
            token = rows.sequence.forced_token
            if token is None:
                jobs.append((rows.sequence.matcher, count, rows.drafts))
            else:
                forced.append((count, token))
            for offset in range(1 + len(rows.drafts)):
                rows_M[count] = rows.first_row + offset
                count += 1
        masks[:count] = -1  # rows behind a guess that the grammar excludes are not written
        for row, token in forced:
            masks[row] = 0
            masks.view(np.uint32)[row, token // 32] = np.uint32(1) << np.uint32(token % 32)
        pointer, width = self._masks_MW.data_ptr(), masks.strides[0]
        if with_drafts := [job for job in jobs if job[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, pointer, width, count)
        single = [(matcher, row) for matcher, row, drafts in jobs if not drafts]
        if len(single) >= _PARALLEL_ROWS:
            self._executor.unsafe_compute_mask_ptr(single, pointer, width, count)
        else:
            for matcher, row in single:
                matcher.unsafe_compute_mask_ptr(pointer + row * width, width)
        followed = [rows for rows in masked if rows.sequence.forced_token is None]
        for rows, (matcher, row, _) in zip(followed, jobs, strict=True):
            sequence = rows.sequence
            if matcher.is_error():
                sequence.error = describe(matcher)
                masks[row : row + 1 + len(rows.drafts)] = -1
                continue
            sequence.exclude_repeated(masks[row : row + 1 + len(rows.drafts)], rows.drafts)
            if sequence.num_tokens < sequence.min_tokens:
                for offset in range(min(1 + len(rows.drafts), sequence.min_tokens - sequence.num_tokens)):
                    _exclude(masks[row + offset], sequence.stop_ids)
        return count

    def apply(self, logits_SV: torch.Tensor, count: int) -> None:
        """Set the logits of the tokens that the masks exclude to -inf, in place. count: of `fill`."""
        if not self._shares_memory:
            self._device_masks_MW[:count].copy_(self._masks_MW[:count], non_blocking=True)
            self._device_rows_M[:count].copy_(self._rows_M[:count], non_blocking=True)
        mask_tokens(logits_SV, self._device_masks_MW[:count], self._device_rows_M[:count])


def _exclude(mask_W: np.ndarray, ids: np.ndarray) -> None:
    """Clear the bits of `ids`, unless no other bit is set."""
    kept = mask_W.copy()
    np.bitwise_and.at(kept.view(np.uint32), ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    if kept.any():
        mask_W[:] = kept


def describe(matcher: llguidance.LLMatcher) -> str:
    """A matcher's error as a sentence."""
    detail = (matcher.get_error() or "a token does not fit").splitlines()[0][:200].rstrip(".")
    return f"{GRAMMAR_FAILED}: {detail}."
