"""Changes to the logits that a request may ask for: allowed ids, bad words, min_tokens, bias and penalties.

Shape legend: S rows of the step (one for each request that samples), V vocabulary, H tokens of history, J bad words of
more than one token, W tokens of such a word before its last one, A rows that keep state.

State lives on the device, one row for each of the runner's slots. It grows by one token per step without the host, so
that the next step can be launched before the tokens of this one are known. Requests without these options cost nothing:
`plan` returns None for a batch of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.sampling.penalties import PenaltyPlan, PenaltyState
from compile_and_serve.runtime.sampling.speech_state import SpeechRows, SpeechState
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.speech_rules import SpeechRules

FOREVER = 1 << 62


@dataclass(kw_only=True, slots=True)
class _BadWords:
    """One request's bad words whose prefixes fit into W tokens. W is a power of two, so padding at most doubles a word."""

    prefixes_JW: np.ndarray  # int64, right-aligned, padded with -1
    last_J: np.ndarray  # int64, the token that must not follow


@dataclass(kw_only=True, slots=True)
class _SlotOptions:
    """One request's options as arrays, which `plan` concatenates."""

    bias_ids: np.ndarray  # int64; includes bad words of one token, with bias -inf
    bias: np.ndarray  # float32
    min_tokens: int
    stop_ids: np.ndarray  # int64, masked until min_tokens is reached
    allowed_ids: np.ndarray | None  # int64
    bad_words: dict[int, _BadWords]  # words of two tokens or more, by W
    penalty_row: int | None
    penalties: tuple[float, float, float]  # repetition, presence, frequency
    speech: SpeechRules | None


@dataclass(kw_only=True, slots=True)
class _BadWordsOfBatch:
    prefixes_JW: torch.Tensor
    history_rows_J: torch.Tensor  # of the rows that keep a history
    last_ids_J: torch.Tensor  # flat index (row · V + last token) into the logits


@dataclass(kw_only=True, slots=True)
class _BadSequences:
    rows_A: torch.Tensor  # rows of the batch that keep a history (int64, as slots_A)
    slots_A: torch.Tensor
    words: list[_BadWordsOfBatch]  # one for each W
    before_AD: torch.Tensor | None = None  # int64, the draft tokens before each row, padded with -1
    num_before_A: torch.Tensor | None = None


@dataclass(kw_only=True, slots=True)
class LogitsPlan:
    """Changes to the logits of one batch composition. valid_steps: steps until a row reaches its min_tokens."""

    bias_index: torch.Tensor | None = None  # int64, row · V + token
    bias: torch.Tensor | None = None
    allowed_rows: torch.Tensor | None = None
    allowed_index: torch.Tensor | None = None
    bad_sequences: _BadSequences | None = None
    penalties: PenaltyPlan | None = None
    speech: list[SpeechRows] | None = None
    valid_steps: int = FOREVER


