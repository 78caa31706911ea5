"""`SpeechRules` on the device: what has been sampled of each transcript, and the logits that may not follow.

Shape legend: S rows of the step, A rows of one set of rules, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.speech_rules import SpeechRules

_NONE = -1
_INFINITE = float("-inf")


@dataclass(kw_only=True, slots=True)
class SpeechRows:
    """Rows of a step with the same rules. rows_A, slots_A: int64. suppressed, suppressed_first: int64 ids."""

    rules: SpeechRules
    rows_A: torch.Tensor
    slots_A: torch.Tensor
    suppressed: torch.Tensor
    suppressed_first: torch.Tensor


class SpeechState:
    """The last token, the one before it and the latest timestamp of each slot's transcript; `_NONE` where there is none."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._platform, self._device = platform_of(device), device
        self._num_slots = num_slots
        self._state_R3: torch.Tensor | None = None

    def add(self, slot: int, rules: SpeechRules, output: np.ndarray) -> None:
        """A transcript begins, or goes on after the tokens `output`."""
        if self._state_R3 is None:
            self._state_R3 = torch.full((self._num_slots, 3), _NONE, dtype=torch.int64, device=self._device)
        self._state_R3[slot] = self._platform.upload(np.array(_state_of(output, rules), dtype=np.int64))

    def plan(self, rows: Sequence[tuple[int, int, SpeechRules]], vocab_size: int) -> list[SpeechRows]:
        """rows: (row of the step, slot, rules)."""
        groups: dict[bytes, list[tuple[int, int, SpeechRules]]] = {}
        for one in rows:
            groups.setdefault(repr(one[2]).encode(), []).append(one)
        upload = self._platform.upload
        return [
            SpeechRows(
                rules=group[0][2],
                rows_A=upload(np.array([row for row, _, _ in group], dtype=np.int64)),
                slots_A=upload(np.array([slot for _, slot, _ in group], dtype=np.int64)),
                suppressed=upload(_ids(group[0][2].suppressed, vocab_size)),
                suppressed_first=upload(_ids(group[0][2].suppressed_first, vocab_size)),
            )
            for group in groups.values()
        ]

    def apply(self, plan: Sequence[SpeechRows], logits_SV: torch.Tensor) -> None:
        """Set the logits of tokens that may not follow to -inf, in place."""
        assert self._state_R3 is not None
        for group in plan:
            rules = group.rules
            last_A1, before_A1, latest_A1 = self._state_R3[group.slots_A].split(1, dim=1)
            logits_AV = logits_SV[group.rows_A]
            is_first_A1 = last_A1 == _NONE
            logits_AV.index_fill_(1, group.suppressed, _INFINITE)
            not_first = logits_AV[:, group.suppressed_first].masked_fill(is_first_A1, _INFINITE)
            logits_AV.index_copy_(1, group.suppressed_first, not_first)
            if rules.has_times:
                _apply_times(logits_AV, rules, last_A1, before_A1, latest_A1)
            logits_SV.index_copy_(0, group.rows_A, logits_AV)

    def observe(self, plan: Sequence[SpeechRows], tokens_S: torch.Tensor) -> None:
        """Follow the step's tokens, int64 [S] on the device."""
        assert self._state_R3 is not None
        for group in plan:
            last_A, _, latest_A = self._state_R3[group.slots_A].unbind(1)
            new_A = tokens_S[group.rows_A]
            latest_A = torch.where(new_A >= group.rules.first_time, new_A, latest_A)
            self._state_R3.index_copy_(0, group.slots_A, torch.stack((new_A, last_A, latest_A), dim=1))

    def extend(self, rules_of: Mapping[int, SpeechRules], tokens_of: Mapping[int, Sequence[int]]) -> None:
        """Follow tokens that the host knows, by slot."""
        assert self._state_R3 is not None
        for slot, rules in rules_of.items():
            before = self._state_R3[slot].tolist()
            known = [token for token in (before[2], before[1], before[0]) if token != _NONE]
            state = _state_of(np.array([*known, *tokens_of[slot]], dtype=np.int64), rules)
            self._state_R3[slot] = self._platform.upload(np.array(state, dtype=np.int64))


def _apply_times(
    logits_AV: torch.Tensor, rules: SpeechRules, last_A1: torch.Tensor, before_A1: torch.Tensor, latest_A1: torch.Tensor
) -> None:
    zero = rules.first_time
    is_time_A1 = last_A1 >= zero
    is_pair_A1 = is_time_A1 & ((before_A1 >= zero) | (before_A1 == _NONE))
    is_single_A1 = is_time_A1 & ~is_pair_A1
    is_first_A1 = last_A1 == _NONE
    logits_AV[:, rules.no_timestamps] = _INFINITE
    times, others = logits_AV[:, zero:], logits_AV[:, :zero]
    ids = torch.arange(zero, logits_AV.shape[1], device=logits_AV.device)
    earliest_A1 = torch.where(is_single_A1, latest_A1, latest_A1 + 1)
    forbidden = is_pair_A1 | (ids < earliest_A1)
    if rules.max_initial is not None:
        forbidden = forbidden | (is_first_A1 & (ids > zero + rules.max_initial))
    times.masked_fill_(forbidden, _INFINITE)
    logits_AV[:, : rules.end].masked_fill_(is_single_A1, _INFINITE)
    others.masked_fill_(is_first_A1, _INFINITE)
    all_times_A1, best_A1 = times.logsumexp(dim=1, keepdim=True), others.amax(dim=1, keepdim=True)
    others.masked_fill_(all_times_A1 > best_A1, _INFINITE)


def _state_of(output: np.ndarray, rules: SpeechRules) -> tuple[int, int, int]:
    """Of a transcript with the tokens `output`."""
    last, before = (int(output[-n]) if len(output) >= n else _NONE for n in (1, 2))
    times = output[output >= rules.first_time]
    return last, before, int(times[-1]) if len(times) else _NONE


def _ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    return np.array(sorted({one for one in ids if 0 <= one < vocab_size}), dtype=np.int64)
