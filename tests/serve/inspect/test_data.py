"""Data for the views: repeated groups collapsed, near misses grouped, errors as sentences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from compile_and_serve.compiler.reports.dump_format import REPORT
from compile_and_serve.serve.inspect.data import DumpError, collapse, collapsed_text, load_dump, near_misses
from tests.support.dumps import LAYERS, repeats


def blocks(text: str) -> list[tuple[str, int]]:
    """Blocks of one-letter steps. Upper case: pieces; lower case: ops."""
    steps = [{"piece": letter} if letter.isupper() else {"op": letter} for letter in text]
    return [("".join(s.get("piece") or s["op"] for s in b["steps"]), b["count"]) for b in collapse(steps)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("", []),
        ("A", [("A", 1)]),
        ("AaB", [("A", 1), ("a", 1), ("B", 1)]),
        ("A" + "aB" * 29 + "aC", [("A", 1), ("aB", 29), ("a", 1), ("C", 1)]),
        ("A" + "bBbBbBaC" * 10 + "D", [("A", 1), ("bBbBbBaC", 10), ("D", 1)]),
        ("AAAA", [("A", 4)]),
    ],
)
def test_repeated_groups_are_collapsed(steps: str, expected: list[tuple[str, int]]) -> None:
    assert blocks(steps) == expected
    assert "".join(group * count for group, count in blocks(steps)) == steps


@pytest.mark.exhaustive
def test_near_misses_are_grouped_by_source_line(dump: Path) -> None:
    rows = near_misses(load_dump(dump)["compilation"]["passes"])
    assert len(rows) == 1
    assert (rows[0]["pass"], rows[0]["count"], len(rows[0]["nodes"])) == ("fuse_linears", LAYERS, LAYERS)
    assert rows[0]["source"].startswith("models/families/llama.py:")


def test_text_has_each_distinct_piece_once(dump: Path) -> None:
    report = load_dump(dump)
    text = collapsed_text(report, report["graphs"][-1])
    assert text.count("def forward(") == len(report["split"])
    assert f"# torch.ops.cas.rope_attention.default × {repeats(dump)}" in text


@pytest.mark.parametrize("damage", ["missing", "garbage", "schema", "incomplete"])
def test_invalid_dump_is_one_sentence(dump: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "dump"
    shutil.copytree(dump, folder)
    report = folder / REPORT
    if damage == "missing":
        report.unlink()
    elif damage == "garbage":
        report.write_text("{")
    else:
        report.write_text(json.dumps({"schema": 0} if damage == "schema" else {"schema": 1, "incomplete": True}))
    with pytest.raises(DumpError, match="contains no dump|has schema 0, expected 1|is incomplete"):
        load_dump(folder)
