"""Suffix decoding (Oliaro et al., arXiv:2411.04975): drafts follow the longest suffix that occurred before, weighed by how often.

A node of a suffix tree stands for all occurrences of one string, and its children for the tokens that follow them. The tree is not
built: an index of token pairs leads to the latest occurrences, and a draft goes down the tree over those that still agree.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from compile_and_serve.runtime.speculative_config import SpeculativeConfig

MAX_OCCURRENCES = 32  # of the last two tokens, that are compared
MAX_CORPUS_TOKENS = 1 << 20  # of past outputs
_END = -1  # between two outputs


class _Text:
    """Tokens, and for each position the previous one with the same two tokens before it."""

    __slots__ = ("before", "latest", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.latest: dict[tuple[int, int], int] = {}  # pair → the latest position behind it
        self.before: list[int] = []  # position → the position behind the pair's occurrence before; 0: none

    def extend(self, new_ids: Sequence[int]) -> None:
        token_ids, latest, before = self.token_ids, self.latest, self.before
        start = len(token_ids)
        token_ids += new_ids
        for position in range(start, len(token_ids)):
            if position < 2:
                before.append(0)
                continue
            pair = (token_ids[position - 2], token_ids[position - 1])
            before.append(latest.get(pair, 0))
            latest[pair] = position


class SuffixDrafter:
    """A `HostDrafter` over each sequence itself and, where that has no longer match, the outputs of ended requests."""

    def __init__(self, *, max_depth: int, max_cached_requests: int, max_factor: float, min_probability: float) -> None:
        self._max_depth = max_depth
        self._max_cached = max_cached_requests
        self._max_factor = max_factor
        self._min_probability = min_probability
        self._texts: dict[str, _Text] = {}
        self._outputs: deque[list[int]] = deque()
        self._corpus = _Text()

    @classmethod
    def of_config(cls, config: SpeculativeConfig) -> SuffixDrafter:
        """With the config's options."""
        return cls(
            max_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_factor=config.suffix_decoding_max_spec_factor,
            min_probability=config.suffix_decoding_min_token_prob,
        )

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text()
        text.extend(token_ids[len(text.token_ids) :])
        depth, places = self._longest_match(text, token_ids)
        if depth < self._max_depth and self._corpus.token_ids:
            other_depth, other_places = self._longest_match(self._corpus, token_ids)
            if other_depth > depth:
                text, depth, places = self._corpus, other_depth, other_places
        return self._follow(text.token_ids, places, min(max_tokens, int(depth * self._max_factor)))

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        self._texts.pop(request_id, None)
        if self._max_cached == 0 or len(output_ids) < 2:
            return
        entry = [*output_ids, _END]
        self._outputs.append(entry)
        if len(self._outputs) <= self._max_cached and len(self._corpus.token_ids) < MAX_CORPUS_TOKENS:
            self._corpus.extend(entry)
            return
        for _ in range(len(self._outputs) // 2):  # half at once, so that the index is rarely built anew
            self._outputs.popleft()
        self._corpus = _Text()
        for kept in self._outputs:
            self._corpus.extend(kept)

    def _longest_match(self, text: _Text, token_ids: Sequence[int]) -> tuple[int, list[int]]:
        """How many of the last tokens occur in the text and are followed by one, and the positions behind these occurrences."""
        depth, places = 0, list[int]()
        if len(token_ids) < 2:
            return depth, places
        suffix = token_ids[-self._max_depth :]
        position = text.latest.get((suffix[-2], suffix[-1]), 0)
        for _ in range(MAX_OCCURRENCES):
            if position == 0:
                break
            length = 2
            while length < len(suffix) and length < position:
                if text.token_ids[position - 1 - length] != suffix[-1 - length]:
                    break
                length += 1
            if length > depth:
                depth, places = length, []
            if length == depth:
                places.append(position)
            position = text.before[position]
        return depth, places

    def _follow(self, token_ids: list[int], places: list[int], max_tokens: int) -> list[int]:
        """The likeliest token behind the places, then behind those of them that have it, and so on."""
        draft: list[int] = []
        probability = 1.0
        while places and len(draft) < max_tokens:
            following = Counter(token_ids[place] for place in places)
            token, count = max(following.items(), key=lambda entry: entry[1])  # ties: the latest
            probability *= count / len(places)
            if token == _END or probability < self._min_probability:
                break
            draft.append(token)
            ends = len(token_ids)
            agreeing = [place + 1 for place in places if token_ids[place] == token]
            places = [place for place in agreeing if place < ends]
            if not places and agreeing:  # the text's end: it goes on as it did
                period = len(draft)
                while len(draft) < max_tokens:
                    draft.append(draft[len(draft) - period])
        return draft
