"""Where the command line gets API keys from: flags, a file, or the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

API_KEY_VARIABLE = "COMPILE_AND_SERVE_API_KEY"


def read_api_keys(given: Sequence[str] | None, file: Path | None) -> tuple[str, ...]:
    """The keys of --api-key and of --api-key-file; without either, the environment variable's.

    Raises `ValueError` if the file cannot be read or contains no key.
    """
    keys = list(given or ())
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {file} cannot be read: {error}.") from None
        if not any(lines):
            raise ValueError(f"--api-key-file {file} contains no key.")
        keys += filter(None, lines)
    elif not keys and (key := os.environ.get(API_KEY_VARIABLE)):
        keys.append(key)
    return tuple(dict.fromkeys(keys))
