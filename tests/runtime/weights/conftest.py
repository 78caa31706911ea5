"""The checkpoint that several tests quantize."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.loaded_checkpoints import write_plain


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in float16, which the tests of 4-bit formats quantize."""
    return write_plain(tmp_path_factory.mktemp("plain"), torch.float16, intermediate_size=192)
