"""A dump in the terminal: the explorer's tables, and the comparison of two dumps."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from compile_and_serve.serve.inspect.data import collapsed_text, near_misses, shorten, target_counts

_RIGHT = frozenset(
    {
        "matched",
        "expected",
        "seconds",
        "count",
        "calls",
        "max error",
        "relative",
        "tolerance",
        "ms",
        "GB/s",
        "GFLOP/s",
        "bandwidth",
        "compute",
        "tokens",
        "×",
        "before",
        "after",
    }
)

_MEMORY = ("total", "others", "weights", "largest_step", "sampling", "graphs")  # of `compile_and_serve.runtime.runner.memory.MemoryPlan`
_PATHS = frozenset({"dump_dir", "cache_dir", "artifact_dir"})  # options that do not change the compilation


def print_dump(report: Mapping[str, Any], console: Console) -> None:
    """Print everything that the explorer shows, as tables."""
    model, compilation = report["model"], report["compilation"]
    environment = report["environment"]
    console.print(
        f"[bold]{model['architecture']}[/bold], {model['layers']} layers, {model['dtype']} on {environment['device']} "
        f"({escape(environment['capability'])}), torch {escape(environment['torch'].split(' ')[0])}"
    )
    stages = [(name, f"{seconds:.2f}") for name, seconds in compilation["stages"].items()]
    console.print(_table("Stages", ("stage", "seconds"), stages))
    for table in pass_tables(compilation["passes"]):
        console.print(table)
    console.print(_graphs(report))
    console.print(_pieces(report))
    for table in profile_tables(report.get("profile")):
        console.print(table)
    if engine := report.get("engine"):
        size = f"{engine['kv_cache_tokens']} tokens, {engine['kv_cache_bytes'] / 2**20:.1f} MiB"
        console.print(f"KV cache {size}, attention by {engine['attention_backend']}")
        if memory := engine.get("memory"):  # only CUDA measures it
            rows = [(k.replace("_", " "), f"{memory[k] / 2**30:.2f}") for k in _MEMORY]
            console.print(_table("Memory before the KV cache", ("", "GiB"), rows))
        if engine["cudagraphs"]:
            console.print(_table("CUDA graphs", ("", ""), [(k, str(v)) for k, v in engine["cudagraphs"].items()]))
    console.print(f"weights {report['weight_bytes'] / 2**20:.1f} MiB, {len(report['weights'])} tensors")


def pass_tables(rows: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Tables of each pass's sites, its near misses with reasons, its measured choices, and its verification."""
    passes = []
    for row in rows:
        misses = len(row.get("near_misses", []))
        note = row.get("skipped") or (f"{misses} near miss{'es' if misses > 1 else ''}" if misses else "")
        counts = (str(row.get("matched", "–")), str(row.get("expected", "–")))
        passes.append((row["name"], *counts, f"{row['seconds']:.3f}", note))
    tables: list[RenderableType] = [_table("Passes", ("pass", "matched", "expected", "seconds", "note"), passes)]
    if missed := near_misses(rows):
        lines = [(m["pass"], str(m["count"]), m["nodes"][0], m["source"], m["reason"]) for m in missed]
        tables.append(_table("Near misses", ("pass", "×", "first node", "source", "reason"), lines))
    if chosen := [(row["name"], sentence) for row in rows for sentence in row.get("measured", [])]:
        tables.append(_table("Measured choices", ("pass", "outcome"), chosen))
    verified = [(row["name"], row["verification"]) for row in rows if row.get("verification")]
    if verified:
        lines = [
            (name, _number(v["max_error"]), _number(v["relative_error"]), _number(v["tolerance"]), v["reason"] or "correct")
            for name, v in verified
        ]
        tables.append(_table("Verification (float64)", ("pass", "max error", "relative", "tolerance", "result"), lines))
    return tables


def _graphs(report: Mapping[str, Any]) -> Table:
    lines = []
    for graph in report["graphs"]:
        shape = "  ".join(_block(report, graph, block) for block in graph["blocks"])
        lines.append((graph["name"], str(graph["nodes"]), shape))
    return _table("Graphs", ("graph", "calls", "shape"), lines)


def _block(report: Mapping[str, Any], graph: Mapping[str, Any], block: Mapping[str, Any]) -> str:
    names = list(dict.fromkeys(step["piece"] for step in graph["steps"] if "piece" in step))
    parts = [f"piece {names.index(step['piece'])}" if "piece" in step else step["op"].split(".")[-2] for step in block["steps"]]
    return parts[0] if block["count"] == 1 else f"({' → '.join(parts)}) × {block['count']}"


def _pieces(report: Mapping[str, Any]) -> Table:
    lines = []
    for i, row in enumerate(report["split"]):
        calls = sum(node["kind"] == "call" for node in report["pieces"][row["piece"]]["nodes"])
        seconds = f"{row['seconds']:.2f}" if "seconds" in row else ""
        lines.append((f"piece {i}", str(row["count"]), str(calls), row["piece"][:8], row.get("how", ""), seconds))
    return _table("Distinct pieces", ("piece", "×", "calls", "fingerprint", "", "seconds"), lines)


