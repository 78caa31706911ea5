"""`hf_overrides`: fields that replace those of config.json, and RoPE in both of its spellings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve import LLM
from compile_and_serve.models.config import _rope
from compile_and_serve.option_fields import json_object
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.weights import WeightError, read_model_config
from compile_and_serve.runtime.weights.overrides import overridden
from compile_and_serve.runtime.weights.stored_method import scheme_to_apply

OLDER = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
NEWER = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3, "c": None}, {"a": 3, "b": 2, "c": None}),
        ({"text_config": {"a": 1, "b": 2}}, {"text_config": {"a": 3}}, {"text_config": {"a": 3, "b": 2}}),
        ({"id2label": {"0": "x", "1": "y"}}, {"id2label": {"0": "z"}}, {"id2label": {"0": "z"}}),
        ({"text_config": 1}, {"text_config": {"a": 3}}, {"text_config": {"a": 3}}),
    ],
)
def test_fields_are_replaced(config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]) -> None:
    assert overridden(config, overrides) == expected


@pytest.mark.parametrize("config", [OLDER, NEWER], ids=["older", "newer"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_parameters": YARN},
        {"rope_parameters": {**YARN, "rope_theta": 500000.0}},
    ],
)
def test_rope_is_replaced_in_both_spellings(config: dict[str, Any], overrides: dict[str, Any]) -> None:
    assert _rope(overridden(config, overrides)) == {**YARN, "rope_theta": 500000.0}


@pytest.mark.parametrize("config", [OLDER, NEWER], ids=["older", "newer"])
def test_the_base_of_rope_is_replaced_alone(config: dict[str, Any]) -> None:
    assert _rope(overridden(config, {"rope_theta": 1e6})) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert _rope(overridden(config, {"rope_scaling": None}))["rope_type"] == "default"


@pytest.mark.parametrize("given", ["[1]", "{", "1", "null"])
def test_overrides_must_be_an_object(given: str) -> None:
    with pytest.raises(ValueError, match="hf_overrides must be a JSON object"):
        json_object("hf_overrides")(given)


def test_an_override_reaches_the_model(tiny_llama_dir: Path) -> None:
    options: dict[str, Any] = {"enforce_eager": True, "num_kv_blocks": 64, "max_num_seqs": 2, "num_threads": 1, "dtype": "float32"}
    config = make_engine_config(str(tiny_llama_dir), hf_overrides='{"max_position_embeddings": 32}', **options)
    assert read_model_config(config.model)["max_position_embeddings"] == 32
    with LLM(str(tiny_llama_dir), hf_overrides={"max_position_embeddings": 32}, **options) as llm:
        assert llm.info.max_model_len == 32


def folder(tmp_path: Path, source: Path, quantization: dict[str, Any] | None) -> Path:
    path = tmp_path / "model"
    shutil.copytree(source, path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ({} if quantization is None else {"quantization_config": quantization})))
    return path


@pytest.mark.parametrize(
    ("given", "stored", "scheme"),
    [
        (None, "awq", None),
        ("awq", "awq", None),
        ("awq_marlin", "awq", None),
        ("gptq_marlin", "gptq", None),
        ("compressed-tensors", "compressed-tensors", None),
        ("fp8", "fp8", None),
        ("fp8", None, "fp8"),
        ("int8", None, "int8"),
        ("fp8", "gptq", "fp8"),  # refused later, with the reason
    ],
)
def test_the_name_of_the_checkpoints_format_is_no_scheme(
    tiny_llama_dir: Path, tmp_path: Path, given: Any, stored: str | None, scheme: str | None
) -> None:
    path = folder(tmp_path, tiny_llama_dir, None if stored is None else {"quant_method": stored})
    assert scheme_to_apply(given, path) == scheme
    assert make_engine_config(str(path), quantization=given).compile.quantization == scheme


def test_a_gguf_file_is_quantized_as_it_is(tmp_path: Path) -> None:
    assert scheme_to_apply("gguf", tmp_path / "model.gguf") is None  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="--quantization is awq, but the weights in model.gguf are stored as gguf"):
        scheme_to_apply("awq", tmp_path / "model.gguf")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "stored", "message"),
    [
        ("awq", "gptq", "--quantization is awq, but the weights in model are stored as gptq: leave it out"),
        ("awq", None, "awq is the format of quantized files, but model is not quantized: leave it out, or choose fp8"),
        ("int3", None, "quantization must be one of fp8, fp8-block, fp8-weight-only, int8, int8-weight-only, int4, got 'int3'"),
    ],
)
def test_another_format_is_one_sentence(tiny_llama_dir: Path, tmp_path: Path, given: Any, stored: str | None, message: str) -> None:
    path = folder(tmp_path, tiny_llama_dir, None if stored is None else {"quant_method": stored})
    with pytest.raises(ValueError, match=message):
        make_engine_config(str(path), quantization=given)
