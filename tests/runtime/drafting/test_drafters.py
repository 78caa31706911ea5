"""n-gram and suffix drafters, compared with a search that a reader can check."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from compile_and_serve.runtime.drafting import suffix
from compile_and_serve.runtime.drafting.ngram import NgramDrafter
from compile_and_serve.runtime.drafting.suffix import SuffixDrafter


def suffix_drafter(**options: float) -> SuffixDrafter:
    given = {"max_depth": 8, "max_cached_requests": 4, "max_factor": 2.0, "min_probability": 0.1} | options
    return SuffixDrafter(**given)  # type: ignore[arg-type]


def expected_ngram(tokens: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for begin in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[begin - length : begin]) == list(tokens[-length:]) and len(tokens) > length:
                draft = list(tokens[begin : begin + count])
                while len(draft) < count:
                    draft.append(draft[len(draft) - (len(tokens) - begin)])
                return draft
    return []


def test_ngram_finds_the_latest_longest_match_as_the_text_grows() -> None:
    rng = random.Random(0)
    for trial in range(60):
        drafter = NgramDrafter(2, 4)
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 40))]
        for _ in range(12):
            assert drafter.propose("r", tokens, 6) == expected_ngram(tokens, 2, 4, 6), trial
            tokens += [rng.randrange(4) for _ in range(rng.randint(1, 3))]


def test_ngram_keeps_requests_apart_and_forgets_them() -> None:
    drafter = NgramDrafter(2, 3)
    assert drafter.propose("a", [1, 2, 3, 1, 2], 3) == [3, 1, 2]
    assert drafter.propose("b", [9, 1, 2], 3) == []
    drafter.forget("a", [])
    assert drafter.propose("a", [1, 2], 3) == []


def longest_match(tokens: Sequence[int], text: Sequence[int], depth: int) -> int:
    return max(
        (
            n
            for n in range(2, depth + 1)
            for end in range(n, len(text))
            if len(tokens) >= n and list(text[end - n : end]) == list(tokens[-n:])
        ),
        default=0,
    )


def test_suffix_drafts_follow_the_longest_match() -> None:
    rng = random.Random(1)
    drafter = suffix_drafter(min_probability=0.0)
    tokens = [rng.randrange(5) for _ in range(20)]
    drafted = 0
    for _ in range(80):
        draft = drafter.propose("r", tokens, 16)
        depth = longest_match(tokens, tokens, 8)
        assert len(draft) == min(16, 2 * depth)
        if draft:  # what is drafted has followed such a suffix before
            drafted += 1
            joined = [*tokens[-depth:], draft[0]]
            assert any(tokens[i : i + depth + 1] == joined for i in range(len(tokens)))
        tokens.append(rng.randrange(5))
    assert drafted > 40


def test_suffix_prefers_what_followed_more_often_and_stops_when_unsure() -> None:
    text = [7, 8, 1, 0, 7, 8, 2, 0, 7, 8, 1, 0, 7, 8, 1, 5, 7, 8]
    assert suffix_drafter().propose("r", text, 1) == [1]
    # 3 of 4 go on with 1, and 2 of these 3 with 0: half of all.
    assert suffix_drafter(min_probability=0.5).propose("r", text, 4)[:2] == [1, 0]
    assert suffix_drafter(min_probability=0.6).propose("r", text, 4) == [1]
    assert suffix_drafter(min_probability=0.8).propose("r", text, 4) == []


def test_suffix_learns_from_ended_requests_and_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = suffix_drafter()
    drafter.propose("a", [1, 2, 3], 4)
    drafter.forget("a", [50, 51, 52, 53, 54])
    assert drafter.propose("b", [9, 50, 51], 4) == [52, 53, 54]  # and not beyond that output
    for i in range(4):
        drafter.forget(f"x{i}", [60 + i, 70 + i, 80 + i])
    assert drafter.propose("c", [9, 50, 51], 4) == []
    assert drafter.propose("d", [9, 63, 73], 4) == [83]
    monkeypatch.setattr(suffix, "MAX_CORPUS_TOKENS", 8)
    for i in range(10):
        drafter.forget(f"y{i}", [100 + i, 110 + i, 120 + i])
    assert len(drafter._corpus.token_ids) <= 12
    none = suffix_drafter(max_cached_requests=0)
    none.forget("a", [50, 51, 52])
    assert none.propose("b", [9, 50, 51], 4) == []


@pytest.mark.parametrize("drafter", [NgramDrafter(3, 5), suffix_drafter()], ids=["ngram", "suffix"])
def test_repeating_text_is_drafted_beyond_its_end(drafter: NgramDrafter | SuffixDrafter) -> None:
    text = [3, 4, 5] * 6
    assert drafter.propose("r", text, 8) == [3, 4, 5, 3, 4, 5, 3, 4]


class Counted(Sequence[int]):
    """Counts the tokens that are read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.num_read = tokens, 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, key: Any) -> Any:
        found = self.tokens[key]
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("vocab_size", [2, 1000])
def test_ngram_reads_few_tokens_of_a_long_text(vocab_size: int) -> None:
    rng = random.Random(2)
    drafter = NgramDrafter(3, 5)
    text = Counted([rng.randrange(vocab_size) for _ in range(10_000)])
    drafter.propose("r", text, 5)
    for _ in range(20):
        text.tokens.append(rng.randrange(vocab_size))
        text.num_read = 0
        drafter.propose("r", text, 5)
        assert 0 < text.num_read < 300  # at most 64 occurrences are compared
