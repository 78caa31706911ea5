"""What the benchmark of tenants prints, and when."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from benchmarks import tenants


class _Bench:
    """Runs with given speeds. known: tenants of the rows that were printed before each run of an attack.
    num_in_time: attacks for which there is time.
    """

    def __init__(self, speeds: dict[str | None, list[float]], capsys: pytest.CaptureFixture[str], *, num_in_time: int = 9) -> None:
        self._speeds, self._capsys, self._num_in_time = speeds, capsys, num_in_time
        self.printed: list[dict[str, Any]] = []
        self.known: list[list[str]] = []
        self.is_closed = False

    @property
    def is_late(self) -> bool:
        self._num_in_time -= 1
        return self._num_in_time < 0

    def take_printed(self) -> list[dict[str, Any]]:
        self.printed.extend(map(json.loads, self._capsys.readouterr().out.splitlines()))
        return self.printed

    def run(self, name: str | None, *rest: object) -> dict[str, Any]:
        self.take_printed()
        if name not in (None, "fair"):
            self.known.append([row["tenants"] for row in self.printed])
        figures = {"ttft_p50_ms": 10.0, "longest_gap_ms": 20.0, "gap_ms": 5.0, "statuses": {200: 3}}
        return {"tok_s": self._speeds[name].pop(0)} | figures

    def close(self) -> None:
        self.is_closed = True


def _measure(bench: _Bench, names: list[str]) -> list[dict[str, Any]]:
    tenants._measure_all(bench, names, Namespace(model="m", slots=8))  # type: ignore[arg-type]
    assert bench.is_closed
    return bench.take_printed()


@pytest.mark.parametrize(("after", "uses"), [(90.0, "before"), (200.0, "after")])
def test_rows_are_printed_once_they_are_known(capsys: pytest.CaptureFixture[str], after: float, uses: str) -> None:
    bench = _Bench({None: [150.0], "fair": [1.0, 50.0, 100.0, 100.0, 100.0, after, after], "flood": [1.0, 90.0]}, capsys)
    printed = _measure(bench, ["flood"])
    assert bench.known == [[], ["alone", "fair"]]
    attacks = [row for row in printed if row["tenants"] == "flood"]
    assert attacks[0]["of_fair"] == 0.9
    assert attacks[0]["holds"]
    assert printed[-1]["uses"] == uses
    assert printed[-1]["before"]["steady"]
    assert printed[-1]["holds"] == {"flood": uses == "before"}
    assert len(attacks) == (2 if uses == "after" else 1)
    if uses == "after":
        assert attacks[1]["of_fair"] == 0.45


def test_attacks_for_which_no_time_is_left_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    fair = [1.0, *(100.0 * 1.1**i for i in range(1 + tenants.MAX_FAIR_RUNS)), 90.0, 90.0]
    bench = _Bench({None: [150.0], "fair": fair, "flood": [1.0, 150.0], "queue": [1.0]}, capsys, num_in_time=1)
    printed = _measure(bench, ["flood", "queue"])
    assert [row["tenants"] for row in printed] == ["alone", "fair", "flood", "fair"]
    assert printed[-1]["left_out"] == ["queue"]
    assert not printed[-1]["before"]["steady"]
