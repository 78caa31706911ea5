"""What a request may ask to be done to its logits before a token is chosen: allowed ids, bad words, min_tokens, bias,
penalties.

Shape legend: S rows of the step (one a request that samples), V vocabulary, C rows of the penalty state, H tokens of
history, J bad words of more than one token, A rows of a list.

State lives on the device by the runner's slot and grows by one token a step without the host seeing it, so that the
next step may be launched before this one's tokens are known. A request pays only for what it asks for: `plan` returns
None for a batch of plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from runtime.sampling_params import SamplingParams

FOREVER = 1 << 62
_MIN_PENALTY_ROWS = 4


@dataclass(kw_only=True, slots=True)
class _SlotOptions:
    """One request's options, in the form that `plan` puts together."""

    bias_ids: np.ndarray  # int64, also the bad words of one token (bias -inf)
    bias: np.ndarray  # float32
    min_tokens: int
    stop_ids: np.ndarray  # int64, masked before min_tokens
    allowed_ids: np.ndarray | None  # int64
    bad_sequences: list[list[int]]  # of two tokens or more
    penalty_row: int | None
    penalties: tuple[float, float, float]  # repetition, presence, frequency


@dataclass(kw_only=True, slots=True)
class _Penalties:
    rows_A: torch.Tensor | None  # rows of the batch; None: all of them, in order
    state_rows_A: torch.Tensor  # rows of the counts
    counts_offset_A: torch.Tensor  # state row · V
    repetition_A1: torch.Tensor | None
    presence_A1: torch.Tensor | None
    frequency_A1: torch.Tensor | None


@dataclass(kw_only=True, slots=True)
class _BadSequences:
    rows_A: torch.Tensor  # rows of the batch that keep a history
    slots_A: torch.Tensor
    prefixes_JH: torch.Tensor  # right-aligned, -1 where the word has no token
    history_slots_J: torch.Tensor
    last_ids_J: torch.Tensor  # flat index (row · V + last token) into the logits


@dataclass(kw_only=True, slots=True)
class LogitsPlan:
    """What to do to the logits of one batch composition. valid_steps: steps until a min_tokens runs out."""

    bias_index: torch.Tensor | None = None  # int64, row · V + token
    bias: torch.Tensor | None = None
    allowed_rows: torch.Tensor | None = None
    allowed_index: torch.Tensor | None = None
    bad_sequences: _BadSequences | None = None
    penalties: _Penalties | None = None
    valid_steps: int = FOREVER