class LogitsProcessors:
    """Options and state of requests by slot.

    Call `add` and `remove` for each request, `plan` for each batch composition, and `apply` and `observe` in each step.
    """

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.device, self._platform = device, platform_of(device)
        self._options: dict[int, _SlotOptions] = {}
        self._penalties = PenaltyState(vocab_size, num_slots, device)
        self._speech = SpeechState(num_slots, device)
        # int64, the last tokens of the output, newest last, padded with -1. H is the largest W of the current requests.
        self._history_SH: torch.Tensor | None = None

    def add(self, slot: int, params: SamplingParams, stop_ids: Sequence[int], prompt: np.ndarray, output: np.ndarray) -> None:
        """Add a request. prompt, output: int64 token ids; output is what was generated before a preemption."""
        self.remove(slot)
        bias = {int(token): value for token, value in (params.logit_bias or {}).items()}
        bias.update({word[0]: float("-inf") for word in params.bad_words_token_ids if len(word) == 1})
        sequences = [word for word in params.bad_words_token_ids if len(word) > 1]
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        has_penalties = penalties != (1.0, 0.0, 0.0)
        allowed = params.allowed_token_ids
        if not (bias or sequences or has_penalties or allowed or params.min_tokens > len(output) or params.speech_rules is not None):
            return
        self._options[slot] = _SlotOptions(
            bias_ids=np.array(list(bias), dtype=np.int64),
            bias=np.array(list(bias.values()), dtype=np.float32),
            min_tokens=params.min_tokens,
            stop_ids=np.array(list(stop_ids), dtype=np.int64),
            allowed_ids=None if allowed is None else np.array(sorted(set(allowed)), dtype=np.int64),
            bad_words=_by_width(sequences),
            penalty_row=self._penalties.add(prompt, output) if has_penalties else None,
            penalties=penalties,
            speech=params.speech_rules,
        )
        if params.speech_rules is not None:
            self._speech.add(slot, params.speech_rules, output)
        if sequences:
            self._fit_history()
            self._start_history(slot, output)

    def remove(self, slot: int) -> None:
        """Drop the slot's request. Does nothing if it had no options."""
        options = self._options.pop(slot, None)
        if options is not None and options.penalty_row is not None:
            self._penalties.remove(options.penalty_row)
        if options is not None and options.bad_words:
            self._fit_history()

    def plan(self, slots: list[int], num_outputs: np.ndarray, before: np.ndarray | None = None) -> LogitsPlan | None:
        """The changes for a batch whose row i is slots[i]; None if there are none.

        num_outputs: int64 [S], tokens that each row's request has generated so far. before: int64 [S, D], the draft tokens between these
        and the row, padded with -1 at the end; the plan is then good for one step.
        """
        if not self._options:
            return None
        rows = [(row, slot, self._options[slot]) for row, slot in enumerate(slots) if slot in self._options]
        if not rows:
            return None
        plan = LogitsPlan()
        if before is not None:
            plan.valid_steps = 1
            num_outputs = num_outputs + (before >= 0).sum(axis=1)
        index, bias = [], []
        for row, _, options in rows:
            index.append(options.bias_ids + row * self.vocab_size)
            bias.append(options.bias)
            steps = options.min_tokens - int(num_outputs[row])
            if steps > 0:
                plan.valid_steps = min(plan.valid_steps, steps)
                index.append(options.stop_ids + row * self.vocab_size)
                bias.append(np.full(len(options.stop_ids), -np.inf, dtype=np.float32))
        if sum(map(len, index)):
            plan.bias_index = self._upload(np.concatenate(index))
            plan.bias = self._upload(np.concatenate(bias))
        allowed = [(row, options.allowed_ids) for row, _, options in rows if options.allowed_ids is not None]
        if allowed:
            plan.allowed_rows = self._upload(np.array([row for row, _ in allowed]))
            plan.allowed_index = self._upload(np.concatenate([ids + row * self.vocab_size for row, ids in allowed]))
        with_words = [(row, slot, options.bad_words) for row, slot, options in rows if options.bad_words]
        if with_words:
            plan.bad_sequences = self._plan_bad_sequences(with_words, before)
        with_penalties = [(row, o.penalty_row, o.penalties) for row, _, o in rows if o.penalty_row is not None]
        if with_penalties:
            batch_rows, state_rows, penalties = zip(*with_penalties, strict=True)
            plan.penalties = self._penalties.plan(list(batch_rows), list(state_rows), list(penalties), before)
        with_speech = [(row, slot, options.speech) for row, slot, options in rows if options.speech is not None]
        if with_speech:
            plan.speech = self._speech.plan(with_speech, self.vocab_size)
        return plan

    def apply(self, plan: LogitsPlan, logits_SV: torch.Tensor) -> None:
        """Change the logits (float32) in place: allowed ids, bad words, min_tokens and bias, then penalties and the rules of
        transcripts.
        """
        flat = logits_SV.view(-1)
        if plan.allowed_rows is not None:
            assert plan.allowed_index is not None
            kept = flat[plan.allowed_index]
            logits_SV.index_fill_(0, plan.allowed_rows, float("-inf"))
            flat.index_copy_(0, plan.allowed_index, kept)
        history_AH = None if plan.bad_sequences is None else self._history_of(plan.bad_sequences)
        for words in plan.bad_sequences.words if plan.bad_sequences is not None else ():
            assert history_AH is not None
            prefixes_JW = words.prefixes_JW
            history_JW = history_AH[words.history_rows_J, -prefixes_JW.shape[1] :]
            matches_J = ((history_JW == prefixes_JW) | (prefixes_JW < 0)).all(dim=1)
            flat.index_add_(0, words.last_ids_J, torch.where(matches_J, float("-inf"), 0.0))
        if plan.bias_index is not None:
            assert plan.bias is not None
            flat.index_add_(0, plan.bias_index, plan.bias)
        if plan.penalties is not None:
            self._penalties.apply(plan.penalties, logits_SV)
        if plan.speech is not None:
            self._speech.apply(plan.speech, logits_SV)

    def observe(self, plan: LogitsPlan, tokens_S: torch.Tensor) -> None:
        """Add the step's tokens (int64 [S], on the device) to penalty counts and histories."""
        if plan.penalties is not None:
            self._penalties.observe(plan.penalties, tokens_S)
        if plan.speech is not None:
            self._speech.observe(plan.speech, tokens_S)
        bad = plan.bad_sequences
        if bad is not None:
            assert self._history_SH is not None
            moved_AH = torch.cat([self._history_SH[bad.slots_A, 1:], tokens_S[bad.rows_A, None]], dim=1)
            self._history_SH.index_copy_(0, bad.slots_A, moved_AH)

    def extend(self, tokens_of: dict[int, list[int]]) -> None:
        """Add tokens that the host knows, by slot, to penalty counts and histories."""
        options_of = {slot: self._options[slot] for slot in tokens_of if slot in self._options}
        with_penalties = {options.penalty_row: tokens_of[slot] for slot, options in options_of.items() if options.penalty_row is not None}
        if with_penalties:
            self._penalties.extend(with_penalties)
        if rules := {slot: options.speech for slot, options in options_of.items() if options.speech is not None}:
            self._speech.extend(rules, tokens_of)
        slots = [slot for slot, options in options_of.items() if options.bad_words]
        if not slots:
            return
        assert self._history_SH is not None
        slots_A = self._upload(np.array(slots, dtype=np.int64))
        tokens_AD, counts_A = _padded([tokens_of[slot] for slot in slots])
        shifted_AH = _shifted(self._history_SH[slots_A], self._upload(tokens_AD), self._upload(counts_A))
        self._history_SH.index_copy_(0, slots_A, shifted_AH)

    def _history_of(self, bad: _BadSequences) -> torch.Tensor:
        """[A, H]: the last tokens before each row that keeps a history."""
        assert self._history_SH is not None
        history_AH = self._history_SH[bad.slots_A]
        if bad.before_AD is None:
            return history_AH
        assert bad.num_before_A is not None
        return _shifted(history_AH, bad.before_AD, bad.num_before_A)

    def _plan_bad_sequences(self, with_words: list[tuple[int, int, dict[int, _BadWords]]], before: np.ndarray | None) -> _BadSequences:
        words = []
        row_of = {row: index for index, (row, _, _) in enumerate(with_words)}
        for width in sorted({width for _, _, by_width in with_words for width in by_width}):
            with_width = [(row, slot, by_width[width]) for row, slot, by_width in with_words if width in by_width]
            counts = [len(found.last_J) for _, _, found in with_width]
            words.append(
                _BadWordsOfBatch(
                    prefixes_JW=self._upload(np.concatenate([found.prefixes_JW for _, _, found in with_width])),
                    history_rows_J=self._upload(np.repeat([row_of[row] for row, _, _ in with_width], counts)),
                    last_ids_J=self._upload(np.concatenate([row * self.vocab_size + found.last_J for row, _, found in with_width])),
                )
            )
        rows_A = np.array([row for row, _, _ in with_words])
        return _BadSequences(
            rows_A=self._upload(rows_A),
            slots_A=self._upload(np.array([slot for _, slot, _ in with_words])),
            words=words,
            before_AD=None if before is None else self._upload(before[rows_A]),
            num_before_A=None if before is None else self._upload((before[rows_A] >= 0).sum(axis=1)),
        )

    def _fit_history(self) -> None:
        """Make the history as long as the longest bad word of the current requests; None if there is none."""
        length = max((width for options in self._options.values() for width in options.bad_words), default=0)
        old_SH = self._history_SH
        if length == 0:
            self._history_SH = None
        elif old_SH is None or old_SH.shape[1] != length:
            new_SH = torch.full((self.num_slots, length), -1, dtype=torch.int64, device=self.device)
            if old_SH is not None:
                kept = min(length, old_SH.shape[1])
                new_SH[:, -kept:] = old_SH[:, -kept:]
            self._history_SH = new_SH

    def _start_history(self, slot: int, output: np.ndarray) -> None:
        assert self._history_SH is not None
        row_H = np.full(self._history_SH.shape[1], -1, dtype=np.int64)
        recent = output[-len(row_H) :]
        row_H[len(row_H) - len(recent) :] = recent
        self._history_SH[slot] = self._upload(row_H)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return self._platform.upload(np.ascontiguousarray(array))


