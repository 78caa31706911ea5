"""`quantize_checkpoint`: the flow with a stand-in for llm-compressor, and, where that is installed, the real one."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.quantize import flow
from compile_and_serve.runtime.quantize.flow import QuantizeReport, calibration_text, quantize_checkpoint, split_text
from compile_and_serve.runtime.quantize.llm_compressor import Scheme, int4_group_size
from compile_and_serve.runtime.quantize.source import write_gguf_tokenizer
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.serve.cli.main import app
from tests.support.quantized_checkpoints import compressed_tensors_config, write_quantized

ENGINE = {"num_kv_blocks": 128, "num_threads": 1, "device": "cpu"}
TEXT = "The ferry left the harbour before the sun was up, and nobody on the quay said a word. " * 100


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "calibration.txt"
    file.write_text(TEXT)
    return file


def stand_in(source: Path, folder: Path, scheme: Scheme, calibration: Sequence[Sequence[int]]) -> None:
    """Round the linears to int8 without calibration."""
    assert scheme == "int8"
    assert calibration
    quantized, _ = write_quantized(source, folder / "work", compressed_tensors_config("int", "channel", "token"))
    for name in ("config.json", "model.safetensors"):
        (quantized / name).rename(folder / name)
    for path in sorted((folder / "work").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / "work").rmdir()


def test_the_flow_writes_a_checkpoint_and_its_perplexity(tiny_llama_dir: Path, tmp_path: Path, text_file: Path) -> None:
    output = tmp_path / "new" / "quantized"
    stages: list[str] = []
    report = quantize_checkpoint(
        str(tiny_llama_dir), output, "int8", calibration=text_file, quantizer=stand_in, on_stage=stages.append, enforce_eager=True, **ENGINE
    )
    assert stages == ["perplexity before", "quantizing to int8", "perplexity after"]
    assert report.tokens == 510  # one sequence of 511 tokens, the model's limit but one
    assert report.perplexity_before != report.perplexity_after
    assert math.isclose(report.perplexity_before, report.perplexity_after, rel_tol=0.2)
    assert report.group_size is None
    assert sorted(path.name for path in output.parent.iterdir()) == ["quantized"]  # no scratch folder is left
    assert json.loads((output / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    assert load_tokenizer(output).encode("a b") == load_tokenizer(tiny_llama_dir).encode("a b")


def test_the_command_passes_its_options_and_prints_the_perplexities(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def quantize(*arguments: object, **options: object) -> QuantizeReport:
        given.update({"arguments": arguments, **options})
        return QuantizeReport(tokens=510, perplexity_before=8.0, perplexity_after=8.4, group_size=64)

    monkeypatch.setattr(flow, "quantize_checkpoint", quantize)
    output = tmp_path / "out"
    options = f"-o {output} --scheme int4 --calibration {text_file} --num-samples 6"
    result = CliRunner().invoke(app, ["quantize", "model", *options.split()])
    assert result.exit_code == 0
    assert result.stdout == (f"{output}: int4, groups of 64 inputs\nperplexity on 510 tokens: 8.000 before, 8.400 after (+5.0 %)\n")
    assert given["arguments"] == ("model", output, "int4")
    assert (given["calibration"], given["num_samples"]) == (text_file, 6)


def test_perplexity_is_the_models(tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = load_tokenizer(tiny_llama_dir).encode(TEXT)[:40]
    sequences = [tokens[:20], tokens[20:]]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    losses = [model(input_ids=ids, labels=ids).loss.item() for ids in (torch.tensor([s]) for s in sequences)]
    found = flow.perplexity(str(tiny_llama_dir), sequences, dtype="float32", enforce_eager=True, **ENGINE)
    assert math.isclose(found, math.exp(sum(losses) / 2), rel_tol=1e-3)


def test_a_failure_leaves_nothing_behind(tiny_llama_dir: Path, tmp_path: Path, text_file: Path, monkeypatch) -> None:
    def fails(*_arguments: object) -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(flow, "perplexity", lambda *_arguments, **_options: 1.0)
    output = tmp_path / "quantized"
    with pytest.raises(ValueError, match="no luck"):
        quantize_checkpoint(str(tiny_llama_dir), output, "int8", calibration=text_file, quantizer=fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.txt"]


def test_a_folder_that_holds_something_is_refused(tiny_llama_dir: Path, tmp_path: Path, text_file: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(tiny_llama_dir), "-o", str(tmp_path), "--scheme", "int8"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not empty: give a new or empty folder" in result.stderr
    with pytest.raises(ValueError, match="is a file: give a new folder"):
        quantize_checkpoint(str(tiny_llama_dir), text_file, "int8")


def test_a_quantized_model_is_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((tiny_llama_dir / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_checkpoint(str(model), tmp_path / "out", "int8", quantizer=stand_in)


def test_the_missing_package_is_a_sentence(tiny_llama_dir: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(flow, "resolve_model", None)  # which may download a model
    with pytest.raises(ValueError, match=r"needs the package llmcompressor: install compile-and-serve\[quantize\]"):
        quantize_checkpoint(str(tiny_llama_dir), tmp_path / "out", "int8")


def test_a_text_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "text"
    with pytest.raises(ValueError, match=f"--calibration {file} cannot be read"):
        calibration_text(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        calibration_text(file)
    file.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        calibration_text(file)
    with pytest.raises(ValueError, match="has 1000 tokens: give one with at least 1024"):
        split_text(list(range(1000)), 512, 4)


def test_samples_are_spread_over_the_text_and_apart_from_what_is_held_out() -> None:
    samples, held_out = split_text(list(range(1005)), 10, 9)
    assert [sequence[0] for sequence in held_out] == [920 + 10 * i for i in range(8)]
    assert [sequence[0] for sequence in samples] == [0, 100, 200, 300, 400, 510, 610, 710, 810]
    assert all(len(sequence) == 10 for sequence in samples + held_out)
    assert split_text(list(range(20)), 10, 9) == ([list(range(10))], [list(range(10, 20))])


def test_pythons_documentation_is_the_text_by_default() -> None:
    assert "assert" in calibration_text(None)
    assert len(calibration_text(None)) > 300_000


def test_int4_takes_the_largest_group_that_fits() -> None:
    assert int4_group_size([4096, 14336]) == 128
    assert int4_group_size([576, 1536]) == 64
    assert int4_group_size([96, 1536]) == 32
    with pytest.raises(ValueError, match="multiple of 32, and one has 40: use fp8 or int8"):
        int4_group_size([64, 40])


def test_a_gguf_tokenizer_is_written_as_hugging_face_stores_it(tiny_llama_dir: Path, tmp_path: Path, monkeypatch) -> None:
    from compile_and_serve.runtime.quantize import source

    tokenizer = load_tokenizer(tiny_llama_dir)
    monkeypatch.setattr(source, "load_tokenizer", lambda _path: tokenizer)
    write_gguf_tokenizer(Path("model.gguf"), tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.encode("Hello <|im_end|>") == tokenizer.encode("Hello <|im_end|>")
    assert again.special_tokens["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert again.chat_templates["default"] == tokenizer.chat_templates["default"]
    assert again.eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_llm_compressors_checkpoint_is_served(
    scheme: Scheme, tiny_llama_dir: Path, tmp_path: Path, text_file: Path, shared_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("llmcompressor") is None:
        pytest.skip("llm-compressor is not installed")
    output = tmp_path / "quantized"
    report = quantize_checkpoint(
        str(tiny_llama_dir),
        output,
        scheme,
        calibration=text_file,
        num_samples=2,
        dtype="float32",
        cache_dir=str(shared_cache_dir),
        **ENGINE,
    )
    assert report.group_size == (64 if scheme == "int4" else None)
    assert 0.5 < report.perplexity_after / report.perplexity_before < 2
    tensors = load_file(output / "model.safetensors")
    name = "model.layers.0.mlp.down_proj."
    assert (name + ("weight_packed" if scheme == "int4" else "weight_scale")) in tensors

    from transformers import AutoModelForCausalLM

    ids = load_tokenizer(output).encode("The ferry left the harbour")
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(output), dtype="float32", cache_dir=str(shared_cache_dir), **ENGINE) as llm:
        assert llm.info.compile_report["pass_sites.quantize_linears.matched"] == 8  # QKV and gate/up are merged
        tokens = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)[0].outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    if scheme == "int8":
        scale_activations_by_127(monkeypatch)
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12, min_new_tokens=12)
    assert tokens == expected[0, len(ids) :].tolist()


def scale_activations_by_127(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors' scale of a token's int8 activations is max |x| / 127.5, ours max |x| / 127."""
    from compressed_tensors.quantization.utils import helpers

    theirs = helpers.calculate_qparams

    def ours(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scale, zero_point = theirs(*args, **kwargs)
        return scale * (127.5 / 127), zero_point

    monkeypatch.setattr(helpers, "calculate_qparams", ours)
