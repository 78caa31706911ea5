"""Bytecode goes to the user's cache only if Python cannot keep it beside the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import importlib.util, sys
sys.path[:0] = sys.argv[1:3]
from compile_and_serve.runtime.distributed.bytecode import keep_bytecode
keep_bytecode()
import torch
print(sys.pycache_prefix, sys.dont_write_bytecode)
"""


def run(tmp_path: Path, **environment: str) -> str:
    """Output of a process that imports a package `torch` without bytecode."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    root = Path(__file__).resolve().parents[3]
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(package.parent), str(root)],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return output.stdout.strip()


def test_it_goes_to_the_cache_if_python_may_not_write_it(tmp_path: Path) -> None:
    prefix = tmp_path / "cache" / "compile-and-serve" / "bytecode"
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="1") == f"{prefix} False"
    assert list(prefix.rglob("torch/__init__.*.pyc"))


def test_it_stays_beside_the_sources_if_python_writes_it(tmp_path: Path) -> None:
    assert run(tmp_path, PYTHONDONTWRITEBYTECODE="") == "None False"
    assert list((tmp_path / "packages" / "torch").rglob("__init__.*.pyc"))
