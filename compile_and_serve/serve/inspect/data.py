"""Reads a dump (`compile_and_serve.compiler.reports.dump`) and prepares its data for the page and the terminal."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_and_serve.compiler.reports.dump_format import BYTECODE, FORWARD, REPORT, SCHEMA

_ALIGNMENT = re.compile(r" {3,}# ")
LONGEST_PERIOD = 16  # steps of a repeated group; a hybrid model repeats groups of several layers


class DumpError(ValueError):
    """The folder is not a dump, or a dump of another version."""


def load_dump(folder: Path) -> dict[str, Any]:
    """report.json of a dump, with added fields. Raises `DumpError`.

    Added fields: `blocks` of each graph (see `collapse`), `code` of each split row (the generated code), `forward` and
    `bytecode` (the texts of these files), `folder`.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "write one with --dump-dir" if not (folder / REPORT).exists() else str(error)
        raise DumpError(f"{folder} contains no dump of a compilation: {hint}.") from None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        found = report.get("schema") if isinstance(report, dict) else None
        raise DumpError(f"The dump in {folder} has schema {found}, expected {SCHEMA}: write it again with this version.")
    if "compilation" not in report:
        raise DumpError(f"The dump in {folder} is incomplete: the run that wrote it stopped or could not finish writing.")
    for graph in report["graphs"]:
        graph["blocks"] = collapse(graph["steps"])
    for row in report["split"]:
        row["code"] = _read(folder / row["compiled_file"]) if "compiled_file" in row else ""
    texts = {"forward": _read(folder / FORWARD), "bytecode": _read(folder / BYTECODE)}
    return report | texts | {"folder": str(folder)}


def collapse(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps as blocks [{"steps": [...], "count": 29}, …], a repeated group of steps once. Ops of one name are equal."""
    keys = [step.get("piece") or step["op"] for step in steps]
    blocks: list[dict[str, Any]] = []
    at = 0
    while at < len(keys):
        period, count = max(
            ((period, _repeats(keys, at, period)) for period in range(1, LONGEST_PERIOD + 1)),
            key=lambda found: (found[0] * found[1] if found[1] > 1 else 0, -found[0]),
        )
        if count > 1:
            blocks.append({"steps": list(steps[at : at + period]), "count": count})
            at += period * count
        else:
            blocks.append({"steps": [steps[at]], "count": 1})
            at += 1
    return blocks


def _repeats(keys: Sequence[str], at: int, period: int) -> int:
    """How many times in a row the group keys[at : at + period] occurs."""
    group, count = keys[at : at + period], 1
    while keys[at + count * period : at + (count + 1) * period] == group:
        count += 1
    return count


def near_misses(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Near misses of all passes, grouped by pass, source line and reason, with their count and nodes."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for miss in row.get("near_misses", []):
            key = (row["name"], shorten(miss["source"]), miss["reason"])
            grouped.setdefault(key, []).append(miss["node"])
    return [
        {"pass": name, "source": source, "reason": reason, "count": len(nodes), "nodes": nodes}
        for (name, source, reason), nodes in grouped.items()
    ]


def shorten(source: str) -> str:
    """A source line without the folder of this package."""
    return source.replace(f"{Path(__file__).parents[2]}/", "")


def collapsed_text(report: Mapping[str, Any], graph: Mapping[str, Any]) -> str:
    """The graph as text with each distinct piece once, for comparing two graphs."""
    parts, seen = [], set[str]()
    for block in graph["blocks"]:
        for step in block["steps"]:
            times = f" × {block['count']}" if block["count"] > 1 else ""
            if "op" in step:
                parts.append(f"# {step['op']}{times}\n{step['node']['call']}")
            elif step["piece"] not in seen:
                seen.add(step["piece"])
                parts.append(f"# piece{times}\n{report['pieces'][step['piece']]['text']}")
    return _ALIGNMENT.sub("  # ", "\n\n".join(parts))


def target_counts(report: Mapping[str, Any], graph: Mapping[str, Any]) -> Counter[str]:
    """Number of calls of each function in a whole graph."""
    counts: Counter[str] = Counter()
    for step in graph["steps"]:
        if "op" in step:
            counts[step["op"]] += 1
        else:
            counts.update(node["target"] for node in report["pieces"][step["piece"]]["nodes"] if node["kind"] == "call")
    return counts


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
