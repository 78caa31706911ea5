"""A thread's imports wait while a step is launched; those of other threads do not."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path

import pytest

from compile_and_serve.custom_ops.build import yielding_imports as tested
from compile_and_serve.custom_ops.build.yielding_imports import launching, yielding_imports


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two modules that can be imported and have not been."""
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [f"imported_between_steps_{i}" for i in range(2)]
    for name in found:
        (tmp_path / f"{name}.py").write_text("value = 3\n")
    return found


def test_a_thread_waits_for_the_launch_to_end(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "MAX_WAIT", 60.0)
    before, is_inside = list(sys.meta_path), threading.Event()

    def load() -> None:
        with yielding_imports():
            is_inside.set()
            importlib.import_module(names[0])

    with launching():
        thread = threading.Thread(target=load)
        thread.start()
        assert is_inside.wait(60)
        assert importlib.import_module(names[1]).value == 3  # another thread's import
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(60)
    assert sys.modules[names[0]].value == 3
    assert sys.meta_path == before


def test_an_import_ends_whatever_the_steps_do(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "MAX_WAIT", 0.05)
    with launching(), yielding_imports():
        assert importlib.import_module(names[0]).value == 3
