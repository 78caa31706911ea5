"""Libraries that are built in the background come into use when a process says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.jit import cuda
from compile_and_serve.custom_ops.jit.cpp import BuildError

DEVICE = torch.device("cuda", 0)


class Library:
    """In the place of an `NvccLibrary`."""

    name, duration = "stand_in", "a moment"

    def __init__(self, folder: Path, error: str = "") -> None:
        self._file, self._error = folder / "stand_in.so", error

    def path(self) -> Path:
        return self._file

    def build(self) -> Path:
        if self._error:
            raise BuildError(self._error)
        self._file.touch()
        return self._file


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Builds that began in the background. To call one ends it."""
    begun: list[Any] = []
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setattr(cuda, "_building", [])
    monkeypatch.setattr(cuda, "_built", [])
    monkeypatch.setattr(cuda, "platform_of", lambda device: SimpleNamespace(compute_capability=(9, 0)))
    monkeypatch.setattr(cuda, "is_intact", Path.exists)
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: f"loaded {Path(path).name}")
    monkeypatch.setattr(cuda, "run_in_background", lambda name, work: begun.append(work))
    return begun


def test_a_library_that_is_built_meanwhile_is_used_when_the_process_says_so(tmp_path: Path, builds: list[Any]) -> None:
    library = Library(tmp_path)

    def load() -> object:
        return cuda.load_or_build(DEVICE, "products", lambda: library)  # type: ignore[arg-type, return-value]

    assert load() is load() is None
    assert len(builds) == 1
    assert (cuda.num_building(), cuda.num_built_libraries()) == (1, 0)
    builds[0]()
    assert (cuda.num_building(), cuda.num_built_libraries()) == (0, 1)
    assert load() is None  # the kernels of a step do not change under it
    assert cuda.use_built_libraries() == ["products"]
    assert cuda.num_built_libraries() == 0
    assert load() == "loaded stand_in.so"
    assert len(builds) == 1


def test_a_build_that_fails_is_not_tried_again(tmp_path: Path, builds: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    library = Library(tmp_path, "nvcc ended with status 1")

    def load() -> object:
        return cuda.load_or_build(DEVICE, "products", lambda: library)  # type: ignore[arg-type, return-value]

    assert load() is None
    builds[0]()
    assert "products could not be built: nvcc ended with status 1" in caplog.text
    assert cuda.num_building() == 0
    assert cuda.use_built_libraries() == []
    assert load() is None
    assert len(builds) == 1
