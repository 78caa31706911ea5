"""A compiler for tests of the C++ kernels."""

from __future__ import annotations

import pytest

from compile_and_serve.custom_ops.jit.cpp import BuildError, find_compiler


@pytest.fixture(scope="session")
def compiler() -> str:
    """Path of a C++ compiler. Tests are skipped only if there is none: a failed build is an error."""
    try:
        return find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
