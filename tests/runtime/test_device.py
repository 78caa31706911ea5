"""Devices, dtypes and threads."""

from __future__ import annotations

import pytest
import torch

from runtime import device as devices
from runtime.device import resolve_device, resolve_dtype, use_threads

CPU = torch.device("cpu")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ValueError, match="torch finds no CUDA device here: use --device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx512f", "avx512_bf16"}, torch.bfloat16), ({"avx512f"}, torch.float32), (set(), torch.float32)],
)
def test_auto_is_bfloat16_where_the_cpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], expected: torch.dtype
) -> None:
    monkeypatch.setattr(devices, "_cpu_flags", lambda: flags)
    assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


def test_threads() -> None:
    before = torch.get_num_threads()
    try:
        assert use_threads(1) == torch.get_num_threads() == 1
        assert use_threads(None) == torch.get_num_threads() >= 1
    finally:
        torch.set_num_threads(before)
