"""Repetition, presence and frequency penalties.

Shape legend: S rows of the step, V vocabulary, C rows of the state, A rows of the step with penalties, L tokens listed per
row.

Only the logits of tokens that a request has seen are changed, not its whole row. A row of the state lists these tokens:
those of the prompt once, then every generated token; the rest of the row repeats the first id. An id may be listed
several times. That is harmless, because each occurrence writes the same value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of

_MIN_ROWS = 4
_MIN_COLUMNS = 256


@dataclass(kw_only=True, slots=True)
class PenaltyPlan:
    """The rows with penalties of one batch composition."""

    state_rows: np.ndarray  # int64 [A]
    rows_A: torch.Tensor  # int64, rows of the batch
    state_rows_A: torch.Tensor
    logits_offset_A1: torch.Tensor  # row of the batch times V
    counts_offset_A1: torch.Tensor  # row of the state times V
    repetition_A1: torch.Tensor | None
    presence_A1: torch.Tensor | None
    frequency_A1: torch.Tensor | None
    before_AD: torch.Tensor | None = None  # int64, the draft tokens before each row, padded with -1


class PenaltyState:
    """Token counts of the requests with penalties. Memory grows with their number and length, not with the number of slots."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.device, self._platform = device, platform_of(device)
        self._counts_CV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # occurrences in the output
        self._seen_CL = torch.zeros(0, _MIN_COLUMNS, dtype=torch.int64, device=device)
        self._lengths_C = torch.zeros(0, dtype=torch.int64, device=device)
        self._lengths = np.zeros(0, dtype=np.int64)  # the same on the host
        self._free_rows: list[int] = []

    def add(self, prompt: np.ndarray, output: np.ndarray) -> int:
        """Add a request and return its row of the state. prompt (not empty), output: int64 token ids."""
        assert len(prompt), "a request has a prompt"
        if not self._free_rows:
            self._grow_rows()
        row = self._free_rows[-1]
        tokens, counts = np.unique(output, return_counts=True)
        seen = np.concatenate([np.unique(prompt), tokens])
        self._fit_columns(len(seen))
        self._seen_CL[row].fill_(int(seen[0]))
        self._seen_CL[row, : len(seen)] = self._upload(seen)
        self._lengths[row] = len(seen)
        self._lengths_C[row] = len(seen)
        self._counts_CV[row].zero_()
        if len(tokens):
            self._counts_CV[row].index_copy_(0, self._upload(tokens), self._upload(counts.astype(np.int32)))
        self._free_rows.pop()  # last, so that a row is not lost if the memory runs out above
        return row

    def remove(self, row: int) -> None:
        """Free the row of a request that has ended."""
        self._free_rows.append(row)

    def plan(
        self, rows: list[int], state_rows: list[int], penalties: list[tuple[float, float, float]], before: np.ndarray | None = None
    ) -> PenaltyPlan:
        """Prepare a batch. Its row rows[i] is the request of state_rows[i] with the (repetition, presence, frequency) penalties[i].
        before: int64, the draft tokens before each row of the batch, padded with -1.
        """
        rows_A = self._upload(np.array(rows, dtype=np.int64))
        host_state_rows = np.array(state_rows, dtype=np.int64)
        state_rows_A = self._upload(host_state_rows)
        repetition, presence, frequency = np.array(penalties, dtype=np.float32).T[:, :, None]
        return PenaltyPlan(
            state_rows=host_state_rows,
            rows_A=rows_A,
            state_rows_A=state_rows_A,
            logits_offset_A1=(rows_A * self.vocab_size)[:, None],
            counts_offset_A1=(state_rows_A * self.vocab_size)[:, None],
            repetition_A1=self._upload(repetition) if (repetition != 1.0).any() else None,
            presence_A1=self._upload(presence) if presence.any() else None,
            frequency_A1=self._upload(frequency) if frequency.any() else None,
            before_AD=None if before is None else self._upload(before[rows]),
        )

    def apply(self, plan: PenaltyPlan, logits_SV: torch.Tensor) -> None:
        """Change the logits (float32) in place, following the definitions of OpenAI's API and CTRL (arXiv:1909.05858).

        x = x / repetition if x > 0 else x · repetition, for tokens of prompt and output; then
        x -= frequency · (occurrences in the output) + presence · (1 if it occurs in the output, else 0).
        """
        flat = logits_SV.view(-1)
        length = int(self._lengths[plan.state_rows].max())
        seen_AL = self._seen_CL[plan.state_rows_A, :length]
        if plan.before_AD is not None:  # they count as seen; padding repeats a seen id
            seen_AL = torch.cat([seen_AL, torch.where(plan.before_AD < 0, seen_AL[:, :1], plan.before_AD)], dim=1)
        index_AL = seen_AL + plan.logits_offset_A1
        logits_AL = flat.take(index_AL)
        if plan.repetition_A1 is not None:
            factor_AL = torch.where(logits_AL > 0, 1.0 / plan.repetition_A1, plan.repetition_A1)
            logits_AL = logits_AL * factor_AL
        if plan.frequency_A1 is not None or plan.presence_A1 is not None:
            counts_AL = self._counts_CV.view(-1).take(seen_AL + plan.counts_offset_A1)
            if plan.before_AD is not None:
                for drafted_A1 in plan.before_AD.split(1, dim=1):
                    counts_AL = counts_AL + (seen_AL == drafted_A1)
            if plan.frequency_A1 is not None:
                logits_AL = logits_AL - plan.frequency_A1 * counts_AL
            if plan.presence_A1 is not None:
                logits_AL = logits_AL - plan.presence_A1 * (counts_AL > 0)
        flat.scatter_(0, index_AL.view(-1), logits_AL.view(-1))

    def observe(self, plan: PenaltyPlan, tokens_S: torch.Tensor) -> None:
        """Add the step's tokens (int64 [S], on the device)."""
        self._fit_columns(int(self._lengths[plan.state_rows].max()) + 1)
        tokens_A = tokens_S[plan.rows_A]
        ones_A = torch.ones_like(tokens_A, dtype=torch.int32)
        self._counts_CV.view(-1).index_add_(0, plan.counts_offset_A1.squeeze(1) + tokens_A, ones_A)
        ends_A = self._lengths_C[plan.state_rows_A]
        self._seen_CL.view(-1).index_copy_(0, plan.state_rows_A * self._seen_CL.shape[1] + ends_A, tokens_A)
        self._lengths_C.index_copy_(0, plan.state_rows_A, ends_A + 1)
        self._lengths[plan.state_rows] += 1

    def extend(self, tokens_of: dict[int, list[int]]) -> None:
        """Add tokens that the host knows to rows of the state."""
        rows = np.repeat(list(tokens_of), [len(tokens) for tokens in tokens_of.values()])
        tokens = np.concatenate([np.array(tokens, dtype=np.int64) for tokens in tokens_of.values()])
        places = np.concatenate([self._lengths[row] + np.arange(len(new)) for row, new in tokens_of.items()])
        for row, new in tokens_of.items():
            self._lengths[row] += len(new)
        self._fit_columns(int(self._lengths[rows].max()))
        counted = self._upload(rows * self.vocab_size + tokens)
        self._counts_CV.view(-1).index_add_(0, counted, torch.ones_like(counted, dtype=torch.int32))
        at = self._upload(rows * self._seen_CL.shape[1] + places)
        self._seen_CL.view(-1).index_copy_(0, at, self._upload(tokens))
        changed = np.array(list(tokens_of), dtype=np.int64)
        self._lengths_C.index_copy_(0, self._upload(changed), self._upload(self._lengths[changed]))

    def _grow_rows(self) -> None:
        old = len(self._lengths)
        new = min(max(_MIN_ROWS, 2 * old), self.max_rows)
        assert new > old, "more requests with penalties than slots"
        self._counts_CV = _grown(self._counts_CV, (new, self.vocab_size))
        self._seen_CL = _grown(self._seen_CL, (new, self._seen_CL.shape[1]))
        self._lengths_C = _grown(self._lengths_C, (new,))
        self._lengths = np.concatenate([self._lengths, np.zeros(new - old, dtype=np.int64)])
        self._free_rows.extend(range(old, new))

    def _fit_columns(self, length: int) -> None:
        rows, old = self._seen_CL.shape
        if length <= old:
            return
        wider_CL = self._seen_CL[:, :1].expand(rows, max(length, 2 * old)).contiguous()
        wider_CL[:, :old] = self._seen_CL
        self._seen_CL = wider_CL

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return self._platform.upload(np.ascontiguousarray(array))


def _grown(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    result = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    result[: len(tensor)] = tensor
    return result
