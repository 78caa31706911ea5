# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""Triton's folder while Inductor compiles for a CUDA device, and afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from compile_and_serve.compiler.inductor import _cache_dir, start_inductor

CUDA = torch.device("cuda")


VARIABLES = ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_a_block_changes_the_folders_only_inside(before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    outside, ptxas = triton.knobs.cache.dir, triton.knobs.nvidia.ptxas.path
    for piece in ("a", "b"):
        with _cache_dir(tmp_path / piece, CUDA):
            # Also the environment variables: Inductor and its processes read only those.
            assert os.environ["TRITON_CACHE_DIR"] == triton.knobs.cache.dir == str(tmp_path / piece / "triton")
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / piece)
            assert os.environ["TRITON_PTXAS_PATH"] == triton.knobs.nvidia.ptxas.path == ptxas
        assert [os.environ.get(name) for name in VARIABLES] == [before, None]
        assert triton.knobs.cache.dir == outside
    with pytest.raises(RuntimeError, match="fails"), _cache_dir(tmp_path / "c", CUDA):
        raise RuntimeError("it fails")
    assert [os.environ.get(name) for name in VARIABLES] == [before, None]


def test_blocks_for_pieces_add_no_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with start_inductor(CUDA, tmp_path / "probes"):
        before = dict(os.environ)
        with _cache_dir(tmp_path / "piece", CUDA):
            assert set(os.environ) == set(before)
            assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "piece" / "triton")
        assert dict(os.environ) == before
    assert [os.environ.get(name) for name in VARIABLES] == [None, None]


def test_inductor_sets_no_folder_for_the_whole_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets its own folder and its own ptxas where none is set."""
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    _set_triton_ptxas_path.cache_clear()
    with _cache_dir(tmp_path, CUDA):
        _set_triton_ptxas_path()
        assert os.environ["TRITON_PTXAS_PATH"] == triton.knobs.nvidia.ptxas.path
    _set_triton_ptxas_path()
    assert [os.environ.get(name) for name in VARIABLES] == [None, None]


def test_on_a_cpu_triton_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with _cache_dir(tmp_path, torch.device("cpu")):
        assert "TRITON_CACHE_DIR" not in os.environ
    assert "TRITON_CACHE_DIR" not in os.environ
