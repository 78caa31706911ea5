# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""Where Triton keeps what Inductor has it build for a CUDA device, and what our own kernels find outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from compile_and_serve.compiler.inductor import _cache_dir

CUDA = torch.device("cuda")


@pytest.mark.parametrize("before", [None, "/somewhere"])
def test_triton_keeps_a_piece_beside_it_and_everything_else_where_it_was(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    outside = triton.knobs.cache.dir
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
        outside = before
    ptxas = triton.knobs.nvidia.ptxas.path
    for piece in ("a", "b"):
        with _cache_dir(tmp_path / piece, CUDA):
            assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / piece / "triton")
            assert triton.knobs.cache.dir == str(tmp_path / piece / "triton")
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / piece)
        # Set, not unset: Inductor would set it for good.
        assert os.environ["TRITON_CACHE_DIR"] == outside == triton.knobs.cache.dir
        assert os.environ["TRITON_PTXAS_PATH"] == ptxas
    with pytest.raises(RuntimeError, match="fails"), _cache_dir(tmp_path / "c", CUDA):
        raise RuntimeError("it fails")
    assert os.environ["TRITON_CACHE_DIR"] == outside


def test_on_the_cpu_triton_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with _cache_dir(tmp_path, torch.device("cpu")):
        assert "TRITON_CACHE_DIR" not in os.environ
    assert "TRITON_CACHE_DIR" not in os.environ
