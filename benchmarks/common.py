"""Device, versions and commit: where the lines of a benchmark were measured."""

from __future__ import annotations

import os
import subprocess
import traceback
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Short hash of the checkout, with "-dirty" if tracked files differ from it. A copy without git history sets $BENCHMARK_COMMIT."""
    if named := os.environ.get("BENCHMARK_COMMIT"):
        return named
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


INSTRUCTION_SETS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def cpu_name() -> str:
    """The CPU's model, and which instruction sets for bfloat16 and int8 products it has."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    sets = [name for name in INSTRUCTION_SETS if name in flags]
    return f"{fields.get('model name', 'unknown CPU')} ({' '.join(sets)})"


def error_head(error: BaseException) -> str:
    """What an error says first, and which of our lines raised it: the rest of a CUDA error is pages of C++ frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-6:-1])
    said = " ".join(line.strip() for line in str(error).splitlines()[:3])
    return f"{type(error).__name__}: {said[:300]} ({where})"


def environment() -> dict[str, str]:
    """torch's version and the commit, for one JSON line."""
    return {"torch": version("torch"), "commit": commit()}
