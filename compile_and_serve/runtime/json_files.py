"""Reads the JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(file: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """The object in a file; {} if there is none. Raises `error` with one sentence for a file that holds something else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise error(f"{file} is not valid JSON ({cause}): check that the file is complete.") from cause
    if not isinstance(value, dict):
        raise error(f"{file} must hold a JSON object, got a {type(value).__name__}.")
    return value
