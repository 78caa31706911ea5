"""The store of measurements: one JSON file for each kind of problem and device, in the user's cache.

    {"kind": …, "device": …, "torch": …, "kernels": digest of the kernels' sources, "problems": {problem: measurement}}

A file of another torch version or of other kernel sources is not read, because its measurements may be outdated.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_and_serve.custom_ops.jit.sources import kernel_digest

log = logging.getLogger(__name__)


def tuning_folder(cache_dir: Path | None = None) -> Path:
    """Where measurements are kept: below cache_dir; None: $XDG_CACHE_HOME/compile-and-serve, by default below ~/.cache."""
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compile-and-serve"
    return cache_dir / "tuning"


class MeasurementStore:
    """The measurements of one kind of problem on one device, with the current torch and kernel sources."""

    def __init__(self, folder: Path, kind: str, device: str) -> None:
        self._header = {"kind": kind, "device": device, "torch": torch.__version__, "kernels": kernel_digest()}
        name = "-".join(re.sub(r"[^\w.+]+", "_", part) for part in self._header.values())
        self.file = folder / f"{name}.json"
        self._problems = self._read()

    def get(self, problem: str) -> Any:
        """The stored measurement of a problem, or None."""
        return self._problems.get(problem)

    def put(self, problem: str, measurement: Any) -> None:
        """Store a measurement, and keep those of other processes. An unwritable file is logged."""
        self._problems[problem] = measurement
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            new = self.file.with_suffix(f".{os.getpid()}.tmp")
            with self.file.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                problems = self._read() | {problem: measurement}
                new.write_text(json.dumps(self._header | {"problems": problems}, indent=1))
                os.replace(new, self.file)
        except OSError as error:
            log.info("%s cannot be written (%s): its problems are measured again at the next start.", self.file, error)

    def _read(self) -> dict[str, Any]:
        kept = _read_object(self.file)
        problems = kept.get("problems")
        is_ours = all(kept.get(name) == value for name, value in self._header.items())
        return problems if is_ours and isinstance(problems, dict) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A file of the store. kernels: digest of the kernels' sources that were measured."""

    path: Path
    kind: str
    device: str
    torch: str
    kernels: str
    num_problems: int

    @property
    def is_current(self) -> bool:
        """Whether it was measured with the current torch and kernel sources."""
        return (self.torch, self.kernels) == (torch.__version__, kernel_digest())

    def remove(self) -> None:
        """Delete the file; its problems are measured again."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".lock").unlink(missing_ok=True)


def stored_files(folder: Path) -> list[StoredFile]:
    """Every file of a store. A damaged file has "?" in its fields and no problems."""
    files = []
    for path in sorted(folder.glob("*.json")):
        kept = _read_object(path)
        header = {name: str(kept.get(name, "?")) for name in ("kind", "device", "torch", "kernels")}
        problems = kept.get("problems")
        files.append(StoredFile(path=path, num_problems=len(problems) if isinstance(problems, dict) else 0, **header))
    return files


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist or holds no object."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
