"""A checkpoint's scales of a float8 KV cache: folded into weights, they give what attention with the scales gives."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.mesh import TENSOR
from compile_and_serve.models.cache_scales import UnfoldableScalesError, weight_factors
from compile_and_serve.models.families import llama
from compile_and_serve.models.quantization.stored_weights import checkpoint_cache_dtype
from compile_and_serve.runtime.engine.core import EngineCore
from tests.runtime.weights.test_float4_checkpoints import MODELOPT, packed
from tests.support import loaded_checkpoints
from tests.support.engines import prompt_of, request, run_requests, tiny_config
from tests.support.float4_checkpoints import float4_linear
from tests.support.group_checkpoints import write_grouped
from tests.support.loaded_checkpoints import EAGER, TOKENS, write_plain
from tests.support.numbers import relative_error
from tests.support.quantized_checkpoints import compressed_tensors_config, write_quantized
from tests.support.ranks import run_ranks
from tests.support.tiny_models import caches, step, tiny_spec

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
CT = {"quant_method": "compressed-tensors"}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
K_SCALE, V_SCALE = 0.05, 0.003  # used as 2^-4 and 2^-8
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
QUANTIZED: dict[str, dict[str, Any]] = {
    "static": compressed_tensors_config("float", "tensor", "static"),
    "channel": compressed_tensors_config("int", "channel", None),
    "blocks": BLOCKS,
    "modelopt-nvfp4": MODELOPT,
    "nvfp4": packed("nvfp4-pack-quantized", 16, num_bits=4, type="float"),
}
NAMES = [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = write_plain(tmp_path_factory.mktemp(family), torch.bfloat16, family, attention_bias=True)
        return made[family]

    return make


def add_scales(folder: Path, names: tuple[str, str] = NAMES[0], values: tuple[Any, Any] = (K_SCALE, V_SCALE)) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name, value in zip(names, values, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value)
            tensors[f"model.layers.{layer}.self_attn.{name[0]}_zero_point"] = torch.zeros(2, 1, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, config: CompileConfig = EAGER, dtype: torch.dtype = torch.float32, fold: bool = True) -> Model:
    return loaded_checkpoints.load(folder, config, dtype, fold_cache_scales=fold)


def logits(model: Model) -> torch.Tensor:
    return loaded_checkpoints.logits(model, FP8)


def scaled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    return attention(q * 2**-4, k * 2**4, v * 2**8, *args, **options) * 2**-8


def reference(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(llama, "attention", scaled_attention)
        return logits(load(folder, dtype=dtype, fold=False))


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_equal_scales_in_attention(
    family: str,
    dtype: torch.dtype,
    plain: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = reference(plain(family), monkeypatch, dtype)
    assert not torch.equal(expected, logits(load(plain(family), dtype=dtype)))
    for names in NAMES if family == "Llama" and dtype == torch.float32 else NAMES[:1]:
        folder = tmp_path / names[0]
        shutil.copytree(plain(family), folder)
        assert torch.equal(logits(load(add_scales(folder, names), dtype=dtype)), expected)
        assert "not use" not in caplog.text


def write(plain: Path, folder: Path, name: str) -> tuple[Path, Path]:
    if "nvfp4" in name:
        return write_grouped(plain, folder, QUANTIZED[name], pack=float4_linear)
    return write_quantized(plain, folder, QUANTIZED[name])


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights(name: str, plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, dequantized = write(plain("Llama"), tmp_path, name)
    expected = reference(quantized, monkeypatch)
    assert torch.allclose(expected, reference(dequantized, monkeypatch), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits(load(add_scales(quantized))), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("static", 0.15), ("nvfp4", 0.02)])
def test_merged_projections(name: str, limit: float, plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, q, k and v are one linear. Static activations of o_proj are quantized by a scale that follows, too."""
    quantized, _ = write(plain("Llama"), tmp_path, name)
    expected = reference(quantized, monkeypatch)
    compiled = logits(load(add_scales(quantized), CompileConfig(cache_dir=tmp_path / "cache")))
    assert relative_error(compiled, expected) < limit


def run_rank(rank: int, folder: str, cache: str) -> torch.Tensor:
    config = CompileConfig(cache_dir=Path(cache), tensor_parallel_size=2)
    model = loaded_checkpoints.load(Path(folder), config, coordinates={TENSOR: rank}, fold_cache_scales=True)
    return step(model, TOKENS, 0, caches(model.spec, FP8, tensor_parallel_size=2), TorchAttention())


