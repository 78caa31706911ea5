"""kill -9 of either side while requests go from one to the other: all end, as they should or with an error, and nothing leaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.handover import main

SERVE = ("--dtype", "float32", "--max-model-len", "512", "--num-threads", "1")


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["takers-1"])
@pytest.mark.parametrize(("victims", "kills"), [("takers", 1), ("takers", 3), ("givers", 3)])
def test_kills_leave_nothing_behind(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], victims: str, kills: int) -> None:
    flags = ("--kills", str(kills), "--victims", victims, "--streams", "6")
    with pytest.raises(SystemExit) as ended:
        main(["kills", str(tiny_llama_dir), "--device", "cpu", "--eager", *flags, *SERVE])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0, rows
    assert [row["is_well"] for row in rows] == [True] * (kills + 1)
    assert rows[-1]["as_expected"] > 0


@pytest.mark.exhaustive
def test_kills_under_load_leave_nothing_behind(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["kills-under-load", str(tiny_llama_dir), "--device", "cpu", "--eager", "--seconds", "20", "--streams", "6", *SERVE])
    row = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, row
    assert row["is_well"]
    assert row["kills"] > 0