@dataclass(slots=True)
class LogitsProcessors:
    """Per-slot options and state; `add` and `remove` by slot, `plan` once a batch composition, `apply` and `observe`
    every step.
    """

    vocab_size: int
    num_slots: int
    device: torch.device
    _options: dict[int, _SlotOptions] = field(default_factory=dict)
    _free_penalty_rows: list[int] = field(default_factory=list)
    _counts_CV: torch.Tensor | None = None  # int32, occurrences in the output
    _in_prompt_CV: torch.Tensor | None = None  # bool
    _history_SH: torch.Tensor | None = (
        None  # int64, last tokens of the output, newest at the end; -1 where there is none
    )

    def add(
        self, slot: int, params: SamplingParams, stop_ids: Sequence[int], prompt: np.ndarray, output: np.ndarray
    ) -> None:
        """Take in a request. prompt, output: int64 token ids; output is what was generated before a preemption."""
        self.remove(slot)
        bias = {int(token): value for token, value in (params.logit_bias or {}).items()}
        bias.update({word[0]: float("-inf") for word in params.bad_words_token_ids if len(word) == 1})
        sequences = [word for word in params.bad_words_token_ids if len(word) > 1]
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        has_penalties = penalties != (1.0, 0.0, 0.0)
        allowed = params.allowed_token_ids
        if not (bias or sequences or has_penalties or allowed or params.min_tokens > len(output)):
            return
        self._options[slot] = _SlotOptions(
            bias_ids=np.array(list(bias), dtype=np.int64),
            bias=np.array(list(bias.values()), dtype=np.float32),
            min_tokens=params.min_tokens,
            stop_ids=np.array(list(stop_ids), dtype=np.int64),
            allowed_ids=None if allowed is None else np.array(sorted(set(allowed)), dtype=np.int64),
            bad_sequences=sequences,
            penalty_row=self._take_penalty_row(prompt, output) if has_penalties else None,
            penalties=penalties,
        )
        if sequences:
            self._start_history(slot, max(map(len, sequences)) - 1, output)

    def remove(self, slot: int) -> None:
        """Forget the slot's request, if it had options."""
        options = self._options.pop(slot, None)
        if options is not None and options.penalty_row is not None:
            self._free_penalty_rows.append(options.penalty_row)

    def plan(self, slots: list[int], num_outputs: np.ndarray) -> LogitsPlan | None:
        """What the batch needs, row i being slots[i] with num_outputs[i] tokens put out so far; None: nothing at all."""
        if not self._options:
            return None
        rows = [(row, slot, self._options[slot]) for row, slot in enumerate(slots) if slot in self._options]
        if not rows:
            return None
        plan = LogitsPlan()
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
        with_sequences = [(row, slot, options.bad_sequences) for row, slot, options in rows if options.bad_sequences]
        if with_sequences:
            plan.bad_sequences = self._plan_bad_sequences(with_sequences)
        with_penalties = [(row, options) for row, _, options in rows if options.penalty_row is not None]
        if with_penalties:
            plan.penalties = self._plan_penalties(with_penalties, len(slots))
        return plan

    def apply(self, plan: LogitsPlan, logits_SV: torch.Tensor) -> None:
        """Change float32 logits in place: allowed ids, bad words, min_tokens and bias, then penalties."""
        flat = logits_SV.view(-1)
        if plan.allowed_rows is not None:
            assert plan.allowed_index is not None
            kept = flat[plan.allowed_index]
            logits_SV.index_fill_(0, plan.allowed_rows, float("-inf"))
            flat.index_copy_(0, plan.allowed_index, kept)
        words = plan.bad_sequences
        if words is not None:
            assert self._history_SH is not None
            prefixes_JH = words.prefixes_JH
            history_JH = self._history_SH[words.history_slots_J, -prefixes_JH.shape[1] :]
            matches_J = ((history_JH == prefixes_JH) | (prefixes_JH < 0)).all(dim=1)
            flat.index_add_(0, words.last_ids_J, torch.where(matches_J, float("-inf"), 0.0))
        if plan.bias_index is not None:
            assert plan.bias is not None
            flat.index_add_(0, plan.bias_index, plan.bias)
        if plan.penalties is not None:
            self._apply_penalties(plan.penalties, logits_SV)

    def observe(self, plan: LogitsPlan, tokens_S: torch.Tensor) -> None:
        """Take the step's tokens (int64 [S], on the device) into penalty counts and histories."""
        penalties = plan.penalties
        if penalties is not None:
            assert self._counts_CV is not None
            tokens_A = tokens_S if penalties.rows_A is None else tokens_S[penalties.rows_A]
            ones_A = torch.ones_like(tokens_A, dtype=torch.int32)
            self._counts_CV.view(-1).index_add_(0, penalties.counts_offset_A + tokens_A, ones_A)
        words = plan.bad_sequences
        if words is not None:
            assert self._history_SH is not None
            moved_AH = torch.cat([self._history_SH[words.slots_A, 1:], tokens_S[words.rows_A, None]], dim=1)
            self._history_SH.index_copy_(0, words.slots_A, moved_AH)

    def _apply_penalties(self, penalties: _Penalties, logits_SV: torch.Tensor) -> None:
        assert self._counts_CV is not None
        assert self._in_prompt_CV is not None
        logits_AV = logits_SV if penalties.rows_A is None else logits_SV[penalties.rows_A]
        counts_AV = self._counts_CV[penalties.state_rows_A]
        if penalties.repetition_A1 is not None:
            seen_AV = (counts_AV > 0).logical_or_(self._in_prompt_CV[penalties.state_rows_A])
            factor_AV = torch.where(logits_AV > 0, 1.0 / penalties.repetition_A1, penalties.repetition_A1)
            logits_AV = torch.where(seen_AV, logits_AV * factor_AV, logits_AV)
        if penalties.frequency_A1 is not None:
            logits_AV = logits_AV - penalties.frequency_A1 * counts_AV
        if penalties.presence_A1 is not None:
            logits_AV = logits_AV - penalties.presence_A1 * (counts_AV > 0)
        if penalties.rows_A is None:
            logits_SV.copy_(logits_AV)
        else:
            logits_SV.index_copy_(0, penalties.rows_A, logits_AV)

    def _plan_penalties(self, with_penalties: list[tuple[int, _SlotOptions]], num_rows: int) -> _Penalties:
        state_rows_A = self._upload(np.array([options.penalty_row for _, options in with_penalties], dtype=np.int64))
        repetition, presence, frequency = np.array(
            [options.penalties for _, options in with_penalties], dtype=np.float32
        ).T[:, :, None]
        is_all = len(with_penalties) == num_rows
        return _Penalties(
            rows_A=None if is_all else self._upload(np.array([row for row, _ in with_penalties], dtype=np.int64)),
            state_rows_A=state_rows_A,
            counts_offset_A=state_rows_A * self.vocab_size,
            repetition_A1=self._upload(repetition) if (repetition != 1.0).any() else None,
            presence_A1=self._upload(presence) if presence.any() else None,
            frequency_A1=self._upload(frequency) if frequency.any() else None,
        )

    def _plan_bad_sequences(self, with_sequences: list[tuple[int, int, list[list[int]]]]) -> _BadSequences:
        words = [(row, slot, word) for row, slot, sequences in with_sequences for word in sequences]
        length = max(len(word) for _, _, word in words) - 1
        prefixes_JH = np.full((len(words), length), -1, dtype=np.int64)
        for j, (_, _, word) in enumerate(words):
            prefixes_JH[j, length - (len(word) - 1) :] = word[:-1]
        return _BadSequences(
            rows_A=self._upload(np.array([row for row, _, _ in with_sequences])),
            slots_A=self._upload(np.array([slot for _, slot, _ in with_sequences])),
            prefixes_JH=self._upload(prefixes_JH),
            history_slots_J=self._upload(np.array([slot for _, slot, _ in words])),
            last_ids_J=self._upload(np.array([row * self.vocab_size + word[-1] for row, _, word in words])),
        )

    def _take_penalty_row(self, prompt: np.ndarray, output: np.ndarray) -> int:
        if not self._free_penalty_rows:
            self._grow_penalty_rows()
        assert self._counts_CV is not None
        assert self._in_prompt_CV is not None
        row = self._free_penalty_rows.pop()
        self._in_prompt_CV[row].zero_().index_fill_(0, self._upload(prompt), True)
        self._counts_CV[row].zero_()
        if len(output):
            tokens, counts = np.unique(output, return_counts=True)
            self._counts_CV[row].index_copy_(0, self._upload(tokens), self._upload(counts.astype(np.int32)))
        return row

    def _grow_penalty_rows(self) -> None:
        """Double the state: memory follows the number of requests with penalties, not the number of slots."""
        old = 0 if self._counts_CV is None else self._counts_CV.shape[0]
        new = min(max(_MIN_PENALTY_ROWS, 2 * old), self.num_slots)
        assert new > old, "more penalty rows than slots"
        counts_CV = torch.zeros(new, self.vocab_size, dtype=torch.int32, device=self.device)
        in_prompt_CV = torch.zeros(new, self.vocab_size, dtype=torch.bool, device=self.device)
        if self._counts_CV is not None and self._in_prompt_CV is not None:
            counts_CV[:old] = self._counts_CV
            in_prompt_CV[:old] = self._in_prompt_CV
        self._counts_CV, self._in_prompt_CV = counts_CV, in_prompt_CV
        self._free_penalty_rows.extend(range(old, new))

    def _start_history(self, slot: int, length: int, output: np.ndarray) -> None:
        if self._history_SH is None or self._history_SH.shape[1] < length:
            wider_SH = torch.full((self.num_slots, length), -1, dtype=torch.int64, device=self.device)
            if self._history_SH is not None:
                wider_SH[:, -self._history_SH.shape[1] :] = self._history_SH
            self._history_SH = wider_SH
        row_H = np.full(self._history_SH.shape[1], -1, dtype=np.int64)
        recent = output[-len(row_H) :]
        row_H[len(row_H) - len(recent) :] = recent
        self._history_SH[slot] = self._upload(row_H)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)
