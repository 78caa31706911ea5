"""Prompt look-up (Saxena 2023): a draft is what followed the latest earlier occurrence of the sequence's last n tokens."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.runtime.drafting.host_drafter import copy_from
from compile_and_serve.runtime.speculative_config import SpeculativeConfig

MAX_OCCURRENCES = 64  # of the shortest suffix, that are compared


class _Index:
    """Where each n-gram of the shortest length occurs with a token after it.

    latest: n-gram → the position behind its latest occurrence. before: for each position from n on, the position behind the occurrence
    before; 0: none.
    """

    __slots__ = ("before", "latest")

    def __init__(self) -> None:
        self.latest: dict[tuple[int, ...], int] = {}
        self.before: list[int] = []


class NgramDrafter:
    """A `HostDrafter`. The longest match of `shortest` to `longest` tokens wins, and the latest of equal ones."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._indexes: dict[str, _Index] = {}

    @classmethod
    def of_config(cls, config: SpeculativeConfig) -> NgramDrafter:
        """With the config's options."""
        return cls(*config.ngram_lengths)

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = _Index()
        latest, before, shortest = index.latest, index.before, self._shortest
        for position in range(shortest + len(before), len(token_ids)):
            gram = tuple(token_ids[position - shortest : position])
            before.append(latest.get(gram, 0))
            latest[gram] = position
        position = latest.get(tuple(token_ids[-shortest:]), 0)
        if not position:
            return []
        best, best_length = position, 0
        for _ in range(MAX_OCCURRENCES):
            length = shortest
            while length < self._longest and length < position:
                if token_ids[position - 1 - length] != token_ids[-1 - length]:
                    break
                length += 1
            if length > best_length:
                best, best_length = position, length
            position = before[position - shortest]
            if not position or best_length == self._longest:
                break
        return copy_from(token_ids, best, max_tokens)

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        self._indexes.pop(request_id, None)
