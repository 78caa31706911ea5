"""`merge_lora`: an adapter merged into the weights while they are loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.weights import WeightError, open_checkpoint, read_config
from compile_and_serve.runtime.weights.merged import MergedCheckpoint
from tests.support.adapters import ALL, write_adapter

OPTIONS: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 2, "num_threads": 1, "dtype": "float32", "device": "cpu"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)


def merged_tensors(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors plus scale · B A, by the formula."""
    tensors, config = load_file(model / "model.safetensors"), json.loads((adapter / "adapter_config.json").read_text())
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, a_RI in parts.items():
        if ".lora_A" not in name and ".lora_embedding_A" not in name:
            continue
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        rank = a_RI.shape[0]
        alpha = next((a for key, a in config.get("alpha_pattern", {}).items() if module.endswith(key)), config["lora_alpha"])
        change = alpha / (rank**0.5 if config.get("use_rslora") else rank) * (parts[name.replace("_A", "_B")] @ a_RI)
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = weight.float() + (change.T if "embedding" in name else change)
    return tensors


def merged_checkpoint(model: Path, adapter: Path) -> MergedCheckpoint:
    return MergedCheckpoint(open_checkpoint(model), adapter, build_model(read_config(model), dtype=torch.float32))


def untied(source: Path, target: Path) -> Path:
    """The model with an output head of its own."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return target


@pytest.mark.parametrize(
    ("targets", "config"),
    [
        (ALL, {}),
        (("q_proj", "down_proj"), {"use_rslora": True}),
        (("q_proj", "v_proj"), {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3.0}}),
        (("embed_tokens", "lm_head"), {}),
    ],
)
def test_weights_are_the_sum(tiny_llama_dir: Path, tmp_path: Path, targets: tuple[str, ...], config: dict[str, Any]) -> None:
    model = untied(tiny_llama_dir, tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, 4, targets=targets, **config)
    checkpoint = merged_checkpoint(model, adapter)
    expected, plain = merged_tensors(model, adapter), load_file(model / "model.safetensors")
    assert dict(checkpoint.shapes) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    found = dict(checkpoint.stream(set(expected)))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[name], plain[name]) is not name.removesuffix(".weight").endswith(targets)
    assert dict(checkpoint.stream({"model.norm.weight"})).keys() == {"model.norm.weight"}


def test_sums_are_rounded_once(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A checkpoint of less precision gives float32, which the loader converts to the engine's dtype."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", model, 4, targets=["q_proj"], size=0.01)
    name = "model.layers.0.self_attn.q_proj.weight"
    [(_, found)] = merged_checkpoint(model, adapter).stream({name})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, merged_tensors(model, adapter)[name])


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_answers_are_those_of_the_merged_model(tiny_llama_dir: Path, tmp_path: Path, eager: bool) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_llama_dir, 4)
    whole = tmp_path / "whole"
    shutil.copytree(tiny_llama_dir, whole)
    save_file(merged_tensors(tiny_llama_dir, adapter), whole / "model.safetensors", metadata={"format": "pt"})
    answers = []
    for model, options in ((whole, {}), (tiny_llama_dir, {"merge_lora": str(adapter)}), (tiny_llama_dir, {})):
        with LLM(str(model), enforce_eager=eager, **OPTIONS, **options) as llm:
            [output] = llm.generate(["the one"], GREEDY, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert answers[1] != answers[2]


def test_other_adapters_may_come_on_top(tiny_llama_dir: Path, tmp_path: Path) -> None:
    config = make_engine_config(str(tiny_llama_dir), merge_lora=tmp_path / "x", enable_lora=True)
    assert (config.model.merge_lora, config.enable_lora) == (tmp_path / "x", True)
    relative = make_engine_config(str(tiny_llama_dir), merge_lora="x").model.merge_lora
    assert relative == Path.cwd() / "x"
    with pytest.raises(ValueError, match="merge_lora changes the weights of a checkpoint, but load_format is dummy"):
        make_engine_config(str(tiny_llama_dir), merge_lora="x", load_format="dummy")


def rename(adapter: Path, old: str, new: str) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file)


def test_what_cannot_be_merged_is_one_sentence(tiny_llama_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_llama_dir, 4, targets=["q_proj"])
    with pytest.raises(WeightError, match="merge_lora: .*no adapter_config.json"):
        merged_checkpoint(tiny_llama_dir, tmp_path)
    rename(adapter, "q_proj", "x_proj")
    with pytest.raises(WeightError, match="x_proj, but this model takes adapters only for modules such as"):
        merged_checkpoint(tiny_llama_dir, adapter)
    rename(adapter, "self_attn.x_proj", "mlp.down_proj")
    with pytest.raises(WeightError, match="is it an adapter of another model"):
        merged_checkpoint(tiny_llama_dir, adapter)


def test_a_shared_weight_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]  # a stored head that differs would be used
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(tmp_path / "adapter", model, 4, targets=["embed_tokens"])
    with pytest.raises(WeightError, match=r"model.embed_tokens, which shares its weight: .* and .* would both change"):
        merged_checkpoint(model, adapter)


def test_a_quantized_weight_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_llama_dir, 4, targets=["q_proj"])
    model = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"changes model.layers.\d.self_attn.q_proj, which is quantized: give the unquantized model"):
        merged_checkpoint(model, adapter)