@pytest.mark.exhaustive
def test_two_ranks(plain: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = write(plain("Llama"), tmp_path, "channel")
    expected = reference(quantized, monkeypatch)
    add_scales(quantized)
    for found in run_ranks(2, run_rank, str(quantized), str(tmp_path / "cache"), folder=tmp_path):
        assert relative_error(found, expected) < 0.02


@pytest.mark.parametrize(
    ("factors", "scale"), [((4096.0, 4096.0), 4000.0), ((4096.0, 64.0), [[[32.0]], [[0.5]]])], ids=["per tensor", "per head"]
)
def test_values_beyond_float8_need_them(factors: tuple[float, float], scale: Any, plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "large"
    shutil.copytree(plain("Llama"), folder)
    tensors = load_file(folder / "model.safetensors")
    of_head = torch.tensor(factors)[:, None]  # two heads of 32 features, each for two heads of queries
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            tensors[name] = (tensor.view(2, -1) * of_head).view_as(tensor)
        elif "q_proj" in name:
            tensors[name] = (tensor.view(2, -1) / of_head).view_as(tensor)
        elif "o_proj.weight" in name:
            tensors[name] = (tensor.view(128, 2, 64) / of_head).view_as(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    exact = load(plain("Llama"))
    expected = step(exact, TOKENS, 0, caches(exact.spec, torch.float32))  # type: ignore[attr-defined]
    add_scales(folder, values=(scale, scale))
    error, without = (relative_error(logits(load(folder, fold=fold)), expected) for fold in (True, False))
    assert error < 0.05 < 0.3 < without


def test_what_is_not_used_is_said(plain: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, (family, values, fold, reason) in enumerate(
        (
            ("Llama", (K_SCALE, V_SCALE), False, "only a float8 KV cache without LoRA adapters takes them, and an int8 cache has its own"),
            ("Olmoe", (K_SCALE, V_SCALE), True, "OlmoeAttention is not linear in its projections or norms"),
            ("Gemma2", (K_SCALE, V_SCALE), True, "no attention module of ours has projections by these names"),
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(plain(family), folder)
        if family == "Olmoe":
            settings = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(settings | {"clip_qkv": 8.0}))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(add_scales(folder, values=values), fold=fold)
        assert f"The checkpoint's scales of the KV cache are not used: {reason} (model.layers.0." in caplog.text


def test_configs() -> None:
    for quantization, expected in (
        ({"quant_method": "hqq", "kv_cache_scheme": SCHEME}, None),
        (CT | {"kv_cache_scheme": SCHEME}, "fp8"),
        (CT | {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, "fp8"),
        (CT | {"kv_cache_scheme": SCHEME | {"strategy": "token"}}, None),
        (CT | {"kv_cache_scheme": SCHEME | {"dynamic": True}}, None),
        (CT | {"kv_cache_scheme": SCHEME | {"type": "int"}}, "int8"),
        (CT | {"kv_cache_scheme": SCHEME | {"type": "int", "strategy": "attn_head"}}, "int8"),
        (CT | {"kv_cache_scheme": SCHEME | {"type": "int", "strategy": "token", "dynamic": True}}, "int8"),
        (CT | {"kv_cache_scheme": SCHEME | {"type": "int", "strategy": "channel"}}, None),
        (CT | {"kv_cache_scheme": SCHEME | {"type": "int", "num_bits": 4}}, None),
        (CT | {"kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "int8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, None),
        ({"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, "fp8"),
        ({"quant_method": "quark", "export": "fp8"}, None),
        (None, None),
    ):
        assert checkpoint_cache_dtype({"quantization_config": quantization}) == expected


@pytest.mark.parametrize(
    ("option", "kind", "expected"), [("auto", "float", "float8_e4m3fn"), ("auto", "int", "int8"), ("model", "float", "float32")]
)
def test_the_engine_takes_the_checkpoint_at_its_word(
    option: str, kind: str, expected: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = SCHEME | {"type": kind, "strategy": "attn_head"}
    config = compressed_tensors_config("float", "channel", "token") | {"kv_cache_scheme": scheme}
    config["config_groups"]["attention"] = {"targets": ["LlamaAttention"], "weights": None, "input_activations": scheme}
    heads = [[[K_SCALE]], [[V_SCALE]]]
    folder = add_scales(write_quantized(plain("Llama"), tmp_path, config)[0], values=(heads, heads))
    core = EngineCore(tiny_config(folder, load_format="auto", kv_cache_dtype=option))
    assert core.info.compile_report["kv_cache_dtype"] == expected
    [steps] = run_requests(core, [request("a", prompt_of(1, 30))]).values()
    assert len(steps) == 16


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_not_finite_is_not_used(scale: float) -> None:
    with pytest.raises(UnfoldableScalesError, match="not finite"):
        weight_factors(tiny_spec(), {"model.layers.0.self_attn": (1.0, scale)})
