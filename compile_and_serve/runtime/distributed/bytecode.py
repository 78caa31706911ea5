"""Keep compiled Python modules in the user's cache if Python cannot keep them beside the sources.

Many container images set PYTHONDONTWRITEBYTECODE, and some install packages where the user cannot write. Each start then
compiles about two thousand modules of torch again, which takes longer than loading an artifact.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def keep_bytecode() -> None:
    """Write this process's bytecode to the user's cache, unless Python already keeps it somewhere.

    Call it before torch is imported, and only in processes that we start: a library must not change its host's settings.
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
