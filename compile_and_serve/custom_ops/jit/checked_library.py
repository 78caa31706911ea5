"""Built libraries, each with a file that holds its SHA-256: loading half a library would kill the process."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def is_intact(library: Path) -> bool:
    """Whether a library exists and matches its checksum. Raises `OSError` if the machine fails to read it."""
    try:
        return _digest(library) == _checksum_file(library).read_bytes().strip()
    except FileNotFoundError:
        return False


def publish(built: Path, library: Path) -> None:
    """Move a finished library to its place, with its checksum. `built` must be on the same disk."""
    checksum = built.with_name(f"{built.name}.sha256")
    checksum.write_bytes(_digest(built))
    os.replace(checksum, _checksum_file(library))
    os.replace(built, library)


def _checksum_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest().encode()
