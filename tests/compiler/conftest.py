"""What tests of the compiler share."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.compiler.inductor import start_inductor


@pytest.fixture(scope="module")
def instruction_set(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Chosen as at a start, or Inductor would build a library for every instruction set."""
    with start_inductor(torch.device("cpu"), tmp_path_factory.mktemp("probes")) as wait:
        wait()
