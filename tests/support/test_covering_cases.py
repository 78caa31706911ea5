"""Which cases of many parameters are chosen."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering_cases import covering_cases, first_cases


@pytest.mark.parametrize("sizes", [(8, 5, 3, 2, 2), (4, 4), (7,), (1, 3, 2)])
def test_every_pair_of_values_is_covered_by_few_cases(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcde", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = [cases[i] for i in covering_cases(cases, 2)]
    for first, second in combinations(sorted(cases[0]), 2):
        assert {(c[first], c[second]) for c in chosen} == {(c[first], c[second]) for c in cases}
    assert {c["a"] for c in chosen} == set(range(sizes[0]))
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.5 * largest[0] * largest[-1] if len(sizes) > 1 else len(chosen) == sizes[0]


def test_a_pair_that_no_case_has_is_not_needed() -> None:
    assert covering_cases([{"a": 0, "b": 0}, {"a": 1, "b": 1}], 2) == {0, 1}


def test_every_three_values_are_covered_by_few_cases() -> None:
    cases = [dict(zip("abcd", values, strict=True)) for values in product(range(6), range(5), range(5), range(3))]
    chosen = [cases[i] for i in covering_cases(cases, 3)]
    for names in combinations("abcd", 3):
        assert len({tuple(c[name] for name in names) for c in chosen}) == len({tuple(c[name] for name in names) for c in cases})
    assert len(chosen) < 200


def test_two_parameters_have_no_three_values() -> None:
    assert len(covering_cases([{"a": a, "b": b} for a in range(3) for b in range(2)], 3)) == 6


def test_first_cases_have_every_value_and_each_has_a_new_one() -> None:
    cases = [{"a": a, "b": b} for a in range(3) for b in range(4)]
    assert first_cases(cases) == {0, 1, 2, 3, 4, 8}
    assert first_cases([{"a": 1}, {"a": 2}, {"a": 1}]) == {0, 1}
    assert first_cases([{"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0, "b": 0}]) == {0, 1}
