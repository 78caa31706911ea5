"""CUDA's context is made while torch is imported."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile_and_serve.custom_ops.platforms import cuda_context
from compile_and_serve.custom_ops.platforms.cuda_context import start_cuda


class Driver:
    """fails: the function that returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def _done(self, name: str, value: int) -> int:
        self.calls.append((name, value))
        return 100 if name == self._fails else 0

    def cuInit(self, flags: int) -> int:
        return self._done("cuInit", flags)

    def cuDeviceGet(self, number: Any, index: int) -> int:
        number._obj.value = index + 10
        return self._done("cuDeviceGet", index)

    def cuDevicePrimaryCtxRetain(self, context: Any, number: ctypes.c_int) -> int:
        return self._done("cuDevicePrimaryCtxRetain", number.value)


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch is not imported, and lies here with its CUDA library."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(cuda_context, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(cuda_context, "sys", SimpleNamespace(modules={}))
    return tmp_path


@pytest.mark.usefixtures("torch_folder")
@pytest.mark.parametrize(
    ("fails", "num_calls"), [("", 3), ("cuDevicePrimaryCtxRetain", 3), ("cuDeviceGet", 2), ("cuInit", 1)], ids=lambda value: str(value)
)
def test_the_gpus_primary_context_is_made(fails: str, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    thread = start_cuda("auto", 2)
    assert thread is not None
    thread.join()
    assert driver.calls == [("cuInit", 0), ("cuDeviceGet", 2), ("cuDevicePrimaryCtxRetain", 12)][:num_calls]


def test_where_torch_will_not_use_cuda_or_is_there_nothing_starts(torch_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_cuda("cpu", 0) is None
    assert start_cuda("npu", 0) is None
    cuda_context.sys.modules["torch"] = sys.modules[__name__]  # its current device may be another one
    assert start_cuda("cuda", None) is None
    cuda_context.sys.modules.clear()
    (torch_folder / "lib" / "libtorch_cuda.so").unlink()
    assert start_cuda("cuda", None) is None
    monkeypatch.setattr(cuda_context, "find_spec", lambda name: None)
    assert start_cuda("cuda", None) is None


@pytest.mark.usefixtures("torch_folder")
def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    thread = start_cuda("cuda", None)
    assert thread is not None
    thread.join()