def profile_tables(profile: Mapping[str, Any] | None) -> list[Table]:
    """Tables of measured pieces and split ops (`compile_and_serve.compiler.reports.profile`); empty without a profile."""
    if not profile:
        return []
    device = f"{profile['bandwidth'] / 1e9:.1f} GB/s and {profile['gemm_rate'] / 1e9:.0f} GFLOP/s measured on this device"
    lines = [
        (
            row["name"],
            str(row["count"]),
            str(row["tokens"]),
            f"{row['seconds'] * 1e3:.3f}",
            f"{row['bytes'] / row['seconds'] / 1e9:.1f}",
            f"{row['bytes'] / row['seconds'] / profile['bandwidth']:.0%}",
            f"{row['flops'] / row['seconds'] / 1e9:.1f}",
            f"{row['flops'] / row['seconds'] / profile['gemm_rate']:.0%}",
        )
        for row in profile["rows"]
    ]
    columns = ("piece", "×", "tokens", "ms", "GB/s", "bandwidth", "GFLOP/s", "compute")
    steps = [(str(row["tokens"]), f"{row['seconds'] * 1e3:.3f}", f"{row['between'] * 1e3:.3f}") for row in profile["steps"]]
    title = f"Whole steps, {profile['context']} tokens of context"
    loads = [
        (str(row["tokens"]), str(row["layers"]), str(row["experts"]), f"{row['distinct']:.1f}", f"{row['largest']:.2f}")
        for row in profile.get("experts", [])
    ]
    columns_of_loads = ("tokens", "layers", "experts", "with tokens", "busiest / mean")
    return [
        *([_table("Experts of a layer, with random weights", columns_of_loads, loads)] if loads else []),
        _table(f"Measured pieces ({device})", columns, lines),
        _table(title, ("tokens", "ms", "between pieces, ms"), steps),
    ]


def print_comparison(before: Mapping[str, Any], after: Mapping[str, Any], console: Console) -> None:
    """Print the differences of two dumps: environment, options, passes, calls, pieces and generated code."""
    console.print(f"before: {escape(before['folder'])}\nafter:  {escape(after['folder'])}")
    parts: list[RenderableType] = []
    for title, field in (("Environment", "environment"), ("Model", "model"), ("Options", "options"), ("Key", "key")):
        lines = [line for line in _differing(before[field], after[field]) if line[0] not in _PATHS]
        if lines:
            parts.append(_table(title, ("field", "before", "after"), lines))
    passes = [{row["name"]: _pass_summary(row) for row in dump["compilation"]["passes"]} for dump in (before, after)]
    if lines := _differing(*passes):
        parts.append(_table("Passes", ("pass", "before", "after"), lines))
    last_before, last_after = before["graphs"][-1], after["graphs"][-1]
    counts = [target_counts(dump, graph) for dump, graph in ((before, last_before), (after, last_after))]
    if lines := _differing(*counts):
        parts.append(_table("Calls of the final graph", ("function", "before", "after"), lines))
    stages = [{name: f"{seconds:.2f} s" for name, seconds in d["compilation"]["stages"].items()} for d in (before, after)]
    if lines := _differing(*stages):
        parts.append(_table("Stages", ("stage", "before", "after"), lines))
    pieces = [{row["piece"]: row["count"] for row in dump["split"]} for dump in (before, after)]
    if pieces[0] != pieces[1]:
        lines = [(key[:8], f"× {a}" if a else "–", f"× {b}" if b else "–") for key, a, b in _merged(*pieces)]
        parts.append(_table("Distinct pieces", ("fingerprint", "before", "after"), lines))
    else:
        codes = [{row["piece"]: row["code"] for row in dump["split"]} for dump in (before, after)]
        changed = [key for key in codes[0] if codes[0][key] != codes[1][key]]
        if changed:
            parts.append(f"The pieces are equal, but the code generated for {len(changed)} of {len(codes[0])} differs.")
    texts = [collapsed_text(dump, graph) for dump, graph in ((before, last_before), (after, last_after))]
    if texts[0] != texts[1]:
        parts += ["[bold]Final graph[/bold]", _diff(*texts)]
    console.print(Group(*parts) if parts else "The two dumps are equal.")


def _pass_summary(row: Mapping[str, Any]) -> str:
    if "skipped" in row:
        return str(row["skipped"])
    verification = row.get("verification")
    error = f", relative error {_number(verification['relative_error'])}" if verification else ""
    return f"{row['matched']} of {row['expected']}, version {row['version']}{error}"


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(key, _shown(a), _shown(b)) for key, a, b in _merged(before, after) if a != b]


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    text = value if isinstance(value, str) else json.dumps(value)
    return shorten(text) if len(text) <= 200 else f"{text[:199]}…"


def _diff(before: str, after: str) -> Text:
    text = Text()
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2)
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        text.append(line + "\n", style=styles.get(line[0], ""))
    return text


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
