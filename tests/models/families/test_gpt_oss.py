"""gpt-oss with experts in MXFP4, against transformers with its own conversion of the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.layers import inverse_frequencies, rope_magnitude
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from tests.models.families.test_moe import loaded
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.mxfp4_checkpoints import write_gpt_oss
from tests.support.tiny_models import plain_logits
from tests.support.transformers_models import config_of, greedy_tokens

NUM_TOKENS = 64
LENGTHS = (3, 60, 20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[list[int]]:
    return greedy_tokens(folders[1], [prompt_of(i, length) for i, length in enumerate(LENGTHS)], NUM_TOKENS)


def served(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy tokens of all prompts in one batch, in chunks; the report of the compilation."""
    core = EngineCore(tiny_config(folder, load_format="auto", max_num_batched_tokens=32, max_model_len=256, **options))
    requests = [request(f"r{i}", prompt_of(i, length), max_tokens=NUM_TOKENS, ignore_eos=True) for i, length in enumerate(LENGTHS)]
    tokens = tokens_of(run_requests(core, requests))
    report = core.info.compile_report
    core.shutdown()
    return [tokens[one.request_id] for one in requests], report


@pytest.mark.parametrize("num_tokens", [1, 90])
def test_logits_equal_transformers(folders: tuple[Path, Path], num_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    packed, plain = folders
    tokens = torch.randint(3, 320, (num_tokens,)).tolist()
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    for folder in (packed, plain):
        torch.testing.assert_close(plain_logits(loaded(folder), tokens, torch.float32), logits, rtol=1e-4, atol=1e-4)


def test_weights_are_equal_bit_for_bit(folders: tuple[Path, Path]) -> None:
    quantized, plain = (dict(loaded(folder).module.named_parameters()) for folder in folders)
    assert quantized.keys() == plain.keys()
    assert all(torch.equal(quantized[name], plain[name]) for name in plain)


def test_eager_tokens(folders: tuple[Path, Path], expected: list[list[int]]) -> None:
    assert served(folders[0])[0] == expected


def test_compiled_tokens(folders: tuple[Path, Path], expected: list[list[int]], tmp_path: Path) -> None:
    tokens, report = served(folders[0], enforce_eager=False, cache_dir=tmp_path)
    assert tokens == expected
    assert report["distinct_pieces"] == 3


@pytest.mark.exhaustive
def test_two_ranks_serve_the_same_tokens(folders: tuple[Path, Path], expected: list[list[int]], tmp_path: Path) -> None:
    assert served(folders[0], tensor_parallel_size=2, enforce_eager=False, cache_dir=tmp_path)[0] == expected


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("mscale", [{}, {"mscale": 0.7, "mscale_all_dim": 0.5}, {"attention_factor": 1.5}])
def test_yarn_equals_transformers(truncate: bool, mscale: dict[str, float]) -> None:
    from transformers import GptOssConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": truncate,
        "original_max_position_embeddings": 4096,
        **mscale,
    }
    config = GptOssConfig(rope_parameters=dict(rope), head_dim=64, max_position_embeddings=131072)
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    torch.testing.assert_close(inverse_frequencies(rope, 64), frequencies, rtol=1e-6, atol=0)
    assert rope_magnitude(rope) == pytest.approx(magnitude, rel=1e-12)


def test_other_quantizations_are_refused() -> None:
    config = config_of(
        "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, quantization_config={"quant_method": "fp8"}
    )
    with pytest.raises(ModelConfigError, match="quantized with 'fp8', but gpt-oss is supported with 'mxfp4' only"):
        build_model(config, dtype=torch.float32)


def test_sizes_must_be_whole_blocks() -> None:
    config = config_of(
        "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, intermediate_size=40, quantization_config={"quant_method": "mxfp4"}
    )
    with pytest.raises(ModelConfigError, match="down_proj has 40 inputs, but MXFP4 needs a multiple of 32"):
        build_model(json.loads(json.dumps(config)), dtype=torch.float32)
