"""A checkpoint format from outside of the package, in one file, is read, verified, and served by the kernels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.weights import read_config
from tests.support import ternary_format
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of

LAYERS = 2


def write_ternary(plain: Path, folder: Path) -> tuple[Path, Path]:
    """The folders of a model in the format, and of the same weights without it."""
    ternary, same = folder / "ternary", folder / "same"
    for made in (ternary, same):
        shutil.copytree(plain, made)
    stored, dequantized = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if weight.dim() != 2 or "proj" not in name:
            stored[name] = dequantized[name] = weight.float()
            continue
        groups = weight.float().unflatten(1, (-1, ternary_format.GROUP))
        step = groups.abs().mean(2) * 1.5
        trits = (groups / step[:, :, None]).round().clamp(-1, 1)
        codes = (trits.flatten(1) + 2).to(torch.uint8)
        stored[f"{name}_trits"] = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
        stored[f"{name}_step"] = step
        dequantized[name] = (trits * step[:, :, None]).flatten(1)
    for made, tensors in ((ternary, stored), (same, dequantized)):
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((plain / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "ternary", "group_size": ternary_format.GROUP}
    (ternary / "config.json").write_text(json.dumps(settings))
    return ternary, same


@pytest.mark.slow
def test_a_format_is_read_verified_and_served(plain: Path, tmp_path: Path) -> None:
    ternary, same = write_ternary(plain, tmp_path)
    options = {"enforce_eager": False, "cache_dir": tmp_path / "cache", "verify_passes": True, "load_format": "auto"}
    core = EngineCore(tiny_config(ternary, **options))
    report = core.info.compile_report
    assert [report[f"pass_sites.quantize_linears.{count}"] for count in ("matched", "expected")] == [4 * LAYERS, 4 * LAYERS]
    assert not [key for key in report if key.startswith("failed_passes")]
    requests = [request(str(i), prompt_of(i, 5 + i)) for i in range(3)]
    served = tokens_of(run_requests(core, requests))
    expected = tokens_of(run_requests(EngineCore(tiny_config(same, load_format="auto")), requests))
    assert served == expected
    dummy = EngineCore(tiny_config(ternary))
    assert len(tokens_of(run_requests(dummy, requests[:1]))["0"]) == 16


def test_a_wrong_config_is_the_formats_error(plain: Path) -> None:
    config = dict(read_config(plain)) | {"quantization_config": {"quant_method": "ternary", "group_size": 64}}
    with pytest.raises(ModelConfigError, match="Ternary weights have groups of 32, not of 64"):
        build_model(config, dtype=torch.float32)
