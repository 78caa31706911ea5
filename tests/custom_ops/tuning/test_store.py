"""The store of measurements: what several processes write, what is damaged, and what other kernels measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_and_serve.custom_ops.tuning import store as module
from compile_and_serve.custom_ops.tuning.store import MeasurementStore, stored_files


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    one, another = (MeasurementStore(tmp_path, "linear", "NVIDIA H200") for _ in range(2))
    one.put("x", {"a": [1.0]})
    another.put("y", {"b": [2.0]})
    both = MeasurementStore(tmp_path, "linear", "NVIDIA H200")
    assert (both.get("x"), both.get("y"), both.get("z")) == ({"a": [1.0]}, {"b": [2.0]}, None)
    assert MeasurementStore(tmp_path, "linear", "another").get("x") is None
    assert MeasurementStore(tmp_path, "allreduce", "NVIDIA H200").get("x") is None
    [file] = stored_files(tmp_path)
    assert (file.kind, file.device, file.num_problems) == ("linear", "NVIDIA H200", 2)


@pytest.mark.parametrize("text", ["{ damaged", "[]", '{"problems": {"x": 1}}', '{"kind": "linear", "problems": 3}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    file = MeasurementStore(tmp_path, "linear", "a device").file
    file.write_text(text)
    store = MeasurementStore(tmp_path, "linear", "a device")
    assert store.get("x") is None
    store.put("x", {"a": [1.0]})
    assert MeasurementStore(tmp_path, "linear", "a device").get("x") == {"a": [1.0]}


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = MeasurementStore(tmp_path / "file", "linear", "a device")
    with caplog.at_level("INFO"):
        store.put("x", {"a": [1.0]})
    assert store.get("x") == {"a": [1.0]}  # in this process
    assert "cannot be written" in caplog.text


def test_other_kernels_have_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MeasurementStore(tmp_path, "linear", "a device").put("x", {"a": [1.0]})
    [file] = stored_files(tmp_path)
    assert file.is_current
    monkeypatch.setattr(module, "kernel_digest", lambda: "edited")
    assert MeasurementStore(tmp_path, "linear", "a device").get("x") is None
    [file] = stored_files(tmp_path)
    assert not file.is_current
    file.remove()
    assert list(tmp_path.iterdir()) == []
