"""What every line of a benchmark says of where it was measured."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Short hash of the checkout, with "-dirty" where tracked files differ from it; of a copy without its history, $BENCHMARK_COMMIT."""
    if named := os.environ.get("BENCHMARK_COMMIT"):
        return named
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() or "unknown"


def cpu_name() -> str:
    """Model, and the instruction sets that decide the speed of bfloat16."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{fields.get('model name', 'unknown CPU')} ({' '.join(sets)})"


def environment() -> dict[str, str]:
    """Versions and commit, for one JSON line."""
    return {"torch": version("torch"), "commit": commit()}
