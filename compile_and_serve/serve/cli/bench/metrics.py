"""Token times → latency and throughput figures. Times are in seconds internally and in milliseconds in reports.

TTFT: request sent → first token. TPOT: (last token − first token) / (tokens − 1) of one request. ITL: time between two
chunks of one request. E2E: request sent → last token.
"""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from compile_and_serve import __version__
from compile_and_serve.serve.cli.output import error_console

PERCENTILES = (50, 90, 99)
RandomRangeRatio = Annotated[float, typer.Option(help="Lengths are uniform in [len · (1 − ratio), len · (1 + ratio)].")]


def random_lengths(generator: random.Random, count: int, mean: int, ratio: float) -> list[int]:
    """`count` lengths, uniform in mean · (1 ± ratio). Raises ValueError for a ratio outside [0, 1)."""
    if not 0.0 <= ratio < 1.0:
        raise ValueError(f"--random-range-ratio must be in [0, 1), got {ratio}.")
    low, high = round(mean * (1 - ratio)), round(mean * (1 + ratio))
    return [max(1, generator.randint(low, high)) for _ in range(count)]


@dataclass(kw_only=True, slots=True)
class RequestTrace:
    """One request as its client saw it. times: arrival of each chunk of tokens (time.perf_counter). chunk_tokens: of each, where known."""

    sent: float
    prompt_tokens: int
    times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    output_tokens: int = 0
    draft_tokens: int = 0  # of speculative decoding
    accepted_tokens: int = 0
    error: str | None = None


def summarize(traces: Sequence[RequestTrace], seconds: float) -> dict[str, Any]:
    """Figures of a run that took `seconds`. Failed requests are only counted."""
    good = [trace for trace in traces if trace.error is None and trace.times]
    prompt_tokens = sum(trace.prompt_tokens for trace in good)
    output_tokens = sum(trace.output_tokens for trace in good)
    decode_times = [(trace.times[-1] - trace.times[0]) / (trace.output_tokens - 1) for trace in good if trace.output_tokens > 1]
    gaps = [later - earlier for trace in good for earlier, later in zip(trace.times, trace.times[1:], strict=False)]
    return {
        "completed": len(good),
        "failed": len(traces) - len(good),
        "seconds": round(seconds, 4),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "requests_per_second": round(len(good) / seconds, 4),
        "output_tokens_per_second": round(output_tokens / seconds, 2),
        "total_tokens_per_second": round((prompt_tokens + output_tokens) / seconds, 2),
        **_speculation(good),
        "ttft_ms": _distribution([trace.times[0] - trace.sent for trace in good]),
        "tpot_ms": _distribution(decode_times),
        "itl_ms": _distribution(gaps),
        "e2e_ms": _distribution([trace.times[-1] - trace.sent for trace in good]),
    }


def _speculation(traces: Sequence[RequestTrace]) -> dict[str, Any]:
    """What became of draft tokens; nothing if there were none."""
    drafted, accepted = sum(trace.draft_tokens for trace in traces), sum(trace.accepted_tokens for trace in traces)
    if not drafted:
        return {}
    return {"draft_tokens": drafted, "accepted_tokens": accepted, "acceptance_rate": round(accepted / drafted, 4)}


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    import numpy as np

    values = np.asarray(seconds) * 1e3
    ranks = dict(zip((f"p{p}" for p in PERCENTILES), np.percentile(values, PERCENTILES).tolist(), strict=True))
    return {name: round(value, 3) for name, value in ({"mean": float(values.mean())} | ranks).items()}


def report(title: str, workload: Mapping[str, Any], results: Mapping[str, Any], output_json: Path | None) -> None:
    """Print the table to stderr and one JSON object to stdout (and to `output_json`)."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column(column, justify="right")
    for name in ("ttft", "tpot", "itl", "e2e"):
        distribution = results[f"{name}_ms"]
        if distribution is not None:
            table.add_row(f"{name.upper()} (ms)", *(f"{value:.2f}" for value in distribution.values()))
    console = error_console()
    console.print(table)
    console.print(
        f"{results['completed']} requests in {results['seconds']:.2f} s ({results['failed']} failed): "
        f"{results['requests_per_second']:.2f} requests/s, "
        f"{results['output_tokens_per_second']:.1f} output tokens/s, "
        f"{results['total_tokens_per_second']:.1f} prompt and output tokens/s"
    )
    if "draft_tokens" in results:
        console.print(
            f"Speculative decoding: {results['accepted_tokens']} of {results['draft_tokens']} draft tokens accepted "
            f"({results['acceptance_rate']:.0%})"
        )
    row = json.dumps({"benchmark": title, **workload, **results, **_environment()})
    typer.echo(row)
    if output_json is not None:
        output_json.write_text(row + "\n")


def _environment() -> dict[str, str]:
    return {"version": __version__, "torch": version("torch"), "python": platform.python_version(), "machine": platform.machine()}
