"""What the benchmark of tenants prints, and when."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from benchmarks import tenants


@pytest.mark.parametrize(("after", "uses"), [(90.0, "before"), (200.0, "after")])
def test_rows_are_printed_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: float, uses: str
) -> None:
    printed: list[dict[str, Any]] = []
    speeds = {None: iter([150.0]), "fair": iter([50.0, 100.0, 100.0, 100.0, *[after] * 3]), "flood": iter([1.0, 90.0])}
    known_at_flood = []

    def run(url: str, name: str | None, *rest: object) -> dict[str, Any]:
        printed.extend(map(json.loads, capsys.readouterr().out.splitlines()))
        if name == "flood":
            known_at_flood.append([row["tenants"] for row in printed])
        figures = {"ttft_p50_ms": 10.0, "longest_gap_ms": 20.0, "gap_ms": 5.0, "statuses": {200: 3}}
        return {"tok_s": next(speeds[name])} | figures

    monkeypatch.setattr(tenants, "_run", run)
    tenants._measure_all("", ["flood"], Namespace(model="m", slots=8, seconds=1.0), None)  # type: ignore[arg-type]
    printed.extend(map(json.loads, capsys.readouterr().out.splitlines()))
    assert known_at_flood == [[], ["alone", "fair"]]
    attacks = [row for row in printed if row["tenants"] == "flood"]
    assert attacks[0]["of_fair"] == 0.9
    assert attacks[0]["holds"]
    assert printed[-1]["uses"] == uses
    assert printed[-1]["holds"] == {"flood": uses == "before"}
    assert len(attacks) == (2 if uses == "after" else 1)
    if uses == "after":
        assert attacks[1]["of_fair"] == 0.45
