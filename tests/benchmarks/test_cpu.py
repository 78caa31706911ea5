"""The CPU benchmark's arithmetic, and that every engine gets the same weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file

from benchmarks.cpu import Worker, figures, make_cases, print_case, ratios, speedups, take_turns, write_bfloat16_gguf
from benchmarks.random_checkpoint import write_folder, write_gguf
from compile_and_serve.runtime.quantize.source import write_weights
from compile_and_serve.runtime.weights import iter_tensors, read_config
from compile_and_serve.runtime.weights.gguf_file import read_metadata
from tests.support.recurrent_models import FAMILIES, WITHOUT
from tests.support.transformers_models import SIZES


def test_figures_are_medians_of_the_differences() -> None:
    case = {"batch": 4, "prompt": 100, "new": 11}
    values = figures(case, [(0.5, 1.5), (0.4, 1.3), (9.0, 19.0)])
    assert values["prefill_tokens_per_second"] == 800.0  # 4 · 100 / 0.5
    assert values["decode_tokens_per_second"] == 40.0  # 4 · 10 / median(1.0, 0.9, 10.0)
    assert values["output_tokens_per_second"] == pytest.approx(29.3)  # 4 · 11 / 1.5
    assert values["step_ms"] == 100.0
    assert figures({"batch": 1, "prompt": 512, "new": 1}, [(0.25, 0.25)]) == {"prefill_tokens_per_second": 2048.0}


def test_speedups_are_ratios_of_rates() -> None:
    bfloat16 = {"decode_tokens_per_second": 100.0, "prefill_tokens_per_second": 3000.0, "step_ms": 10.0}
    int8 = {"decode_tokens_per_second": 170.0, "prefill_tokens_per_second": 2400.0, "step_ms": 5.9}
    assert speedups(int8, bfloat16) == {"decode_speedup": 1.7, "prefill_speedup": 0.8}


def test_ratios_are_turn_by_turn() -> None:
    own, other = [(0.1, 1.1), (0.2, 2.2), (0.1, 1.1)], [(0.2, 2.2), (0.2, 2.2), (0.1, 4.1)]
    assert ratios(own, other, 11) == [1.0, 2.0, 4.0]
    assert ratios(own, other, 1) == [1.0, 1.0, 2.0]


def test_an_engine_that_fails_is_a_line_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    case = make_cases(1000, ["prefill"])[0]
    job = {"engine": "no such engine", "quantization": None, "dtype": "bfloat16", "threads": 1, "cases": [case]}
    worker = Worker("no such engine", sys.executable, job)
    take_turns([worker], 0, case, 2)
    worker.end()
    print_case([worker], case, "a model", None, 0, {})
    row = json.loads(capsys.readouterr().out)
    assert "KeyError" in row["error"]
    assert "rounds" not in row


def test_prompts_are_the_same_in_every_run() -> None:
    assert make_cases(1000, []) == make_cases(1000, [])
    (prefill,) = make_cases(1000, ["prefill"])
    assert [len(prompt) for prompt in prefill["prompts"]] == [512]


@pytest.mark.exhaustive
def test_peers_get_the_same_bfloat16_weights(smollm2_gguf: Path, tmp_path: Path) -> None:
    write_weights(smollm2_gguf, tmp_path)
    write_bfloat16_gguf(smollm2_gguf, tmp_path / "bf16.gguf")
    again = dict(iter_tensors(tmp_path / "bf16.gguf"))
    folder = dict(iter_tensors(tmp_path))
    assert again.keys() == folder.keys()
    for name, tensor in folder.items():
        assert tensor.dtype == torch.bfloat16
        if tensor.ndim > 1:
            assert torch.equal(again[name], tensor.float()), name
    blocks = {"quantization_config": None}
    assert read_config(tmp_path / "bf16.gguf") | blocks == read_config(smollm2_gguf) | blocks
    vocabulary = "tokenizer.ggml.tokens"
    assert read_metadata(tmp_path / "bf16.gguf")[vocabulary] == read_metadata(smollm2_gguf)[vocabulary]


@pytest.mark.parametrize("architecture", ["Lfm2ForCausalLM", "Mamba2ForCausalLM"])
def test_random_weights_are_the_same_for_peers(architecture: str, tmp_path: Path) -> None:
    """In a GGUF file under llama.cpp's names, each tensor of the folder once."""
    from gguf import GGUFReader

    sizes = {name: size for name, size in (SIZES | FAMILIES[architecture]).items() if name not in WITHOUT[architecture]}
    config, folder, file = tmp_path / "config", tmp_path / "folder", tmp_path / "model.gguf"
    config.mkdir()
    model_type = {"Lfm2ForCausalLM": "lfm2", "Mamba2ForCausalLM": "mamba2"}[architecture]
    (config / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type, **sizes}))
    write_folder(config, folder)
    write_gguf(folder, file)
    theirs = load_file(folder / "model.safetensors")
    reader = GGUFReader(file)
    assert reader.fields["general.architecture"].contents() == model_type
    assert len(reader.tensors) == len(theirs)
    assert sum(int(tensor.n_elements) for tensor in reader.tensors) == sum(tensor.numel() for tensor in theirs.values())
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    ours = next(tensor for name, tensor in theirs.items() if "embed" in name and "norm" not in name)
    assert torch.equal(torch.from_numpy(dequantize(embedding.data, embedding.tensor_type)).bfloat16(), ours)
