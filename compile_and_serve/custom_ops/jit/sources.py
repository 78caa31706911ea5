"""Digests of our source files: an edit invalidates what was compiled or measured with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
CUSTOM_OPS = PACKAGE / "custom_ops"
CSRC = PACKAGE / "csrc"
_SUFFIXES = frozenset({".py", ".cpp", ".h", ".cu", ".cuh"})


def source_files(folder: Path) -> list[Path]:
    """Every source file below a folder, at any depth, in a fixed order."""
    return sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES)


def digest(*texts: str | bytes) -> str:
    """16 hexadecimal digits of a hash over a sequence of texts."""
    joined = hashlib.sha256()
    for text in texts:
        joined.update(text.encode() if isinstance(text, str) else text)
        joined.update(b"\0")
    return joined.hexdigest()[:16]


def source_digest(*folders: Path) -> str:
    """Changes with the name or the text of any source file below the folders."""
    return digest(
        *(part for folder in folders for file in source_files(folder) for part in (str(file.relative_to(folder)), file.read_bytes()))
    )


def kernel_digest() -> str:
    """Changes with any kernel (Triton, C++ or CUDA C++) and with any code that launches one."""
    return source_digest(CUSTOM_OPS, CSRC)
