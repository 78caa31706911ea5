"""A dump with a near miss, made once for the tests of what shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dumps import make_dump, spec_with_near_misses


@pytest.fixture(scope="session")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dump(tmp_path_factory.mktemp("dump") / "dump", spec_with_near_misses())
