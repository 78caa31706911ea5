"""csrc/cuda/group_linear.cu builds without a GPU, and says which linears it does not take."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.jit.cuda import find_nvcc

pytest.importorskip("triton")

from compile_and_serve.custom_ops.quantized import cuda_group_linear, group_gemm
from compile_and_serve.custom_ops.quantized.cuda_group_linear import CUDA, EXPANDED, TILE, GroupLinear
from compile_and_serve.custom_ops.quantized.group_gemm import group_linear_library, unsupported_reason


def has_nvcc() -> bool:
    try:
        find_nvcc()
    except BuildError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc(), reason="nvcc was not found")
def test_it_builds(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = group_linear_library().build()
    assert path.is_relative_to(tmp_path)
    library = ctypes.CDLL(str(path))
    assert library.cas_group_linear_float16
    assert library.cas_group_linear_bfloat16


def test_a_library_that_does_not_run_here_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    error: bytes | None = b"CUDA driver version is insufficient for CUDA runtime version"

    class Entry:
        def __call__(self, arguments: object) -> bytes | None:
            return error

    library = SimpleNamespace(cas_group_linear_float16=Entry(), cas_group_linear_bfloat16=Entry())
    monkeypatch.setattr(group_gemm, "load_or_build", lambda *args, **options: library)
    load = group_gemm.load_group_linear.__wrapped__
    with caplog.at_level("WARNING"):
        assert load(torch.device("cpu")) is None
    assert "driver version is insufficient" in caplog.text
    error = None
    assert load(torch.device("cpu")) is library


def test_what_it_does_not_take() -> None:
    x, scale = torch.zeros(3, 256, dtype=torch.float16), torch.zeros(2, 2, 64, dtype=torch.float16)
    zeros = torch.zeros(2, 2, 64, dtype=torch.uint8)
    taken: dict[str, Any] = {
        "x_TI": x,
        "scale": scale,
        "offset": zeros,
        "out_features": 128,
        "bits": 4,
        "group_size": 128,
        "silu_mul": False,
        "table": "",
    }
    assert unsupported_reason(**taken) is None
    assert unsupported_reason(**taken | {"offset": None, "group_size": 32}) is None
    for change, word in [
        ({"bits": 8}, "4 bits"),
        ({"table": "nf4"}, "integers"),
        ({"x_TI": x.float()}, "float16"),
        ({"offset": scale}, "zero points"),
        ({"group_size": 96}, "96"),
        ({"silu_mul": True, "out_features": 192}, "96"),
        ({"x_TI": torch.zeros(3, 260, dtype=torch.float16)[:, :256]}, "16 bytes"),
        ({"x_TI": torch.zeros(3, 252, dtype=torch.float16)}, "8 inputs"),
    ]:
        reason = unsupported_reason(**taken | change)
        assert reason is not None
        assert word in reason


def test_it_is_measured_once_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nvcc was missing before, the kept choice is one among the others."""
    library: object = None
    monkeypatch.setattr(cuda_group_linear, "load_group_linear", lambda device: library)

    def linear(num_tokens: int) -> GroupLinear:
        return GroupLinear(
            x_TI=torch.zeros(num_tokens, 256, dtype=torch.float16),
            packed=torch.zeros(2, 2, 64, 32, dtype=torch.int16),
            scale=torch.zeros(2, 2, 64, dtype=torch.float16),
            offset=None,
            out_features=128,
            bits=4,
            group_size=128,
        )

    kernels = {num_tokens: linear(num_tokens).kernels() for num_tokens in (1, 64, 65, 512, 513)}
    assert kernels == {1: (TILE,), 64: (TILE,), 65: (EXPANDED, TILE), 512: (EXPANDED, TILE), 513: (EXPANDED,)}
    before = linear(65).problem()
    library = object()
    kernels = {num_tokens: linear(num_tokens).kernels() for num_tokens in kernels}
    assert kernels == {1: (CUDA,), 64: (CUDA,), 65: (CUDA, EXPANDED, TILE), 512: (CUDA, EXPANDED, TILE), 513: (EXPANDED,)}
    assert linear(65).problem().key != before.key
    assert linear(512).problem().name == linear(65).problem().name