def _by_width(sequences: Sequence[Sequence[int]]) -> dict[int, _BadWords]:
    """Group words of two tokens or more by W, the power of two into which all tokens but the last one fit."""
    words: dict[int, list[Sequence[int]]] = {}
    for word in sequences:
        words.setdefault(1 << (len(word) - 2).bit_length(), []).append(word)
    result = {}
    for width, group in words.items():
        prefixes_JW = np.full((len(group), width), -1, dtype=np.int64)
        for j, word in enumerate(group):
            prefixes_JW[j, width - len(word) + 1 :] = word[:-1]
        result[width] = _BadWords(prefixes_JW=prefixes_JW, last_J=np.array([word[-1] for word in group], dtype=np.int64))
    return result


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens as int64 [A, D], padded with -1 at the end, and their lengths int64 [A]."""
    counts_A = np.array([len(row) for row in rows], dtype=np.int64)
    tokens_AD = np.full((len(rows), counts_A.max(initial=1)), -1, dtype=np.int64)
    for index, row in enumerate(rows):
        tokens_AD[index, : len(row)] = row
    return tokens_AD, counts_A


def _shifted(history_AH: torch.Tensor, new_AD: torch.Tensor, counts_A: torch.Tensor) -> torch.Tensor:
    """The last H tokens of each history and the first counts_A of its new tokens."""
    width = history_AH.shape[1]
    places_AH = torch.arange(width, device=history_AH.device) + counts_A[:, None]
    return torch.cat([history_AH, new_AD], dim=1).gather(1, places_AH)
