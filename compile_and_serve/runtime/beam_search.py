"""Beam search: at each step the `width` likeliest continuations of a prompt go on. `LLM` and the server drive it.

The engine extends every beam by one token and gives the 2 · width likeliest tokens of each; the prefix cache has the beams' tokens.
A finished beam's score is its log-probability / (number of generated tokens ** length_penalty), as in transformers; the end token counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParams, SamplingParamsError

MAX_WIDTH = 128
MAX_PENALTY = 10  # a length to a larger power may overflow


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """beam_width: beams, and results. ignore_eos: end tokens do not end a beam. length_penalty: above 0 favors long results.

    include_stop_str_in_output: keep the end token's text. temperature: accepted without effect, as beam search draws nothing.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


@dataclass(frozen=True, slots=True)
class Beam:
    """token_ids: generated ones. ended: the last one is an end token."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        return self.logprob / max(1, len(self.token_ids)) ** length_penalty


class BeamSearch:
    """The beams of one prompt: extend `alive` by a token each, then call `advance`, until `alive` is empty."""

    def __init__(self, *, width: int, max_tokens: int, end_ids: Collection[int], length_penalty: float = 1.0) -> None:
        """Raises `SamplingParamsError` for a width or penalty out of range."""
        if not 1 <= width <= MAX_WIDTH:
            raise SamplingParamsError("n", f"n, the number of beams, must be in [1, {MAX_WIDTH}], got {width}.")
        if not -MAX_PENALTY <= length_penalty <= MAX_PENALTY:
            limits = f"in [-{MAX_PENALTY}, {MAX_PENALTY}]"
            raise SamplingParamsError("length_penalty", f"length_penalty must be {limits}, got {length_penalty}.")
        self._width, self._max_tokens, self._end_ids = width, max_tokens, frozenset(end_ids)
        self._length_penalty = length_penalty
        self.alive = [Beam()] if max_tokens > 0 else []
        self._finished: list[Beam] = [] if max_tokens > 0 else [Beam()]

    @property
    def step_params(self) -> SamplingParams:
        """Sampling parameters of the engine's requests, each for one token."""
        return SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * self._width, detokenize=False, ignore_eos=True)

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Take the next tokens of the beams in `alive`: an entry of each, with its likeliest tokens."""
        alive, end_ids = self.alive, self._end_ids
        # Of width² · 2 candidates, only those that end or go on become beams. Each entry has its likeliest first, so they are merged.
        ended: list[Beam] = []
        heap: list[tuple[float, int, int]] = []  # negative log-probability, number of the beam, place in its entry
        for number, (beam, entry) in enumerate(zip(alive, entries, strict=True)):
            ids = entry.ids
            # The first is the chosen token, which comes again among the likeliest.
            if not end_ids.isdisjoint(ids):
                places = (place for place in range(1, len(ids)) if ids[place] in end_ids)
                ended += [Beam((*beam.token_ids, ids[place]), beam.logprob + entry.logprobs[place], ended=True) for place in places]
            _push_next(heap, beam, entry, number, 1, end_ids)
        going_on: list[Beam] = []
        while heap and len(going_on) < self._width:
            negative, number, place = heapq.heappop(heap)
            going_on.append(Beam((*alive[number].token_ids, entries[number].ids[place]), -negative))
            _push_next(heap, alive[number], entries[number], number, place + 1, end_ids)
        self._finished += ended
        self.alive = going_on
        if self.alive and len(self.alive[0].token_ids) >= self._max_tokens:
            self._finished += self.alive
            self.alive = []
        self._finished = self._best()
        if len(self._finished) == self._width and self.alive and self._cannot_improve():
            self.alive = []

    def results(self) -> list[Beam]:
        """The best `width` beams, best first; fewer if there are fewer continuations."""
        return self._best()

    def _best(self) -> list[Beam]:
        return heapq.nlargest(self._width, self._finished, key=lambda beam: beam.score(self._length_penalty))

    def _cannot_improve(self) -> bool:
        """Whether no beam can still score more than the finished ones: its log-probability only falls from now on."""
        best = self.alive[0]
        length = self._max_tokens if self._length_penalty > 0 else len(best.token_ids) + 1
        attainable = best.logprob / length**self._length_penalty
        return attainable <= self._finished[-1].score(self._length_penalty)


def _push_next(
    heap: list[tuple[float, int, int]], beam: Beam, entry: TokenLogprobs, number: int, place: int, end_ids: Collection[int]
) -> None:
    """Push the first token from `place` on with which the beam may go on."""
    ids = entry.ids
    while place < len(ids) and ids[place] in end_ids:
        place += 1
    if place < len(ids) and (logprob := beam.logprob + entry.logprobs[place]) > -math.inf:
        heapq.heappush(heap, (-logprob, number, place))
