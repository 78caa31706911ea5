"""A dump with near misses. Tests share it and must not change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dumps import make_dump, spec_with_near_misses
from tests.support.made_once import made_once


@pytest.fixture(scope="session")
def dump(run_dir: Path) -> Path:
    return made_once(run_dir / "dump", lambda folder: make_dump(folder, spec_with_near_misses()))
