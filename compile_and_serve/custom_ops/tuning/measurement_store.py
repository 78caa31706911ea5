"""What was measured on this machine, kept as an object in a JSON file of the user's cache."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def read_kept(file: Path) -> dict[str, Any]:
    """The object in the file; an empty one where there is no file, or something else in it."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep(file: Path, entries: Mapping[str, Any]) -> None:
    """Put entries into the file, beside what other processes have put there meanwhile; logged where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}.tmp")
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.write_text(json.dumps(read_kept(file) | dict(entries), indent=1))
            os.replace(new, file)
    except OSError as error:
        log.info("%s cannot be written (%s): what it would hold is measured again at the next start.", file, error)
