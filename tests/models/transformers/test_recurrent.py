"""Recurrent classes of the transformers package, in its own implementation: their mixers run our ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.weights import read_config
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.recurrent_models import write_recurrent
from tests.support.transformers_models import greedy_tokens, write_random_model

# Scans of each head, shared blocks of attention with adapters for each use, and one family of each other function.
CLASSES: dict[str, dict[str, Any]] = {
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "adapter_rank": 8,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    },
    "ZambaForCausalLM": {
        "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
        "mamba_d_state": 16,
    },
}
LENGTHS = (1, 17, 70)


def write(folder: Path, name: str) -> Path:
    if name in CLASSES:
        return write_random_model(folder, name, without=("head_dim",), **CLASSES[name])
    return write_recurrent(folder, name)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*CLASSES, "Qwen3_5ForCausalLM", "Lfm2ForCausalLM"])
def test_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, and a prompt that has another one's beginning."""
    folder = write(tmp_path, name)
    prompts = [[(length * 131 + i * i * 7) % 317 + 3 for i in range(length)] for length in LENGTHS]
    core = EngineCore(
        tiny_config(folder, load_format="auto", model_impl="transformers", block_size=16, num_kv_blocks=2048, max_num_batched_tokens=48)
    )
    requests = [request(f"r{i}", prompt, max_tokens=24, ignore_eos=True) for i, prompt in enumerate(prompts)]
    outputs = tokens_of(run_requests(core, requests))
    expected = greedy_tokens(folder, prompts, 24)
    assert [outputs[one.request_id] for one in requests] == expected
    longer = [*prompts[-1], *expected[-1], 9, 8, 7]
    again = tokens_of(run_requests(core, [request("again", longer, max_tokens=8, ignore_eos=True)]))
    assert again["again"] == greedy_tokens(folder, [longer], 8)[0]
    core.shutdown()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("RecurrentGemmaForCausalLM", "it has recurrent state"),
        ("KimiLinearForCausalLM", "it keeps latent keys and values"),
        ("OlmoHybridForCausalLM", "linear_attn.conv1d.weight is computed from several tensors of a checkpoint"),
    ],
)
def test_what_is_not_known_is_refused_in_a_sentence(name: str, sentence: str, tmp_path: Path) -> None:
    import transformers

    if name == "RecurrentGemmaForCausalLM":
        config = {
            "architectures": [name],
            "model_type": "recurrent_gemma",
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
        }
    else:
        config = read_config(write(tmp_path, name))
    assert hasattr(transformers, name)
    with pytest.raises(ModelConfigError) as error:
        build_model(config, dtype=torch.float32, model_impl="transformers")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_transformers_own_models_are_as_they_were(tmp_path: Path) -> None:
    """The functions that mixers call are switched; outside of our models they are transformers' own."""
    from transformers import AutoModelForCausalLM

    folder = write(tmp_path, "MambaForCausalLM")
    tokens = torch.randint(3, 320, (1, 20))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        before = model(tokens).logits
        build_model(read_config(folder), dtype=torch.float32, model_impl="transformers")
        assert model(tokens).logits.equal(before)
