"""Devices, dtypes and threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops import platform
from compile_and_serve.custom_ops.platform import resolve_device
from compile_and_serve.custom_ops.platforms import cpu
from compile_and_serve.runtime.child_process import one_device
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.runner import device as devices
from compile_and_serve.runtime.runner.device import model_dtype, resolve_dtype, use_threads, with_cache_dtype

CPU = torch.device("cpu")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ValueError, match="torch finds no CUDA device here: use --device cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("flags", "expected"), [({"avx512f", "avx512_bf16"}, torch.bfloat16), ({"avx512f"}, torch.float32), (set(), torch.float32)]
)
def test_auto_is_bfloat16_where_the_cpu_computes_in_it(monkeypatch: pytest.MonkeyPatch, flags: set[str], expected: torch.dtype) -> None:
    monkeypatch.setattr(cpu, "_cpu_flags", lambda: flags)
    assert resolve_dtype("auto", CPU) == expected
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "num_cores", lambda: 6)
    try:
        assert use_threads(1) == torch.get_num_threads() == 1
        for variable, expected in (("", 3), ("2", 2), ("0", 1), ("some", 3)):
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
            assert use_threads(None, 2) == torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_device_that_was_given_and_is_not_there_is_no_reason_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", 1) == CPU  # no CUDA on this machine
    monkeypatch.setattr(platform, "_has_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ValueError, match=r"^CUDA device 7 is wanted, but torch finds no such device here"):
        resolve_device("auto", 0)
    assert resolve_device("auto") == CPU
    assert resolve_device("cpu", 0) == CPU
    for nothing in ("", " ", "-1"):  # on purpose
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert resolve_device("auto", 0) == CPU


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [("0", 0), ("1", 0), ("2", 0)]),
        ("4,7", [("4", 0), ("7", 0), ("4,7", 2)]),  # too few: the child sees both, and that there is no third
        (" MIG-11, GPU-22,", [("MIG-11", 0), ("GPU-22", 0), (" MIG-11, GPU-22,", 2)]),
        ("", [("", 0), ("", 1), ("", 2)]),
    ],
)
def test_a_child_sees_one_device(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[tuple[str, int]]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen = []
    for index in range(3):
        environment, device = one_device(index, "cuda")
        seen.append(((os.environ | environment)["CUDA_VISIBLE_DEVICES"], device))
    assert seen == expected


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("model.gguf", {}, torch.float32),
        ("model.gguf", {"dtype": "float16"}, torch.float16),
        ("model.gguf", {"quantization": "int8"}, None),
        ("folder", {}, None),
    ],
)
def test_gguf_codes_are_multiplied_in_float32_on_the_cpu(
    model: str, options: dict[str, Any], expected: torch.dtype | None, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "model.gguf").touch()
    config = make_engine_config(str(tmp_path / model), device="cpu", **options)
    assert model_dtype(config, CPU) == (expected or resolve_dtype("auto", CPU))


@pytest.mark.parametrize(
    ("option", "model_config", "expected"), [("auto", {}, "int8"), ("auto", {"kv_lora_rank": 512}, "model"), ("fp8", {}, "fp8")]
)
def test_the_dtype_of_the_cache_of_an_int8_checkpoint(
    option: str, model_config: dict[str, Any], expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = make_engine_config(str(tmp_path), device="cpu", kv_cache_dtype=option)
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "tensor"}}
    found = with_cache_dtype(config, model_config | {"quantization_config": scheme}, CPU)
    assert found.cache.dtype == expected
    assert ("latent attention does not have" in caplog.text) == ("kv_lora_rank" in model_config)
