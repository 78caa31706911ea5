"""An edit of any kernel changes every key that compiled or measured work is kept under."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compile_and_serve.compiler.artifacts import cache_key
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.custom_ops.jit import sources, triton_launch
from compile_and_serve.custom_ops.tuning.store import MeasurementStore
from tests.support.tiny_models import tiny_spec

triton = pytest.importorskip("triton")

EDITS = ["custom_ops/attention/triton_decode.py", "csrc/cpu/quantized/int8_linear.cpp", "csrc/cuda/scaled_gemm.cu"]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which the digests are taken of."""
    for room in ("custom_ops", "csrc"):
        shutil.copytree(sources.PACKAGE / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "CUSTOM_OPS", tmp_path / "custom_ops")
    monkeypatch.setattr(sources, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    return tmp_path


def artifact_key() -> str:
    fields = cache_key.plan_fields(tiny_spec(), default_passes(), frozenset(), frozenset(), torch.device("cpu"), torch.float32)
    return str(fields)


def tuner_key() -> str:
    return MeasurementStore(Path("folder"), "linear", "a device").file.name


def compiled_ahead_marker() -> str:
    return triton_launch._marker("a model", torch.device("cuda", 0), None).name


KEYS: list[Callable[[], str]] = [artifact_key, tuner_key, compiled_ahead_marker]


@pytest.mark.parametrize("edited", EDITS)
def test_an_edit_changes_every_key(tree: Path, edited: str) -> None:
    before = [key() for key in KEYS]
    assert [key() for key in KEYS] == before
    with (tree / edited).open("a") as file:
        file.write("\n")
    assert all(after != old for after, old in zip((key() for key in KEYS), before, strict=True))


@pytest.mark.parametrize("added", ["custom_ops/linear/deep/triton_new.py", "csrc/cuda/deep/tiles.cuh"])
def test_a_new_file_changes_every_key(tree: Path, added: str) -> None:
    before = [key() for key in KEYS]
    (tree / added).parent.mkdir()
    (tree / added).write_text("// nothing")
    assert all(after != old for after, old in zip((key() for key in KEYS), before, strict=True))


def test_files_that_are_no_sources_change_nothing(tree: Path) -> None:
    before = [key() for key in KEYS]
    (tree / "csrc" / "notes.txt").write_text("nothing")
    assert [key() for key in KEYS] == before
