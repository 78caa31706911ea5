"""What the passes did, as data for artifacts, dumps and monitoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from compile_and_serve.compiler.rewrite.graph_pass import NearMiss, SkipReason
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, log_result


def pass_row(record: PassRecord) -> dict[str, Any]:
    """One row of the pass report: sites and near misses, or why the pass was skipped; and how its verification ended."""
    row: dict[str, Any] = {"name": record.name, "version": record.version, "seconds": round(record.seconds, 4)}
    if record.verification is not None:
        row["verification"] = asdict(record.verification)
    if isinstance(record.result, SkipReason):
        return row | {"skipped": record.result.sentence}
    near_misses = [asdict(miss) for miss in (*record.result.near_misses, *record.result.left_to_inductor)]
    return row | {
        "matched": record.result.matched,
        "expected": record.result.expected,
        "near_misses": near_misses,
        "measured": list(record.result.measured),
        "remarks": list(record.result.remarks),
    }


def log_stored_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Log what the passes logged when they made the artifact that has these rows."""
    for row in rows:
        if "skipped" not in row:
            near_misses = row["near_misses"][: row["expected"] - row["matched"]]  # the others were left to Inductor
            log_result(row["name"], [NearMiss(**miss) for miss in near_misses], row.get("remarks", ()))


def pass_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For monitoring: the sites of each pass, and why passes failed their verification."""
    sites = {row["name"]: {key: row[key] for key in ("matched", "expected")} for row in rows if "matched" in row}
    failed = {row["name"]: row["verification"]["reason"] for row in rows if row.get("verification", {}).get("reason")}
    return {"pass_sites": sites, "failed_passes": failed}
