"""Compiled Python modules kept where the machine does not keep them.

Many container images set PYTHONDONTWRITEBYTECODE, and some install packages where a user cannot write. Every start then compiles
the some two thousand modules of torch again, which takes longer than loading an artifact.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode() -> None:
    """Keep this process's bytecode in the user's cache, unless it is kept already. For processes of our own, before torch is
    imported; a library must leave its host's settings alone.
    """
    if sys.pycache_prefix is not None or "torch" in sys.modules:
        return
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or Path(importlib.util.cache_from_source(spec.origin)).exists():
        return
    if sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK):
        from compile_and_serve.runtime.weights.resolve import user_cache_dir

        sys.pycache_prefix = str(user_cache_dir() / "bytecode")
        sys.dont_write_bytecode = False
