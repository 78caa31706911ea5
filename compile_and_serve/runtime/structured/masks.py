"""The state of structured sequences, and the masks that they put on a step's logits.

Shape legend: S rows of logits, V vocabulary, M masked rows of a step, W words of a mask (32 tokens each).

`GrammarSequence` follows one sequence's tokens. `TokenMasks` computes the masks of a step on the host, while the device runs the
model, and applies them to the logits before sampling.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import llguidance
import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.sampling.token_masks import mask_tokens
from compile_and_serve.runtime.structured.compiler import CompiledGrammar
from compile_and_serve.runtime.structured.distinct_items import DistinctItems
from compile_and_serve.runtime.structured.grammar_error import GRAMMAR_FAILED

SLOW_SECONDS = 0.005  # of all masks of a step
LONG_SECONDS = 0.001  # of one mask
_PARALLEL_ROWS = 4  # fewer rows are not worth the threads
_MAX_THREADS = 8


class Preamble:
    """The free text before the structure: tokens up to the first of the markers.

    starts: tokens that begin the text, or else there is none and the structure begins at once; empty: the text is open.
    anywhere: other tokens may come before starts. budget: tokens of the text after which the first marker is forced.
    """

    def __init__(self, markers: Sequence[Sequence[int]], starts: Sequence[int], budget: int | None, *, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        self._markers = [list(marker) for marker in markers]
        self._starts = list(starts)
        self._budget = budget
        self._recent: list[int] = []
        self._num_tokens = 0
        self._num_matched = 0  # of starts
        self.is_over = False

    def copy(self) -> Preamble:
        """An independent copy."""
        other = copy.copy(self)
        other._recent = self._recent.copy()
        return other

    @property
    def next_start(self) -> int | None:
        """The next token of starts, as long as the text may or may not begin."""
        return self._starts[self._num_matched] if self._num_matched < len(self._starts) else None

    @property
    def forced_token(self) -> int | None:
        """The next token of the marker that ends a text whose budget is used up."""
        if self.next_start is not None or self._budget is None or self._num_tokens < self._budget:
            return None
        marker = self._markers[0]
        known = next(n for n in range(len(marker) - 1, -1, -1) if self._recent[len(self._recent) - n :] == marker[:n])
        return marker[known]

    def advance(self, token: int) -> None:
        """Follow a token. If it does not belong to starts, the structure has begun with the tokens so far."""
        if (start := self.next_start) is not None:
            if self._anywhere:
                self._recent = [*self._recent, token][-len(self._starts) :]
                if self._recent == self._starts:
                    self._num_matched, self._recent = len(self._starts), []
                return
            self._num_matched += token == start
            self.is_over = token != start
            return
        self._num_tokens += 1
        self._recent = [*self._recent, token][-max(map(len, self._markers)) :]
        self.is_over = any(self._recent[-len(marker) :] == marker for marker in self._markers)


class GrammarSequence:
    """Where one sequence is in its grammar.

    begins_after, thinking_token_budget, thinking_starts, is_free, may_end_before: see `StructuredOutputsParams`. min_tokens: output
    tokens before which none of stop_ids may follow, unless nothing else can. error: why no mask can be computed any more, as a sentence.
    """

    __slots__ = (
        "_distinct",
        "_is_free",
        "_pending",
        "_starting",
        "error",
        "has_ended",
        "matcher",
        "may_end_before",
        "min_tokens",
        "num_tokens",
        "preamble",
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
        may_end_before: bool = False,
    ) -> None:
        self.matcher = grammar.matcher.deep_copy()
        self._distinct = None if grammar.distinct is None else DistinctItems(grammar.distinct)
        self.min_tokens = min_tokens
        self.stop_ids = np.array(list(stop_ids), dtype=np.int64)
        self.num_tokens = 0
        self.preamble: Preamble | None = None
        if begins_after:
            self.preamble = Preamble(begins_after, thinking_starts, thinking_token_budget, anywhere=is_free)
        self.has_ended = False
        self.may_end_before = may_end_before
        self.error: str | None = None
        self._starting: llguidance.LLMatcher | None = None  # as if the structure had begun with the tokens of starts
        self._pending: list[int] = []  # tokens of starts so far
        self._is_free = is_free

    @property
    def is_free(self) -> bool:
        """Whether nothing but the budget restricts the output."""
        return self._is_free

    @property
    def forced_token(self) -> int | None:
        """See `Preamble.forced_token`."""
        return None if self.preamble is None else self.preamble.forced_token

    @property
    def is_masked(self) -> bool:
        """Whether the next token is restricted."""
        if self._is_free:
            return self.forced_token is not None
        return not self.has_ended

    @property
    def starting_matcher(self) -> llguidance.LLMatcher | None:
        """The grammar's state if the structure begins at once, as long as it may."""
        return self._starting if self._pending else self.matcher

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that the sequence generated."""
        for token in tokens:
            self.num_tokens += 1
            if self.preamble is not None:
                self._advance_preamble(self.preamble, token)
            elif self.has_ended or self._is_free:
                return
            else:
                self._follow(token)

    def _advance_preamble(self, preamble: Preamble, token: int) -> None:
        undecided = preamble.next_start is not None
        preamble.advance(token)
        if undecided and preamble.is_over:
            for earlier in (*self._pending, token):
                if not self._is_free:
                    self._follow(earlier)
        elif undecided and not self._is_free:
            self._starting = self.matcher.deep_copy() if not self._pending else self._starting
            self._pending.append(token)
            if self._starting is not None and not (self._starting.validate_tokens([token]) == 1 and self._starting.consume_token(token)):
                self._starting = None
        if preamble.is_over:
            self.preamble = None

    def _follow(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            self.error = self.error or describe(self.matcher)
        elif self._distinct is not None:
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
            if draft is None or not mask_W.view(np.uint32)[draft // 32] >> (draft % 32) & 1:
                return  # no row behind a refused draft is sampled
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
        self.seconds: dict[int, float] = {}  # by `MaskedRows.first_row`
        self._was_slow = False
        self._executor = llguidance.LLExecutor(num_threads=max(1, min(_MAX_THREADS, num_cores)))

    def fill(self, batch: Sequence[MaskedRows], *, is_timed: bool = False) -> int:
        """Compute the masks of the rows whose next token is restricted; → M, how many. Sets `error` where it fails.

        is_timed: where the masks of the step before took `SLOW_SECONDS`, compute one after the other, and note in `seconds` which of them
        take long.
        """
        began = time.perf_counter()
        is_timed &= self._was_slow
        self.seconds.clear()
        masked = [rows for rows in batch if rows.sequence.is_masked and rows.sequence.error is None]
        masks, rows_M = self._masks_MW.numpy(), self._rows_M.numpy()
        count = 0
        for rows in masked:
            for offset in range(1 + len(rows.drafts)):
                rows_M[count + offset] = rows.first_row + offset
            count += 1 + len(rows.drafts)
        masks[:count] = -1  # rows behind a guess that the grammar excludes are not written
        jobs: list[_Job] = []
        first = 0
        for rows in masked:
            jobs += _jobs(rows, first, masks)
            first += 1 + len(rows.drafts)
        self._compute(jobs, count, is_timed=is_timed)
        for job in jobs:
            sequence = job.rows.sequence
            if job.matcher.is_error():
                sequence.error = describe(job.matcher)
                masks[job.first : job.first + 1 + len(job.drafts)] = -1
                continue
            sequence.exclude_repeated(masks[job.first : job.first + 1 + len(job.drafts)], job.drafts)
            num_tokens = sequence.num_tokens + job.offset
            for offset in range(min(1 + len(job.drafts), sequence.min_tokens - num_tokens)):
                _exclude(masks[job.first + offset], sequence.stop_ids)
            if job.start is not None:
                _include(masks[job.first], job.start)
        self._was_slow = time.perf_counter() - began > SLOW_SECONDS
        return count

    def _compute(self, jobs: Sequence[_Job], count: int, *, is_timed: bool) -> None:
        pointer, width = self._masks_MW.data_ptr(), self._masks_MW.shape[1] * 4
        if is_timed:
            for job in jobs:
                began = time.perf_counter()
                if job.drafts:
                    self._executor.unsafe_compute_mask_ptr_with_draft_token([(job.matcher, job.first, job.drafts)], pointer, width, count)
                else:
                    job.matcher.unsafe_compute_mask_ptr(pointer + job.first * width, width)
                if (seconds := time.perf_counter() - began) > LONG_SECONDS:
                    self.seconds[job.rows.first_row] = seconds
            return
        if with_drafts := [(job.matcher, job.first, job.drafts) for job in jobs if job.drafts]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, pointer, width, count)
        single = [(job.matcher, job.first) for job in jobs if not job.drafts]
        if len(single) >= _PARALLEL_ROWS:
            self._executor.unsafe_compute_mask_ptr(single, pointer, width, count)
        else:
            for matcher, row in single:
                matcher.unsafe_compute_mask_ptr(pointer + row * width, width)

    def apply(self, logits_SV: torch.Tensor, count: int) -> None:
        """Set the logits of the tokens that the masks exclude to -inf, in place. count: of `fill`."""
        if not self._shares_memory:
            self._device_masks_MW[:count].copy_(self._masks_MW[:count], non_blocking=True)
            self._device_rows_M[:count].copy_(self._rows_M[:count], non_blocking=True)
        mask_tokens(logits_SV, self._device_masks_MW[:count], self._device_rows_M[:count])


class _Job(NamedTuple):
    """Masks of a grammar: row `first` and one behind each draft. offset: of the row among the sequence's.

    start: a token that may follow in the first row, too.
    """

    rows: MaskedRows
    matcher: llguidance.LLMatcher
    first: int
    drafts: list[int]
    offset: int = 0
    start: int | None = None


def _jobs(rows: MaskedRows, first: int, masks: np.ndarray) -> list[_Job]:
    """What the grammar has to compute for a sequence's rows, of which the others are written."""
    sequence = rows.sequence
    if sequence.preamble is None:
        return [_Job(rows, sequence.matcher, first, rows.drafts)]
    preamble = sequence.preamble.copy()
    found = []
    for offset, draft in enumerate([*rows.drafts, None]):
        mask_W = masks[first + offset]
        start, forced = preamble.next_start, preamble.forced_token
        if start is not None and not sequence.is_free:
            matcher = sequence.starting_matcher if offset == 0 else None
            if matcher is None:
                _only(mask_W, start)
            elif draft is None or draft == start:
                found.append(_Job(rows, matcher, first, [], start=start))
            else:
                return [_Job(rows, matcher, first, rows.drafts, start=start)]
        elif forced is not None:
            _only(mask_W, forced)
        elif not sequence.is_free and not sequence.may_end_before:
            _exclude(mask_W, sequence.stop_ids)
        if draft is None:
            break
        preamble.advance(draft)
        if preamble.is_over:
            if not sequence.is_free:
                found.append(_Job(rows, sequence.matcher, first + offset + 1, rows.drafts[offset + 1 :], offset + 1))
            break
    return found


def _only(mask_W: np.ndarray, token: int) -> None:
    mask_W[:] = 0
    _include(mask_W, token)


def _include(mask_W: np.ndarray, token: int) -> None:
    mask_W.view(np.uint32)[token // 32] |= np.uint32(1) << np.uint32(token % 32)


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
